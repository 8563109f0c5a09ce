"""Cache rows from the ranks' flat shards: draft column d lies in shard d // width at d % width.

With a reduced vocabulary the row is by target id: a column takes its draft id's logit, or -inf where no draft id maps to it. There
a block keeps its columns' places and fills them for several request rows: the map, twice as wide as a bf16 cache row, is read once.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from . import ptx, step_memory
from .kernel_image import LaunchShape

THREADS = 256
ENTRIES = 8  # columns that a thread copies at a time
TURNS = 4  # times that, all loaded before the first is stored
BLOCK = THREADS * ENTRIES * TURNS  # columns of a block
MAPPED_ROWS = 8  # request rows of a block that maps ids and stores vectors
MAPPED_AT_ONCE = 4  # of these, rows whose entries are all loaded before the first is stored
BF16_BYTES, FP32_BYTES, INVERSE_BYTES, STATE_BYTES = 2, 4, 4, 8
WORDS = step_memory.VECTOR_BYTES // FP32_BYTES  # of a vector
MINUS_INFINITY = {2: 0xFF80, 4: 0xFF800000}  # by bytes of an entry


class Fill:
    """The copy that each block of the kernel makes. `vector`: 16 bytes at a time."""

    def __init__(self, config, cache_dtype: str, vector: bool, pdl: bool) -> None:
        self.cache_bytes = config.DTYPE_BYTES[cache_dtype]
        self.vocab_size, self.num_steps, self.maps_ids, self.pdl = config.VOCAB_SIZE, config.NUM_STEPS, config.D2T, pdl
        self.vector = vector
        self.rows, columns = (MAPPED_ROWS, BLOCK // TURNS) if vector and self.maps_ids else (1, BLOCK)
        self.parts = -(-self.vocab_size // columns)

    def fill(
        self, tid: Int32, part: Int32, source: Int64, rank_stride: Int64, target: Int64, inverse: Int64, width: Int32
    ):
        """One block's columns of one row at one position. `source`: of rank 0; `target`: of column 0."""
        for turn in range(1 if self.vector else TURNS):
            if self.vector:
                self.fill_vectors(tid, part, source, rank_stride, target, width)
            else:
                self.fill_entries(tid, part * TURNS + turn, source, rank_stride, target, inverse, width)

    def place(self, source: Int64, rank_stride: Int64, draft: Int32, width: Int32) -> Int64:
        """Address of a draft column in the shards."""
        return source + (Int64(draft // width) * rank_stride + Int64(draft % width)) * self.cache_bytes

    def fill_vectors(self, tid: Int32, part: Int32, source: Int64, rank_stride: Int64, target: Int64, width: Int32):
        """All turns of a block, ENTRIES neighbours a thread, which lie in one shard: its width is a multiple."""
        columns = [part * BLOCK + (turn * THREADS + tid) * ENTRIES for turn in range(TURNS)]
        vectors = range(0, ENTRIES * self.cache_bytes, step_memory.VECTOR_BYTES)
        loaded = []
        for column in columns:
            address = self.place(source, rank_stride, column, width)
            loaded.append([step_memory.load_vector_if(column < self.vocab_size, address + i) for i in vectors])
        for column, words in zip(columns, loaded, strict=True):
            self.store_vectors(Boolean(True), column, target, [word for vector in words for word in vector])

    def store_vectors(self, live: Boolean, column: Int32, target: Int64, words: list[Uint32]):
        """Stores the cache words of ENTRIES columns from `column` on, those within the vocabulary."""
        address = target + Int64(column) * self.cache_bytes
        whole = live & (column + ENTRIES <= self.vocab_size)
        for i in range(0, len(words), WORDS):
            step_memory.store_vector_if(whole, address + i * FP32_BYTES, words[i : i + WORDS])
        partial = live & (column < self.vocab_size) & (column + ENTRIES > self.vocab_size)
        for e in range(self.vocab_size % ENTRIES):
            word = words[e] if self.cache_bytes == FP32_BYTES else words[e // 2] >> Uint32(16 * (e % 2))
            self.store_entry(partial, address + e * self.cache_bytes, word)

    @cute.jit
    def fill_mapped(
        self,
        tid: Int32,
        part: Int32,
        step: Int32,
        first_row: Int32,
        rows: Int32,
        shards: Int64,
        rank_stride: Int64,
        pitch: Int64,
        cache: Int64,
        req_bytes: Int64,
        idx_mapping: Int64,
        inverse: Int64,
        width: Int32,
    ):
        """One block's columns of several rows, ENTRIES neighbours a thread. `cache`: of state 0 at this position."""
        column = (part * THREADS + tid) * ENTRIES
        # The map is padded to whole vectors.
        there, at = column < self.vocab_size, inverse + Int64(column) * INVERSE_BYTES
        vectors = range(0, ENTRIES * INVERSE_BYTES, step_memory.VECTOR_BYTES)
        drafts = [Int32(word) for i in vectors for word in step_memory.load_vector_if(there, at + i)]
        mapped = [there & (draft >= 0) for draft in drafts]
        places = [self.place(Int64(0), rank_stride, cutlass.max(draft, 0), width) for draft in drafts]
        load = step_memory.load_u16_if if self.cache_bytes == BF16_BYTES else step_memory.load_b32_if
        masked = MINUS_INFINITY[self.cache_bytes]
        for turn in cutlass.range(self.rows // MAPPED_AT_ONCE, unroll=1):
            states, entries = [], []
            for r in cutlass.range_constexpr(MAPPED_AT_ONCE):
                row = first_row + turn * MAPPED_AT_ONCE + r
                sample = Int64(cutlass.min(row, rows - 1)) * self.num_steps + Int64(step)
                state = ptx.select(row < rows, ptx.ldg_s64(idx_mapping + sample * STATE_BYTES), Int64(-1))
                source = shards + sample * pitch * self.cache_bytes
                live = state >= 0
                states.append(state)
                entries.append([load(live & m, source + p, masked) for m, p in zip(mapped, places, strict=True)])
            for r in cutlass.range_constexpr(MAPPED_AT_ONCE):
                words = entries[r]
                if cutlass.const_expr(self.cache_bytes == BF16_BYTES):
                    words = [words[i] | (words[i + 1] << Uint32(16)) for i in range(0, ENTRIES, 2)]
                self.store_vectors(states[r] >= 0, column, cache + states[r] * req_bytes, words)

    def fill_entries(
        self, tid: Int32, turn: Int32, source: Int64, rank_stride: Int64, target: Int64, inverse: Int64, width: Int32
    ):
        """One turn of a block, neighbours by thread."""
        columns = [(turn * ENTRIES + e) * THREADS + tid for e in range(ENTRIES)]
        there = [column < self.vocab_size for column in columns]
        drafts, mapped = columns, there
        if self.maps_ids:
            addresses = [inverse + Int64(column) * INVERSE_BYTES for column in columns]
            found = [Int32(step_memory.load_b32_if(t, a)) for t, a in zip(there, addresses, strict=True)]
            mapped = [t & (draft >= 0) for t, draft in zip(there, found, strict=True)]
            drafts = [ptx.select(m, draft, Int32(0)) for m, draft in zip(mapped, found, strict=True)]
        load = step_memory.load_u16_if if self.cache_bytes == BF16_BYTES else step_memory.load_b32_if
        words = [load(m, self.place(source, rank_stride, d, width)) for m, d in zip(mapped, drafts, strict=True)]
        for column, t, m, word in zip(columns, there, mapped, words, strict=True):
            value = ptx.select(m, word, Uint32(MINUS_INFINITY[self.cache_bytes]))
            self.store_entry(t, target + Int64(column) * self.cache_bytes, value)

    def store_entry(self, mine: Boolean, address: Int64, word: Uint32) -> None:
        """One cache entry, from the low half of a word where it is bf16."""
        if self.cache_bytes == FP32_BYTES:
            ptx.stg_words_if(mine, address, [word])
        else:
            ptx.stg_u16_if(mine, address, word)


class FillKernel(Fill):
    """The cache of every row and position from the ranks' flat shards."""

    def launch_shape(self) -> LaunchShape:
        """How it is launched."""
        return LaunchShape(
            (self.parts, self.num_steps, ("rows", self.rows)), THREADS, 0, cooperative=False, pdl=self.pdl
        )

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
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        cache_step = cache + Int64(step) * cache_pos_stride * self.cache_bytes
        req_bytes = cache_req_stride * self.cache_bytes
        if cutlass.const_expr(self.vector and self.maps_ids):
            self.fill_mapped(
                tid, part, step, group * self.rows, rows, shards, rank_stride, pitch, cache_step, req_bytes, idx_mapping, inverse, width
            )  # fmt: skip
        else:
            sample = Int64(group) * self.num_steps + Int64(step)
            state = ptx.ldg_s64(idx_mapping + sample * STATE_BYTES)
            if state >= 0:
                source = shards + sample * pitch * self.cache_bytes
                self.fill(tid, part, source, rank_stride, cache_step + state * req_bytes, inverse, width)

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
            grid=[self.parts, self.num_steps, (rows + (self.rows - 1)) // self.rows],
            block=[THREADS, 1, 1],
            stream=stream,
            use_pdl=self.pdl,
        )
