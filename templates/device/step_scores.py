"""Scores of the step kernels, fp32 or fp64: their order, the key of a row's best candidate in memory, and their packet field.

A key is a list of 32-bit words, the most significant first: the score's rank, then the complement of the id, so that the largest
key is the winner's. A rank is `keys.ordered` of an fp32 score, or the same of an fp64 one in two words: -0.0 equals +0.0, and every
NaN is the largest of all. Its first word is 0 for no score, not even for -inf. A hint is the rank of the score as fp32.
"""

from collections.abc import Sequence

from cutlass import Float32, Float64, Int32, Int64, Uint32, Uint64

from . import keys, ptx, step_math, step_memory, step_sizes

ALL_ONES = 0xFFFFFFFF
MINUS_INFINITY = -float("inf")


class Scores32:
    """fp32 scores. A row's key is one 64-bit word."""

    FIELD = "score"  # of a packet
    RANK_WORDS = 1
    KEY_WORDS = 2
    Score = Float32

    @staticmethod
    def of_logit(logit: Float32) -> Float32:
        """The score of a greedy row's logit."""
        return logit

    @staticmethod
    def noised(quotient: Float32, noise: Float32) -> Float32:
        """The score of a logit over the temperature, and its noise."""
        return ptx.add_rn(quotient, noise)

    @staticmethod
    def rank(score: Float32) -> list[Uint32]:
        """The words of a score's rank."""
        return [keys.ordered(score)]

    @staticmethod
    def hint(score: Float32) -> Uint32:
        """The rank of the score as fp32."""
        return keys.ordered(score)

    @staticmethod
    def score_of(rank: Sequence[Uint32]) -> Float32:
        """The score of a rank; NaN for the rank of none."""
        return score_of_hint(rank[0])

    @staticmethod
    def is_nan(score: Float32) -> Uint32:
        """1 for NaN, else 0."""
        return ptx.select(score == score, Uint32(0), Uint32(1))

    @staticmethod
    def packet_words(score: Float32) -> list[Uint32]:
        """The words of the packet field, as they lie."""
        return [ptx.bits_of(score)]

    @staticmethod
    def of_packet(words: Sequence[Uint32]) -> Float32:
        """The score in a packet field."""
        return ptx.float_of(words[0])

    @staticmethod
    def raise_key(address: Int64, key: Sequence[Uint32]) -> None:
        """Makes a row's key at least `key`, of a candidate."""
        step_memory.raise_key(address, (Uint64(key[0]) << Uint64(step_math.WORD_BITS)) | Uint64(key[1]))

    @staticmethod
    def hint_in_memory(address: Int64) -> Uint32:
        """The hint of a row's key, which others may raise meanwhile; 0 while there is none."""
        return step_math.high_word(ptx.ld_relaxed_gpu(address))

    @staticmethod
    def take_key(address: Int64) -> list[Uint32]:
        """A row's key, which nobody raises any more; leaves none."""
        key = ptx.ld_relaxed_gpu(address)
        ptx.stg_s64(address, Int64(0))
        return [step_math.high_word(key), step_math.low_word(key)]


class Scores64:
    """fp64 scores. A row's key is one 128-bit word: its upper half the rank, its lower half the id's complement."""

    FIELD = "score64"
    RANK_WORDS = 2
    KEY_WORDS = 3
    Score = Float64

    @staticmethod
    def of_logit(logit: Float32) -> Float64:
        """As for Scores32."""
        return step_math.widened(logit)

    @staticmethod
    def noised(quotient: Float32, noise: Float64) -> Float64:
        """As for Scores32; the quotient is fp32."""
        return step_math.add_wide(step_math.widened(quotient), noise)

    @staticmethod
    def rank(score: Float64) -> list[Uint32]:
        """As for Scores32."""
        high, low = step_math.words_of(step_math.add_wide(score, Float64(0.0)))  # -0.0 becomes +0.0
        negative = Uint32(Int32(high) >> 31)
        ranks = high ^ (negative | Uint32(keys.SIGN)), low ^ negative
        is_nan = step_math.is_nan_wide(score)
        return [ptx.select(is_nan, Uint32(ALL_ONES), word) for word in ranks]

    @staticmethod
    def hint(score: Float64) -> Uint32:
        """As for Scores32. Rounding keeps the order."""
        return keys.ordered(step_math.narrowed(score))

    @staticmethod
    def score_of(rank: Sequence[Uint32]) -> Float64:
        """As for Scores32."""
        negative = Uint32(Int32(rank[0]) >> 31) ^ Uint32(ALL_ONES)
        return step_math.wide_of(rank[0] ^ (negative | Uint32(keys.SIGN)), rank[1] ^ negative)

    @staticmethod
    def is_nan(score: Float64) -> Uint32:
        """As for Scores32."""
        return ptx.select(step_math.is_nan_wide(score), Uint32(1), Uint32(0))

    @staticmethod
    def packet_words(score: Float64) -> list[Uint32]:
        """As for Scores32: the lower word first."""
        high, low = step_math.words_of(score)
        return [low, high]

    @staticmethod
    def of_packet(words: Sequence[Uint32]) -> Float64:
        """As for Scores32."""
        return step_math.wide_of(words[1], words[0])

    @staticmethod
    def raise_key(address: Int64, key: Sequence[Uint32]) -> None:
        """As for Scores32."""
        step_memory.raise_wide_key(address, key)

    @staticmethod
    def hint_in_memory(address: Int64) -> Uint32:
        """As for Scores32."""
        rank = step_memory.rank_of_wide_key(address)
        hint = Scores64.hint(Scores64.score_of(rank))
        return ptx.select(rank[0] == 0, Uint32(0), hint)

    @staticmethod
    def take_key(address: Int64) -> list[Uint32]:
        """As for Scores32."""
        rank, low = ptx.ld_relaxed_gpu(address + step_sizes.WORD_BYTES), ptx.ld_relaxed_gpu(address)
        for half in range(2):
            ptx.stg_s64(address + half * step_sizes.WORD_BYTES, Int64(0))
        return [step_math.high_word(rank), step_math.low_word(rank), step_math.low_word(low)]


def scores_of(config) -> type[Scores32] | type[Scores64]:
    """The scores of a model; greedy drafts compare logits, without noise."""
    wide = config.NOISE_SCHEME == "murmur3_64" and config.CACHE_DTYPES
    return Scores64 if wide else Scores32


def score_of_hint(hint: Uint32) -> Float32:
    """The fp32 score of a hint; NaN for 0, which no score has."""
    negative = Uint32(Int32(hint) >> 31) ^ Uint32(ALL_ONES)
    return ptx.float_of(hint ^ (negative | Uint32(keys.SIGN)))


def larger(key: Sequence[Uint32], other: Sequence[Uint32]) -> list[Uint32]:
    """The larger of two keys."""
    first = key[-1] > other[-1]
    for word, against in zip(key[-2::-1], other[-2::-1], strict=True):
        first = (word > against) | ((word == against) & first)
    return [ptx.select(first, word, against) for word, against in zip(key, other, strict=True)]


def warp_largest(key: Sequence[Uint32]) -> list[Uint32]:
    """The largest key of the warp, in every lane."""
    top = ptx.warp_max_u32(key[0])
    if len(key) == 1:
        return [top]
    # Lanes whose word is not the largest are out: the words that follow must not count.
    rest = [ptx.select(key[0] == top, word, Uint32(0)) for word in key[1:]]
    return [top, *warp_largest(rest)]
