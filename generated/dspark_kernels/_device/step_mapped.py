"""Cache rows of a reduced vocabulary from the ranks' flat shards: a target id takes its draft id's logit, or -inf where it has none.

A block takes some target columns of several request rows. Which of these are drafted is the same in every row: it lists them once, keeps
-inf in shared memory everywhere else, and copies the drafted logits of a few rows there, then whole rows to the cache. So the map is
read once for all rows, and the cache is written in vectors.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from . import ptx, step_fill, step_memory
from .kernel_image import LaunchShape
from .step_fill import BF16_BYTES, ENTRIES, FP32_BYTES, STATE_BYTES, THREADS

COLUMNS = THREADS * ENTRIES  # of a block
ROWS = 8  # request rows of a block
AT_ONCE = {BF16_BYTES: 4, FP32_BYTES: 2}  # of these, rows that are in shared memory together, by bytes of an entry
COUNT_BYTES, LISTED_BYTES = (
    16,
    8,
)  # in shared memory: the number of drafted columns; of each, its byte in a row, and its draft id
INVERSE_BYTES = 4
MINUS_INFINITY = {BF16_BYTES: 0xFF80FF80, FP32_BYTES: 0xFF800000}  # a word of the cache, by bytes of an entry


class MappedFillKernel(step_fill.Fill):
    """The cache of every row and position from the ranks' flat shards, by target id. `vector`: 16-byte stores."""

    def __init__(self, config, cache_dtype: str, vector: bool, pdl: bool) -> None:
        step_fill.Fill.__init__(self, config, cache_dtype, vector, pdl)
        self.parts = -(-self.vocab_size // COLUMNS)
        self.row_bytes, self.at_once = COLUMNS * self.cache_bytes, AT_ONCE[self.cache_bytes]
        self.bytes = self.shared_bytes(config, cache_dtype)

    @staticmethod
    def shared_bytes(config, cache_dtype: str) -> int:
        """Shared memory of a block."""
        entry_bytes = config.DTYPE_BYTES[cache_dtype]
        return COUNT_BYTES + COLUMNS * (LISTED_BYTES + AT_ONCE[entry_bytes] * entry_bytes)

    def launch_shape(self) -> LaunchShape:
        """How it is launched."""
        grid = (self.parts, self.num_steps, ("rows", ROWS))
        return LaunchShape(grid, THREADS, self.bytes, cooperative=False, pdl=self.pdl)

    @cute.jit
    def list_drafted(self, tid: Int32, part: Int32, inverse: Int64, count: Int32, listed: Int32, entries: Int32):
        """The block's drafted columns, in any order, and -inf in all others of each row in shared memory."""
        word = Uint32(MINUS_INFINITY[self.cache_bytes])
        for i in cutlass.range_constexpr(self.at_once * self.row_bytes // (THREADS * step_memory.VECTOR_BYTES)):
            ptx.sts_b128(entries + (i * THREADS + tid) * step_memory.VECTOR_BYTES, [word] * 4)
        if tid == 0:
            ptx.sts_b32(count, Uint32(0))
        cute.arch.sync_threads()
        column = part * COLUMNS + tid * ENTRIES
        # The map is padded to whole vectors.
        there, at = column < self.vocab_size, inverse + Int64(column) * INVERSE_BYTES
        vectors = range(0, ENTRIES * INVERSE_BYTES, step_memory.VECTOR_BYTES)
        drafts = [word for i in vectors for word in step_memory.load_vector_if(there, at + i)]
        for e in cutlass.range_constexpr(ENTRIES):
            if (column + e < self.vocab_size) & (Int32(drafts[e]) >= 0):
                place = step_memory.count_shared(count)
                byte = Uint32((tid * ENTRIES + e) * self.cache_bytes)
                ptx.sts_b64(listed + Int32(place) * LISTED_BYTES, [byte, drafts[e]])
        cute.arch.sync_threads()

    @cute.kernel
    def kernel(
        self,
        shards: Int64,
        rank_stride: Int64,
        pitch: Int64,
        cache: Int64,
        cache_req_stride: Int64,
        cache_pos_stride: Int64,
        idx_mapping: Int64,
        inverse: Int64,
        rows: Int32,
        width: Int32,
    ):
        tid, _, _ = cute.arch.thread_idx()
        part, step, group = cute.arch.block_idx()
        count = Int32(cutlass.memory.SmemAllocator().allocate(self.bytes, step_memory.VECTOR_BYTES).toint())
        listed = count + COUNT_BYTES
        entries = listed + COLUMNS * LISTED_BYTES
        # The map was written when the sampler was made, not by the kernel ahead.
        self.list_drafted(tid, part, inverse, count, listed, entries)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        drafted = Int32(ptx.lds_b32(count))
        position = cache + Int64(step) * cache_pos_stride * self.cache_bytes
        for turn in cutlass.range(ROWS // self.at_once, unroll=1):
            states, sources = [], []
            for r in cutlass.range_constexpr(self.at_once):
                row = group * ROWS + turn * self.at_once + r
                sample = Int64(cutlass.min(row, rows - 1)) * self.num_steps + Int64(step)
                state = ptx.ldg_s64(idx_mapping + sample * STATE_BYTES)
                states.append(ptx.select(row < rows, state, Int64(-1)))
                sources.append(shards + sample * pitch * self.cache_bytes)
            for i in cutlass.range(tid, drafted, THREADS, unroll=1):
                byte, draft = ptx.lds_b64(listed + i * LISTED_BYTES)
                place = self.place(Int64(0), rank_stride, Int32(draft), width)
                load = step_memory.load_u16_if if self.cache_bytes == BF16_BYTES else step_memory.load_b32_if
                words = [load(state >= 0, source + place) for state, source in zip(states, sources, strict=True)]
                for r in cutlass.range_constexpr(self.at_once):
                    self.put(entries + r * self.row_bytes + Int32(byte), words[r])
            cute.arch.sync_threads()
            for r in cutlass.range_constexpr(self.at_once):
                target = position + states[r] * cache_req_stride * self.cache_bytes
                self.store_row(tid, part, states[r] >= 0, entries + r * self.row_bytes, target)
            if turn + 1 < ROWS // self.at_once:
                cute.arch.sync_threads()  # the rows are stored: the next ones may take their place

    def put(self, address: Int32, word: Uint32) -> None:
        """One entry into shared memory."""
        if self.cache_bytes == BF16_BYTES:
            ptx.sts_u16(address, word)
        else:
            ptx.sts_b32(address, word)

    def store_row(self, tid: Int32, part: Int32, live: Boolean, row: Int32, target: Int64) -> None:
        """The block's columns of one row from shared memory to the cache."""
        if self.vector:
            vectors = range(0, ENTRIES * self.cache_bytes, step_memory.VECTOR_BYTES)
            words = [word for i in vectors for word in ptx.lds_b128(row + tid * (ENTRIES * self.cache_bytes) + i)]
            self.store_vectors(live, part * COLUMNS + tid * ENTRIES, target, words)
            return
        load = ptx.lds_u16 if self.cache_bytes == BF16_BYTES else ptx.lds_b32
        for e in range(ENTRIES):
            place = e * THREADS + tid
            column = part * COLUMNS + place
            word = load(row + place * self.cache_bytes)
            self.store_entry(live & (column < self.vocab_size), target + Int64(column) * self.cache_bytes, word)

    @cute.jit
    def __call__(
        self,
        shards: Int64,
        rank_stride: Int64,
        pitch: Int64,
        cache: Int64,
        cache_req_stride: Int64,
        cache_pos_stride: Int64,
        idx_mapping: Int64,
        inverse: Int64,
        rows: Int32,
        world: Int32,
        width: Int32,
        stream,
    ):
        self.kernel(
            shards, rank_stride, pitch, cache, cache_req_stride, cache_pos_stride, idx_mapping, inverse, rows, width
        ).launch(
            grid=[self.parts, self.num_steps, (rows + (ROWS - 1)) // ROWS], block=[THREADS, 1, 1], smem=self.bytes,
            stream=stream, use_pdl=self.pdl
        )  # fmt: skip
