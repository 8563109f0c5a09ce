"""Gumbel noise of the step kernels, a class a scheme: what a row's draws start from, a cheap bound on a draw, and the draw itself.

A bound is given by an fp32 number x: noise log2(e) <= BITS - log2(x) within rounding. Where x is negative, and its logarithm NaN,
it says nothing; where x is 0 the bound is infinite. step_scan.py has what it is for. noise_math.py has the schemes.
"""

from collections.abc import Sequence

from cutlass import Float32, Float64, Int32, Uint32, Uint64

from . import step_math

HIGH_DOMAIN = 0x9E3779B9  # hash seed of the upper word of 64 bits
LOWER_HALF = 2.0**16
ALL_ONES = 0xFFFFFFFF


class Murmur32:
    """fp32 noise -log(-log(1 - u)) of u = (x + 0.5) / 2^32, x the hash. Large noise comes from small u.

    -log(1 - u) >= u >= x / 2^32, hence noise <= -log(x / 2^32). The hash's last operation changes the lower half of its word w
    only, so x >= w - 2^16, and the operation is left out.
    """

    BITS = 32.0

    @staticmethod
    def keyed(seed: Uint64, key: Uint64) -> list[Uint32]:
        """What all draws of a row start from; the seed has the draft step mixed in."""
        return [step_math.hash_prefix(seed, key)]

    @staticmethod
    def screen(keyed: Sequence[Uint32], token: Int32) -> Float32:
        """The number x of a target id's bound."""
        return Float32(step_math.hash_word(keyed[0], token)) - Float32(LOWER_HALF)

    @staticmethod
    def noise(keyed: Sequence[Uint32], token: Int32) -> Float32:
        """The noise of a target id."""
        return step_math.gumbel(step_math.hash_token(keyed[0], token))


class Murmur64:
    """fp64 noise -log(-log(u)) of the upper 53 of 64 random bits, two hashes. Large noise comes from u near 1.

    With h the upper word, u <= (h + 1) / 2^32, also as rounded; so -log(u) >= 1 - u >= (2^32 - 1 - h) / 2^32, hence
    noise <= -log(~h / 2^32). As above ~h >= ~w - 2^16 for the word w before its last operation. The lower hash is not needed.
    """

    BITS = 32.0

    @staticmethod
    def keyed(seed: Uint64, key: Uint64) -> list[Uint32]:
        """As for Murmur32."""
        return [step_math.hash_prefix(seed, key, HIGH_DOMAIN), step_math.hash_prefix(seed, key)]

    @staticmethod
    def screen(keyed: Sequence[Uint32], token: Int32) -> Float32:
        """As for Murmur32."""
        return Float32(step_math.hash_word(keyed[0], token) ^ Uint32(ALL_ONES)) - Float32(LOWER_HALF)

    @staticmethod
    def noise(keyed: Sequence[Uint32], token: Int32) -> Float64:
        """As for Murmur32, in fp64."""
        high, low = (step_math.hash_token(prefix, token) for prefix in keyed)
        return step_math.gumbel_wide(high, low)


class Philox32:
    """fp32 noise -log(-log1p(-u)) of u = max(m, 1) / 2^31, m a Philox word's 31 bits. Large noise comes from small u.

    -log1p(-u) >= u >= m / 2^31 but for roundings, hence noise <= -log(m / 2^31). The word takes ten rounds, bound or not.
    """

    BITS = 31.0

    @staticmethod
    def keyed(seed: Uint64, key: Uint64) -> list[Uint32]:
        """As for Murmur32: a first draw from seed and key."""
        return [step_math.philox(seed, key)]

    @staticmethod
    def screen(keyed: Sequence[Uint32], token: Int32) -> Float32:
        """As for Murmur32."""
        return Float32(step_math.mirrored(Philox32._word(keyed, token)))

    @staticmethod
    def noise(keyed: Sequence[Uint32], token: Int32) -> Float32:
        """As for Murmur32."""
        return step_math.gumbel_of_philox(Philox32._word(keyed, token))

    @staticmethod
    def _word(keyed: Sequence[Uint32], token: Int32) -> Uint32:
        return step_math.philox(Uint64(keyed[0]), Uint64(Uint32(token)))


SCHEMES = {"murmur3_32": Murmur32, "murmur3_64": Murmur64, "philox_32": Philox32}
"""By `noise.scheme` of the spec."""
