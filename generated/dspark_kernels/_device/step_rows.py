"""The small step kernels, one warp a request row: embeddings of the anchors, and the winner among ranks."""

import cutlass.cute as cute
from cutlass import Int32, Int64

from . import ptx, step_sizes, step_tail
from .kernel_image import LaunchShape

LANES = 32


class RowKernel(step_tail.Tail):
    """A kernel of one warp a request row."""

    def launch_shape(self) -> LaunchShape:
        """How it is launched."""
        return LaunchShape(("rows", 1, 1), LANES, 0, cooperative=False, pdl=self.pdl)


class AnchorKernel(RowKernel):
    """Embeddings of the anchors, and the scratch of their rows zeroed. One warp a row."""

    @cute.kernel
    def kernel(self, embed: Int64, embeddings: Int64, input_ids: Int64, query_per_row: Int32, scratch: Int64):
        lane, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if lane < step_sizes.SCRATCH_WORDS:
            ptx.stg_s64(scratch + Int64(row) * step_sizes.SCRATCH_BYTES + lane * step_sizes.WORD_BYTES, Int64(0))
        token = Int32(ptx.ldg_b32(input_ids + Int64(row) * Int64(query_per_row) * 4))
        if (token < 0) | (token >= self.vocab_size):
            token = Int32(0)
        self.gather_embedding(lane, embed, token, embeddings, row)

    @cute.jit
    def __call__(
        self,
        embed: Int64,
        embeddings: Int64,
        input_ids: Int64,
        query_per_row: Int32,
        scratch: Int64,
        rows: Int32,
        stream,
    ):
        self.kernel(embed, embeddings, input_ids, query_per_row, scratch).launch(
            grid=[rows, 1, 1], block=[LANES, 1, 1], stream=stream, use_pdl=self.pdl
        )


class PickKernel(RowKernel):
    """The winner of each row from the packets of all ranks. One warp a row."""

    @cute.kernel
    def kernel(
        self,
        packets: Int64,
        draft_tokens: Int64,
        token_stride: Int64,
        embed: Int64,
        embeddings: Int64,
        step: Int32,
        world: Int32,
    ):
        lane, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        rows, _, _ = cute.arch.grid_dim()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        token = self.pick_token(lane, packets, row, rows, world)
        self.write_token(lane, draft_tokens, token_stride, row, step, token)
        self.gather_embedding(lane, embed, token, embeddings, row)

    @cute.jit
    def __call__(
        self,
        packets: Int64,
        draft_tokens: Int64,
        token_stride: Int64,
        embed: Int64,
        embeddings: Int64,
        rows: Int32,
        step: Int32,
        world: Int32,
        stream,
    ):
        self.kernel(packets, draft_tokens, token_stride, embed, embeddings, step, world).launch(
            grid=[rows, 1, 1], block=[LANES, 1, 1], stream=stream, use_pdl=self.pdl
        )
