"""The chain kernel's Markov head: where each of a CTA's tiles lives and how a warp multiplies it.

A CTA's tiles come in the order [streamed | resident in shared memory | resident in registers], and tile t belongs to warp t % warps.
Slots 0 .. ring - 1 of shared memory are the ring: streamed tile t passes through slot t % ring. The slots behind hold resident tiles.
Everything comes by bulk copy, register tiles too, so that no load instruction waits for memory. But of tiles of more than STAGED_CHUNKS
chunks, of which a slot a warp would leave no room for others, each lane loads its own fragments.

Positions go through the streamed tiles forth and back by turns. On the way up a slot's next tile is tile + ring, on the way down tile - ring;
who has read a slot refills it, whoever reads it next. So the last tiles of a position stay in the ring, and the next one begins with them:
a ring slot saves as many bytes as a resident one, and no copies are under way while the CTAs exchange their records.

Each tile in shared memory has an mbarrier of its own, on which its warp alone waits: the tile's fills come one at a time, each after
the wait for the one before, so that a phase's parity cannot be mistaken. No "empty" barrier is needed.
"""

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from . import head_tiles, plan_line, ptx

LANES = 32
TILE_ROWS = plan_line.TILE_ROWS
KEPT_OF = plan_line.KEPT_OF
MANY_ROWS = 4  # row slots


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
        self.slots = plan_line.slot_count(line, rank_dim, base_bytes)
        self.stages = self.residency.register_tiles > 0 and plan_line.stages_register_tiles(rank_dim)
        self.stage_slot = self.slots - line.warps  # register tiles come in through the last slots, one a warp
        in_registers = self.residency.register_tiles * line.warps
        self.most_streamed = max(line.tiles - in_registers - self.residency.resident, 0)
        self.kept_share = plan_line.kept_share(self.residency, self.most_streamed)
        self.register_words = self.residency.register_tiles * self.residency.register_chunks * self.tile.chunk_words
        self.parked_chunks = self.tile.chunks - self.residency.register_chunks

    # ---- filling slots

    @cute.jit
    def fill(self, c, slot: Int32, tile: Int32, bar: Int32, keep: Boolean):
        """Starts the bulk copies of one of the CTA's tiles into a slot. One lane."""
        source = c.head + Int64(tile * (TILE_ROWS * self.tile.row_bytes))
        dst = c.smem + slot * self.tile.slot_bytes
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

    def tile_bar(self, c, tile: Int32) -> Int32:
        """The mbarrier of a tile in shared memory."""
        return c.bars + (self.line.warps + tile) * plan_line.MBARRIER_BYTES

    def stage_bar(self, c) -> Int32:
        """The mbarrier of the warp's register tiles on their way in."""
        return c.bars + c.warp * plan_line.MBARRIER_BYTES

    def kept(self, tile: Int32) -> Boolean:
        """Whether L2 is asked to keep a streamed tile: all, or about `keep` of those that are read for every position and not for every other
        one, evenly among them, so that L2 and memory work side by side."""
        if self.kept_share == KEPT_OF:
            return Boolean(True)
        every_time = (tile >= self.ring) & (tile < self.most_streamed - self.ring)
        return every_time & ((tile * self.kept_share & (KEPT_OF - 1)) < self.kept_share)

    def first_tile(self, c, slot: Int32):
        """The tile that a slot holds first, and whether there is one: a streamed or a resident tile, or nothing."""
        rings = slot < self.ring
        tile = ptx.select(rings, slot, c.streamed + slot - self.ring)
        return tile, tile < ptx.select(rings, c.streamed, c.streamed + c.resident)

    @cute.jit
    def make_barriers(self, c):
        """A warp makes the barriers of what it starts to load itself, so that it need not wait for the CTA, and its part of the others."""
        nth = c.warp + c.lane * self.line.warps
        tile, here = self.first_tile(c, nth)
        if (nth < self.slots) & here:
            ptx.mbarrier_init(self.tile_bar(c, tile), Int32(1))
        if self.ring + nth < c.streamed:
            ptx.mbarrier_init(self.tile_bar(c, self.ring + nth), Int32(1))
        if c.lane == 0:
            ptx.mbarrier_init(self.stage_bar(c), Int32(1))

    @cute.jit
    def settle(self, c, slot: Int32):
        """Starts loading what a slot holds first."""
        tile, here = self.first_tile(c, slot)
        if (c.lane == 0) & here:
            self.fill(c, slot, tile, self.tile_bar(c, tile), (slot < self.ring) & self.kept(tile))

    def load_register_tiles(self, c) -> None:
        """Brings the warp's register tiles in."""
        if self.stages:
            self.load_staged(c)
        else:
            self.fetch_fragments(c)

    @cute.jit
    def load_staged(self, c):
        """Brings the warp's register tiles in through its staging slot, one after the other, then settles that slot."""
        source = c.smem + c.stage_slot * self.tile.slot_bytes + c.fragment
        for i in cutlass.range_constexpr(self.residency.register_tiles):
            if i < c.my_register:
                ptx.mbarrier_wait(self.stage_bar(c), Int32(i % 2))
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
                        after = c.first_register + (i + 1) * self.line.warps
                        self.fill(c, c.stage_slot, after, self.stage_bar(c), Boolean(False))
                else:
                    self.settle(c, c.stage_slot)
        if c.my_register == 0:
            self.settle(c, c.stage_slot)

    def fragment_source(self, c, i: int, q: int, group: int):
        """Where the lane's 16 bytes of a chunk of register tile i lie in memory, and whether they exist: else they are zeros."""
        row = (c.first_register + i * self.line.warps) * TILE_ROWS + head_tiles.fragment_row(c.lane, group)
        here = row < c.span
        if self.tile.ends_half and q + 1 == self.tile.chunks:
            here = here & (c.lane % 4 < 2)
        return c.head + Int64(row * self.tile.row_bytes + c.lane % 4 * 16) + q * plan_line.CHUNK_BYTES, here

    @cute.jit
    def fetch_parked(self, c):
        """Starts loading the chunks of the warp's register tiles that lie in shared memory, as one copy group, older than those of all inputs:
        whoever has waited for inputs has waited for it. A lane reads only what it copied itself."""
        for i in cutlass.range_constexpr(self.residency.register_tiles):
            if i < c.my_register:
                for q in cutlass.range_constexpr(self.residency.register_chunks, self.tile.chunks):
                    for group in cutlass.range_constexpr(head_tiles.GROUPS):
                        source, here = self.fragment_source(c, i, q, group)
                        nbytes = ptx.select(here, Int32(16), Int32(0))
                        ptx.copy_async_16_of_if(Boolean(True), self.parked(c, i, q, group), source, nbytes)
        ptx.copy_async_commit()

    @cute.jit
    def fetch_fragments(self, c):
        """Starts loading the chunks that live in registers, each lane its own fragments; it waits for them where it first uses them.

        Behind the setup, when the first bulk copies have come in: all at once take longer.
        """
        for i in cutlass.range_constexpr(self.residency.register_tiles):
            if i < c.my_register:
                for q in cutlass.range_constexpr(self.residency.register_chunks):
                    for group in cutlass.range_constexpr(head_tiles.GROUPS):
                        source, here = self.fragment_source(c, i, q, group)
                        x = ptx.ldg_head_b128(here, source)
                        at = ((i * self.residency.register_chunks + q) * head_tiles.GROUPS + group) * 4
                        for j in cutlass.range_constexpr(4):
                            c.fragments[at + j] = x[j]

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

    def multiply_register_tile(self, c, i: int, load_entries: Callable[[], Any]) -> tuple[list, Any]:
        """The product of register tile i, and what load_entries returned, see multiply_slot."""
        acc, loaded = head_tiles.new_accumulators(self.rows), None
        for q in range(self.tile.chunks):
            head_tiles.multiply(
                acc, head_tiles.load_embedding(self.rows, c.embedding, q), self.register_fragments(c, i, q)
            )
            if q == 0:
                loaded = load_entries()
        return acc, loaded

    def multiply_slot(self, c, slot: Int32, load_entries: Callable[[], Any]) -> tuple[list, Any]:
        """The product of the tile in a slot, and what load_entries returned: it is called once the first loads of the head are under way,
        so that its own instructions hide behind them."""
        acc, loaded = head_tiles.new_accumulators(self.rows), None
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
            if q == 0:
                loaded = load_entries()
            head_tiles.multiply(acc, e, x)
            e, x = after
        return acc, loaded

    @cute.jit
    def refill(self, c, step: Int32, slot: Int32, tile: Int32):
        """The slot's next tile in this position, if any."""
        cute.arch.sync_warp()  # every lane has read the slot
        after = tile + ptx.select(goes_up(step), Int32(self.ring), Int32(-self.ring))
        if (c.lane == 0) & (after >= 0) & (after < c.streamed):
            self.fill(c, slot, after, self.tile_bar(c, after), self.kept(after))

    @cute.jit
    def wait_tile(self, c, tile: Int32, step: Int32):
        """Waits for a tile in shared memory, if it is filled for this position."""
        # At position 0 all are. Later, what lies behind the ring's length on the way up, and on the way down.
        up, down = tile >= self.ring, tile < c.streamed - self.ring
        due = (step == 0) | ((tile < c.streamed) & ptx.select(goes_up(step), up, down))
        # What follows from the position would take registers in all of them that builds for many rows need.
        seen = ptx.opaque(step) if self.rows >= MANY_ROWS else step
        fills = ptx.select(up & down, seen, (seen + 1) // 2)  # before this one: one a position, or one in two
        if due:
            ptx.mbarrier_wait(self.tile_bar(c, tile), fills % 2)

    def slot_of(self, c, tile: Int32) -> Int32:
        """The slot of a tile in shared memory."""
        if self.ring == 0:
            return tile
        return ptx.select(tile < c.streamed, tile % self.ring, self.ring + tile - c.streamed)

    # ---- the order of a warp's tiles

    @cute.jit
    def tile_of(self, c, item: Int32):
        """The warp's item-th tile on the way up: streamed ones, and between them register tiles, then resident ones."""
        before = self.streamed_before(c, item)
        tile = c.warp + before * self.line.warps
        if self.streamed_before(c, item + 1) == before:  # this item is not streamed
            nth = item - before
            tile = c.first_register + nth * self.line.warps
            if nth >= c.my_register:
                tile = c.warp + (c.my_streamed + nth - c.my_register) * self.line.warps
        return tile

    @cute.jit
    def streamed_before(self, c, item: Int32):
        """Of the warp's first `item` tiles, how many are streamed: they lie evenly among the others, so that these hide the time of a refill.

        A position begins with a streamed tile, and ends with one, as it is the next one's first: if it is among those that wait in the ring.
        """
        last = c.warp + (c.my_streamed - 1) * self.line.warps
        late_up, late_down = Int32(c.warp >= self.ring), Int32(last < c.streamed - self.ring)
        if c.my_streamed + late_up + late_down > c.items:  # no other tile to begin or end with
            late_up, late_down = Int32(0), Int32(0)
        count = Int32(0)
        if item > late_up:
            count = cutlass.min(1, c.my_streamed)
            if c.my_streamed > 1:
                gaps = c.items - 1 - late_up - late_down
                count = cutlass.min((item - 1 - late_up) * (c.my_streamed - 1) // gaps + 1, c.my_streamed)
        return count


def goes_up(step: Int32) -> Boolean:
    """Whether a position goes through the streamed tiles in their order."""
    return step % 2 == 0
