"""The work of one position in a chain kernel: all tiles of a warp, in the order in which the copies of others have time to arrive."""

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
        """All tiles of the warp, in the order of chain_head.tile_of."""
        if cutlass.const_expr(self.ring > 0):
            item = Int32(0)
            for turn in cutlass.range(cutlass.max(c.my_streamed + c.my_resident, c.my_register), unroll=1):
                if turn < c.my_register:
                    self.do_register_tiles(c, step, item, turn, 1)
                    item += 1
                if turn < c.my_streamed + c.my_resident:
                    self.do_shared_tile(c, step, item, turn)
                    item += 1
        else:
            self.do_register_tiles(c, step, Int32(0), Int32(0), self.residency.register_tiles)
            for it in cutlass.range(c.my_resident, unroll=1):
                self.do_shared_tile(c, step, c.my_register + it, it)

    @cute.jit
    def do_register_tiles(self, c, step: Int32, item: Int32, first: Int32, count: cutlass.Constexpr):
        """`count` register tiles of the warp from its `first` on."""
        for i in cutlass.range_constexpr(self.residency.register_tiles):
            if (i >= first) & (i < first + count) & (i < c.my_register):
                loaded = None if cutlass.const_expr(self.wide) else self.load_entries(c, step, item + i - first)
                acc = self.multiply_register_tile(c, i)
                if cutlass.const_expr(self.wide):
                    loaded = self.load_entries(c, step, item + i - first)
                tile = ptx.opaque(
                    c.first_register + i * self.line.warps
                )  # else its addresses fill registers in all positions
                self.finish_tile(c, tile, acc, loaded)

    @cute.jit
    def do_shared_tile(self, c, step: Int32, item: Int32, it: Int32):
        """The warp's it-th tile in shared memory."""
        tile, slot, streamed = self.shared_tile(c, it)
        if streamed | (step == 0):
            self.wait_slot(c, slot)
        loaded = None if cutlass.const_expr(self.wide) else self.load_entries(c, step, item)
        acc = self.multiply_slot(c, slot)
        if cutlass.const_expr(self.ring > 0):
            if streamed:
                self.refill(c, step, slot, tile)
        if cutlass.const_expr(self.wide):
            loaded = self.load_entries(c, step, item)
        self.finish_tile(c, tile, acc, loaded)
