"""What follows a row's winner in the step kernels: the draft token, the next Markov embedding, and the packets between ranks."""

from collections.abc import Mapping, Sequence

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from . import ptx, step_memory, step_scores

LANES = 32
PIECE = 16  # bytes that a lane copies at once
BF16_BYTES, WORD_BYTES, TOKEN_BYTES, ID_BYTES = 2, 4, 8, 4
MINUS_INFINITY = -float("inf")
NO_TOKEN = 0x7FFFFFFF  # of a rank without a candidate: larger than any id, so that it loses to another rank's -inf
ALL_ONES = 0xFFFFFFFF


class Tail:
    """The part of a step kernel behind the winner. Methods are for one warp, whose lanes all take part."""

    def __init__(self, config, pdl: bool) -> None:
        self.embed_bytes, self.vocab_size, self.pdl = BF16_BYTES * config.RANK_DIM, config.VOCAB_SIZE, pdl
        self.packet_words, self.packet_fields = config.PACKET_WORDS, config.PACKET_FIELDS
        self.scores = step_scores.scores_of(config)
        self.greedy_drafts = not config.CACHE_DTYPES  # ties are broken by draft id, not by token id
        self.maps_greedy = self.greedy_drafts and config.D2T

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
    def token_of(self, id: Int32, found: Boolean, target_ids: Int64, vocab_start: Int32):
        """The token of the winner's id, which is a draft id where drafts are greedy. `target_ids`: of draft ids from `vocab_start` on."""
        token = id
        if cutlass.const_expr(self.maps_greedy):
            token = Int32(step_memory.load_b32_if(found, target_ids + Int64(id - vocab_start) * ID_BYTES))
        return token

    @cute.jit
    def write_packet(self, lane: Int32, packets: Int64, row: Int32, rank: Sequence[Uint32], token: Int32):
        """The row's packet: the score of this rank (step_scores.py) and its token id. Words without a field are 0."""
        found = rank[0] != 0
        score = ptx.select(found, self.scores.score_of(rank), self.scores.Score(MINUS_INFINITY))
        token = ptx.select(found, token, Int32(NO_TOKEN))
        if lane == 0:
            values = {
                self.scores.FIELD: self.scores.packet_words(score),
                "nan": [self.scores.is_nan(score)],
                "token": [Uint32(token), Uint32(0)],
            }
            packet = packed(self.packet_words, self.packet_fields, values)
            for i in cutlass.range_constexpr(self.packet_words):
                ptx.stg_b32(packets + (Int64(row) * self.packet_words + i) * WORD_BYTES, packet[i])

    @cute.jit
    def pick_token(self, lane: Int32, packets: Int64, row: Int32, rows: Int32, world: Int32):
        """The winner among all ranks' packets of a row: of equal scores the lowest token id, or, where drafts are greedy, the lowest
        rank's, whose draft ids are the lowest."""
        best = [Uint32(0)] * self.scores.KEY_WORDS
        for rank in cutlass.range(lane, world, LANES, unroll=1):
            packet = self.packet_at(packets, row, rows, rank)
            first, words = self.packet_fields[self.scores.FIELD]
            score = self.scores.of_packet([ptx.ldg_b32(packet + (first + i) * WORD_BYTES) for i in range(words)])
            token = self.token_in(packet)
            found = [*self.scores.rank(score), token ^ Uint32(ALL_ONES)]
            if cutlass.const_expr(self.greedy_drafts):
                there = token != Uint32(NO_TOKEN)
                found = [ptx.select(there, found[0], Uint32(0)), Uint32(rank) ^ Uint32(ALL_ONES)]
            best = step_scores.larger(found, best)
        winner = step_scores.warp_largest(best)[-1] ^ Uint32(ALL_ONES)
        if cutlass.const_expr(self.greedy_drafts):
            winner = self.token_in(self.packet_at(packets, row, rows, Int32(winner)))
        return Int32(winner)

    def packet_at(self, packets: Int64, row: Int32, rows: Int32, rank: Int32) -> Int64:
        """Address of a rank's packet of a row."""
        return packets + (Int64(rank) * Int64(rows) + Int64(row)) * (self.packet_words * WORD_BYTES)

    def token_in(self, packet: Int64) -> Uint32:
        """The token id of a packet."""
        return ptx.ldg_b32(packet + self.packet_fields["token"][0] * WORD_BYTES)


def packed(words: int, fields: Mapping[str, tuple[int, int]], values: Mapping[str, list[Uint32]]) -> list[Uint32]:
    """The words of a packet: each field's value at its place, 0 elsewhere."""
    packet = [Uint32(0)] * words
    for name, (first, count) in fields.items():
        for i in range(count):
            packet[first + i] = values[name][i] if name in values else Uint32(0)
    return packet
