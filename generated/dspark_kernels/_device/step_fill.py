"""Cache rows from the ranks' flat shards: draft column d lies in shard d // width at d % width."""

import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from . import ptx, step_memory
from .kernel_image import LaunchShape

THREADS = 256
ENTRIES = 8  # columns that a thread copies at a time
TURNS = 4  # times that, all loaded before the first is stored
BLOCK = THREADS * ENTRIES * TURNS  # columns of a block
BF16_BYTES, FP32_BYTES, STATE_BYTES = 2, 4, 8
WORDS = step_memory.VECTOR_BYTES // FP32_BYTES  # of a vector


class Fill:
    """The copy that each block of the kernel makes. `vector`: 16 bytes at a time."""

    def __init__(self, config, cache_dtype: str, vector: bool, pdl: bool) -> None:
        self.cache_bytes = config.DTYPE_BYTES[cache_dtype]
        self.vocab_size, self.num_steps, self.vector, self.pdl = config.VOCAB_SIZE, config.NUM_STEPS, vector, pdl
        self.parts = -(-self.vocab_size // BLOCK)

    @staticmethod
    def shared_bytes(config, cache_dtype: str) -> int:
        """Shared memory of a block."""
        return 0

    def fill(self, tid: Int32, part: Int32, source: Int64, rank_stride: Int64, target: Int64, width: Int32):
        """One block's columns of one row at one position. `source`: of rank 0; `target`: of column 0."""
        for turn in range(1 if self.vector else TURNS):
            if self.vector:
                self.fill_vectors(tid, part, source, rank_stride, target, width)
            else:
                self.fill_entries(tid, part * TURNS + turn, source, rank_stride, target, width)

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

    def fill_entries(self, tid: Int32, turn: Int32, source: Int64, rank_stride: Int64, target: Int64, width: Int32):
        """One turn of a block, neighbours by thread."""
        columns = [(turn * ENTRIES + e) * THREADS + tid for e in range(ENTRIES)]
        there = [column < self.vocab_size for column in columns]
        load = step_memory.load_u16_if if self.cache_bytes == BF16_BYTES else step_memory.load_b32_if
        words = [load(t, self.place(source, rank_stride, c, width)) for t, c in zip(there, columns, strict=True)]
        for column, t, word in zip(columns, there, words, strict=True):
            self.store_entry(t, target + Int64(column) * self.cache_bytes, word)

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
        return LaunchShape((self.parts, self.num_steps, "rows"), THREADS, 0, cooperative=False, pdl=self.pdl)

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
        part, step, row = cute.arch.block_idx()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        sample = Int64(row) * self.num_steps + Int64(step)
        state = ptx.ldg_s64(idx_mapping + sample * STATE_BYTES)
        if state >= 0:
            source = shards + sample * pitch * self.cache_bytes
            target = cache + (state * cache_req_stride + Int64(step) * cache_pos_stride) * self.cache_bytes
            self.fill(tid, part, source, rank_stride, target, width)

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
        ).launch(grid=[self.parts, self.num_steps, rows], block=[THREADS, 1, 1], stream=stream, use_pdl=self.pdl)
