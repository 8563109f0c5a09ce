"""The chain kernel's Markov head: where each of a CTA's tiles lives and how a warp multiplies it.

A CTA's tiles come in the order [streamed | resident in shared memory | resident in registers]. Slot s of shared memory belongs to
warp s % warps alone: that warp reads it and refills it, so that no "empty" barrier is needed. Slots 0 .. ring - 1 are the ring:
warp w streams tiles w, w + ring, ... through slot w. The slots behind hold resident tiles. Everything comes by bulk copy, register
tiles too, so that no load instruction waits for memory.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from . import head_tiles, plan_line, ptx

LANES = 32
TILE_ROWS = plan_line.TILE_ROWS

# The order of a warp's tiles in a position: LEAD streamed tiles, resident tiles, the other streamed ones, and register tile i before the
# i-th of these. So a slot's refill has time while other tiles are multiplied.
LEAD = 2


class Head:
    """The part of a chain kernel that holds the head. Methods take the kernel's context `c`."""

    def __init__(self, line: plan_line.PlanLine, rank_dim: int, num_steps: int, base_bytes: int) -> None:
        self.line = line
        self.rows = line.row_slots
        # Two MMAs a chunk leave no registers: such builds compute addresses anew where others keep them.
        self.wide = line.row_slots == head_tiles.WIDE_ROWS
        self.num_steps = num_steps
        self.tile = head_tiles.TileShape(rank_dim)
        self.residency = plan_line.residency(line, base_bytes)
        self.ring = self.residency.ring
        self.slots = plan_line.slot_count(line, base_bytes)
        self.stage_slot = self.slots - line.warps  # register tiles come in through the last slots, one a warp
        self.register_words = self.residency.register_tiles * self.residency.register_chunks * self.tile.chunk_words
        self.parked_chunks = self.tile.chunks - self.residency.register_chunks

    # ---- filling slots

    @cute.jit
    def fill(self, c, slot: Int32, tile: Int32, keep: Boolean):
        """Starts the bulk copies of one of the CTA's tiles into a slot. One lane."""
        source = c.head + Int64(tile * (TILE_ROWS * self.tile.row_bytes))
        dst = c.smem + slot * self.tile.slot_bytes
        bar = c.bars + slot * plan_line.MBARRIER_BYTES
        if cutlass.const_expr(self.line.partial):
            left = cutlass.min(c.span - tile * TILE_ROWS, TILE_ROWS)
            first = cutlass.min(left, TILE_ROWS // 2)
            ptx.mbarrier_expect(bar, left * self.tile.row_bytes)
            ptx.bulk_load(dst, source, first * self.tile.row_bytes, bar, keep)
            if left > first:
                second = (left - first) * self.tile.row_bytes
                upper = dst + self.tile.half_bytes + plan_line.BANK_SHIFT
                ptx.bulk_load(upper, source + self.tile.half_bytes, second, bar, keep)
        else:
            half = Int32(self.tile.half_bytes)
            ptx.mbarrier_expect(bar, 2 * half)
            ptx.bulk_load(dst, source, half, bar, keep)
            ptx.bulk_load(
                dst + self.tile.half_bytes + plan_line.BANK_SHIFT, source + self.tile.half_bytes, half, bar, keep
            )

    @cute.jit
    def settle(self, c, slot: Int32):
        """Starts loading what a slot holds first: a streamed tile, a resident one, or nothing."""
        tile = c.streamed + slot - self.ring
        here = (slot >= self.ring) & (slot - self.ring < c.resident)
        keep = (slot < self.ring) & (slot < self.residency.keep)
        if slot < self.ring:
            tile = slot
            here = slot < c.streamed
        if (c.lane == 0) & here:
            self.fill(c, slot, tile, keep)

    @cute.jit
    def wait_slot(self, c, slot: Int32):
        """Waits for the slot's next fill. The phase bits are per warp: bit k belongs to slot warp + k * warps."""
        bit = slot // self.line.warps
        ptx.mbarrier_wait(c.bars + slot * plan_line.MBARRIER_BYTES, Int32((c.phase[0] >> Uint32(bit)) & Uint32(1)))
        c.phase[0] = c.phase[0] ^ (Uint32(1) << Uint32(bit))

    @cute.jit
    def load_register_tiles(self, c):
        """Brings the warp's register tiles in through its staging slot, one after the other, then settles that slot."""
        source = c.smem + c.stage_slot * self.tile.slot_bytes + c.fragment
        for i in cutlass.range_constexpr(self.residency.register_tiles):
            if i < c.my_register:
                self.wait_slot(c, c.stage_slot)
                for q in cutlass.range_constexpr(self.tile.chunks):
                    x = head_tiles.load_fragments(self.tile, source, q, c.lane)
                    for group in cutlass.range_constexpr(head_tiles.GROUPS):
                        if cutlass.const_expr(q < self.residency.register_chunks):
                            at = ((i * self.residency.register_chunks + q) * head_tiles.GROUPS + group) * 4
                            for j in cutlass.range_constexpr(4):
                                c.fragments[at + j] = x[group][j]
                        else:
                            ptx.sts_b128(self.parked(c, i, q, group), x[group])
                cute.arch.sync_warp()  # every lane has read the slot
                if i + 1 < c.my_register:
                    if c.lane == 0:
                        self.fill(c, c.stage_slot, c.first_register + (i + 1) * self.line.warps, Boolean(False))
                else:
                    self.settle(c, c.stage_slot)
        if c.my_register == 0:
            self.settle(c, c.stage_slot)

    def parked(self, c, i: int, q: int, group: int) -> Int32:
        """Address of the lane's 16 bytes of a register tile's chunk that lies in shared memory."""
        at = (i * self.parked_chunks + q - self.residency.register_chunks) * head_tiles.GROUPS + group
        return c.parked + at * (LANES * 16)

    def register_fragments(self, c, i: int, q: int) -> list:
        """The A fragments of one chunk of register tile i."""
        if q >= self.residency.register_chunks:
            return [ptx.lds_b128(self.parked(c, i, q, group)) for group in range(head_tiles.GROUPS)]
        at = (i * self.residency.register_chunks + q) * self.tile.chunk_words
        return [[c.fragments[at + 4 * group + j] for j in range(4)] for group in range(head_tiles.GROUPS)]

    def multiply_register_tile(self, c, i: int) -> list:
        acc = head_tiles.new_accumulators(self.rows)
        for q in range(self.tile.chunks):
            head_tiles.multiply(
                acc, head_tiles.load_embedding(self.rows, c.embedding, q), self.register_fragments(c, i, q)
            )
        return acc

    def multiply_slot(self, c, slot: Int32) -> list:
        acc = head_tiles.new_accumulators(self.rows)
        if self.rows == head_tiles.WIDE_ROWS:
            # Else the compiler keeps slot addresses in registers that two MMAs a chunk need, and spills.
            slot = ptx.opaque(slot)
        address = c.smem + slot * self.tile.slot_bytes + c.fragment
        e = head_tiles.load_embedding(self.rows, c.embedding, 0)
        x = head_tiles.load_fragments(self.tile, address, 0, c.lane)
        for q in range(self.tile.chunks):  # loads run one chunk ahead of the MMAs
            if q + 1 < self.tile.chunks:
                after = (
                    head_tiles.load_embedding(self.rows, c.embedding, q + 1),
                    head_tiles.load_fragments(self.tile, address, q + 1, c.lane),
                )
            head_tiles.multiply(acc, e, x)
            e, x = after
        return acc

    @cute.jit
    def refill(self, c, step: Int32, slot: Int32, tile: Int32):
        """The slot's next tile: of this position, or its first of the next. It depends on no token, so it runs ahead of the exchange."""
        cute.arch.sync_warp()  # every lane has read the slot
        after = tile + self.ring
        if after >= c.streamed:
            after = slot
        if (c.lane == 0) & ((step + 1 < self.num_steps) | (after != slot)):
            self.fill(c, slot, after, after < self.residency.keep)

    @cute.jit
    def shared_tile(self, c, it: Int32):
        """The tile and slot of the warp's it-th tile in shared memory, and whether it is a streamed one."""
        lead = cutlass.min(c.my_streamed, LEAD)
        streamed = (it < lead) | (it >= lead + c.my_resident)
        slot = c.warp + (c.ring_slots + it - lead) * self.line.warps
        tile = c.streamed + slot - self.ring
        if streamed:
            slot = c.warp
            tile = c.warp + it * self.ring
            if it >= lead:
                tile = tile - c.my_resident * self.ring
        return tile, slot, streamed

    @cute.jit
    def tile_of(self, c, item: Int32):
        """The warp's item-th tile in a position: register and shared-memory tiles by turns, or registers first without a ring."""
        turns = (
            cutlass.min(c.my_register, c.my_streamed + c.my_resident) if cutlass.const_expr(self.ring > 0) else Int32(0)
        )
        in_registers = (item < 2 * turns) & (item % 2 == 0)
        nth = item // 2
        if item >= 2 * turns:
            nth = item - turns
            in_registers = nth < c.my_register
            if (not in_registers) & (turns == 0):
                nth = item - c.my_register
        tile = c.first_register + nth * self.line.warps
        if not in_registers:
            tile, _, _ = self.shared_tile(c, nth)
        return tile
