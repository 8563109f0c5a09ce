"""How the CTAs of a chain kernel agree on each row's winner: within a warp, a CTA, and the grid (exchange.py)."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from . import exchange, head_tiles, keys, plan_line, ptx

LINE_BYTES = 128  # of L2


class Agreement:
    """The part of a chain kernel that reduces keys; comes with chain_head.Head and chain_inputs.Inputs."""

    def __init__(self, line: plan_line.PlanLine, id_bits: int) -> None:
        self.id_bits = id_bits
        self.tag_bits = 32 - id_bits  # what a record's lower word has left beside the token id
        self.lane_rows = min(line.row_slots, 2)  # request rows whose entries one lane finishes
        self.gather = exchange.Gather(line.row_slots, line.ctas + 1)
        self.stride = exchange.record_stride(line.row_slots)

    @cute.jit
    def reduce_warp(self, c):
        """The warp's best key of each row into shared memory."""
        first = head_tiles.bias_row(self.rows, ptx.opaque_lane(c.lane))
        for h in cutlass.range_constexpr(self.lane_rows):
            hi, lo = c.best[2 * h], c.best[2 * h + 1]
            if cutlass.const_expr(self.rows == 1):
                hi, lo = keys.warp_largest(hi, lo)
            else:
                for distance in cutlass.range_constexpr(len(head_tiles.bias_lanes(self.rows))):
                    lanes = head_tiles.bias_lanes(self.rows)[distance]
                    hi, lo = keys.larger(ptx.shuffle_xor(hi, lanes), ptx.shuffle_xor(lo, lanes), hi, lo)
            if (c.lane < head_tiles.bias_lanes(self.rows)[0]) & (first + h < self.rows):
                self.store_key(
                    c, self.shared.keys + ((first + h) * plan_line.RED_WARPS + c.warp) * plan_line.KEY_BYTES, hi, lo
                )

    def store_key(self, c, offset: Int32, hi: Uint32, lo: Uint32) -> None:
        ptx.sts_b64(c.smem + offset, [lo, hi])

    @cute.jit
    def largest_key(self, c, offset: Int32, count: cutlass.Constexpr):
        """The largest of `count` consecutive keys in shared memory, in every lane."""
        words = [Uint32(0), Uint32(0)]
        if c.lane < count:
            words = ptx.lds_b64(c.smem + offset + c.lane * plan_line.KEY_BYTES)
        return keys.warp_largest(words[1], words[0])

    @cute.jit
    def agree(self, c, step: Int32, sequence: Uint32):
        """Warp n publishes this CTA's best key of row n, waits for everybody's and fetches the winner's embedding. All warps call it."""
        goes_on = (step + 1 < self.num_steps) | (c.cta == 0)  # only CTA 0 reports the last token
        best_hi = cute.make_rmem_tensor(cute.make_layout(self.gather.pair), Uint32)
        best_lo = cute.make_rmem_tensor(cute.make_layout(self.gather.pair), Uint32)
        for p in cutlass.range_constexpr(self.gather.pair):
            best_hi[p], best_lo[p] = Uint32(0), Uint32(0)
        if c.warp < self.rows:
            keys_at = self.shared.keys + c.warp * (plan_line.RED_WARPS * plan_line.KEY_BYTES)
            hi, lo = self.largest_key(c, keys_at, self.line.warps)
            if c.lane == 0:
                exchange.publish(c, sequence, c.warp, hi, lo, self.tag_bits, self.stride)
            if (c.lane * LINE_BYTES < self.tile.row_bytes) & (hi != 0):
                candidate = c.embed + Int64(self.token_of(c, lo)) * self.tile.row_bytes
                ptx.prefetch_l2(candidate + Int64(c.lane) * LINE_BYTES)
            if goes_on:
                best = exchange.gather(c, sequence, step, self.gather, self.tag_bits, self.stride)
                for p in cutlass.range_constexpr(self.gather.pair):
                    best_hi[p], best_lo[p] = best[p]
                if cutlass.const_expr(self.rows > 1):
                    self.store_shares(c, best, self.gather)
        if cutlass.const_expr(self.rows > 1):
            cute.arch.sync_threads()  # the gathering warps' shares are there
        if (c.warp < self.rows) & goes_on:
            hi, lo = best_hi[0], best_lo[0]
            if cutlass.const_expr(self.rows > 1):
                shares = self.shared.partials + c.warp * (self.rows * plan_line.KEY_BYTES)
                hi, lo = self.largest_key(c, shares, self.rows)
            self.take_winner(c, step, hi, lo)

    @cute.jit
    def take_winner(self, c, step: Int32, hi: Uint32, lo: Uint32):
        """The next position's embedding of the warp's row, and from CTA 0 the draft token."""
        token = Int32(0)
        if hi != 0:  # else a row slot without a row
            token = self.token_of(c, lo)
        if step + 1 < self.num_steps:
            self.fetch_embedding(c, c.warp, token)
        if (c.cta == 0) & (c.lane == 0) & (c.warp < c.rows):
            ptx.stg_s64(c.draft_tokens + (Int64(c.warp) * c.token_stride + step) * 8, Int64(token))

    @cute.jit
    def store_shares(self, c, best, g: cutlass.Constexpr):
        """What this gathering warp found in its share of the records, for the warps whose rows they are."""
        if c.lane < g.lanes:
            for p in cutlass.range_constexpr(g.pair):
                place = (c.lane * g.pair + p) * g.warps + c.warp
                self.store_key(c, self.shared.partials + place * plan_line.KEY_BYTES, best[p][0], best[p][1])
