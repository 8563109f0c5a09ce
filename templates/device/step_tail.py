"""What follows a row's winner in the step kernels: the draft token, the next Markov embedding, and the packets between ranks."""

from collections.abc import Mapping

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from . import keys, ptx

LANES = 32
PIECE = 16  # bytes that a lane copies at once
BF16_BYTES, WORD_BYTES, TOKEN_BYTES = 2, 4, 8
MINUS_INFINITY = 0xFF800000
NO_TOKEN = 0x7FFFFFFF  # of a rank without a candidate: larger than any id, so that it loses to another rank's -inf
ALL_ONES = 0xFFFFFFFF


class Tail:
    """The part of a step kernel behind the winner. Methods are for one warp, whose lanes all take part."""

    def __init__(self, config, pdl: bool) -> None:
        self.embed_bytes, self.vocab_size, self.pdl = BF16_BYTES * config.RANK_DIM, config.VOCAB_SIZE, pdl
        self.packet_words, self.packet_fields = config.PACKET_WORDS, config.PACKET_FIELDS

    @cute.jit
    def gather_embedding(self, lane: Int32, embed: Int64, token: Int32, embeddings: Int64, row: Int32):
        """Copies the token's Markov embedding to the row's."""
        source, target = embed + Int64(token) * self.embed_bytes, embeddings + Int64(row) * self.embed_bytes
        pieces = self.embed_bytes // PIECE
        for j in cutlass.range_constexpr((pieces + LANES - 1) // LANES):
            at = Int64(lane + LANES * j) * PIECE
            if lane + LANES * j < pieces:
                ptx.stg_b128_if(Boolean(True), target + at, ptx.ldg_b128(source + at))

    @cute.jit
    def write_token(self, lane: Int32, draft_tokens: Int64, token_stride: Int64, row: Int32, step: Int32, token: Int32):
        """The row's draft token at this position."""
        if lane == 0:
            ptx.stg_s64(draft_tokens + (Int64(row) * token_stride + Int64(step)) * TOKEN_BYTES, Int64(token))

    @cute.jit
    def write_packet(self, lane: Int32, packets: Int64, row: Int32, rank: Uint32, token: Int32):
        """The row's packet: the score of this rank (keys.ordered; 0: no candidate) and its token id. Words without a field are 0."""
        score = score_of(rank)
        if rank == 0:
            score, token = ptx.float_of(Uint32(MINUS_INFINITY)), Int32(NO_TOKEN)
        is_nan = ptx.select(score == score, Uint32(0), Uint32(1))
        if lane == 0:
            values = {"score": [ptx.bits_of(score)], "nan": [is_nan], "token": [Uint32(token), Uint32(0)]}
            packet = packed(self.packet_words, self.packet_fields, values)
            for i in cutlass.range_constexpr(self.packet_words):
                ptx.stg_b32(packets + (Int64(row) * self.packet_words + i) * WORD_BYTES, packet[i])

    @cute.jit
    def pick_token(self, lane: Int32, packets: Int64, row: Int32, rows: Int32, world: Int32):
        """The winner among all ranks' packets of a row."""
        top, low = Uint32(0), Uint32(0)
        for rank in cutlass.range(lane, world, LANES, unroll=1):
            packet = packets + (Int64(rank) * Int64(rows) + Int64(row)) * (self.packet_words * WORD_BYTES)
            score = ptx.float_of(ptx.ldg_b32(packet + self.packet_fields["score"][0] * WORD_BYTES))
            token = ptx.ldg_b32(packet + self.packet_fields["token"][0] * WORD_BYTES)
            top, low = keys.larger(keys.ordered(score), token ^ Uint32(ALL_ONES), top, low)
        top, low = keys.warp_largest(top, low)
        return Int32(low ^ Uint32(ALL_ONES))


def packed(words: int, fields: Mapping[str, tuple[int, int]], values: Mapping[str, list[Uint32]]) -> list[Uint32]:
    """The words of a packet: each field's value at its place, 0 elsewhere."""
    packet = [Uint32(0)] * words
    for name, (first, count) in fields.items():
        for i in range(count):
            packet[first + i] = values[name][i] if name in values else Uint32(0)
    return packet


def score_of(rank: Uint32) -> Float32:
    """The score of a rank (keys.ordered); NaN for rank 0, which no score has."""
    negative = Uint32(Int32(rank) >> 31) ^ Uint32(ALL_ONES)
    return ptx.float_of(rank ^ (negative | Uint32(keys.SIGN)))
