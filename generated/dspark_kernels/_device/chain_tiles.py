"""The work of one position in a chain kernel: all tiles of a warp, in the order in which the copies of others have time to arrive."""

from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from . import ptx


class Tiles:
    """The part of a chain kernel that walks over tiles; comes with chain_head.Head and the model's load_entries and finish_tile."""

    @cute.jit
    def begin_position(self, c):
        """No candidate yet."""
        for h in cutlass.range_constexpr(self.lane_rows):
            c.best[2 * h] = Uint32(0)
            c.best[2 * h + 1] = Uint32(0)

    @cute.jit
    def multiply_tiles(self, c, step: Int32):
        """All tiles of the warp, in the order of ordered_tile."""
        if cutlass.const_expr(self.ring > 0):
            for item in cutlass.range(c.items, unroll=1):
                tile = self.ordered_tile(c, item, step)
                if tile < c.streamed + c.resident:
                    self.do_shared_tile(c, step, item, tile)
                else:
                    self.do_register_tiles(c, step, item, (tile - c.first_register) // self.line.warps, 1)
        else:
            self.do_register_tiles(c, step, Int32(0), Int32(0), self.residency.register_tiles)
            for it in cutlass.range(c.items - c.my_register, unroll=1):
                self.do_shared_tile(c, step, c.my_register + it, c.warp + it * self.line.warps)

    @cute.jit
    def do_register_tiles(self, c, step: Int32, item: Int32, first: Int32, count: cutlass.Constexpr):
        """`count` register tiles of the warp from its `first` on."""
        for i in cutlass.range_constexpr(self.residency.register_tiles):
            if (i >= first) & (i < first + count) & (i < c.my_register):
                if cutlass.const_expr(self.wide and not self.stages):
                    ptx.copy_async_wait(self.residency.ahead)  # all but the inputs under way: parked chunks are there
                acc, loaded = self.multiply_register_tile(c, i, partial(self.load_early, c, step, item + i - first))
                if cutlass.const_expr(self.wide):
                    loaded = self.load_entries(c, step, item + i - first)
                tile = ptx.opaque(
                    c.first_register + i * self.line.warps
                )  # else its addresses fill registers in all positions
                self.finish_tile(c, tile, acc, loaded)

    @cute.jit
    def do_shared_tile(self, c, step: Int32, item: Int32, tile: Int32):
        """One of the warp's tiles in shared memory."""
        slot = self.slot_of(c, tile)
        self.wait_tile(c, tile, step)
        acc, loaded = self.multiply_slot(c, slot, partial(self.load_early, c, step, item))
        if cutlass.const_expr(self.ring > 0):
            if tile < c.streamed:
                self.refill(c, step, slot, tile)
        if cutlass.const_expr(self.wide):
            loaded = self.load_entries(c, step, item)
        self.finish_tile(c, tile, acc, loaded)

    def load_early(self, c, step: Int32, item: Int32):
        """load_entries amid the multiplication, where there are registers to spare: with 8 row slots it comes behind."""
        return None if self.wide else self.load_entries(c, step, item)
