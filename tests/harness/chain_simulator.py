"""Runs the chain kernel's own Python, without a GPU: which head tile meets which inputs when, and through which memory.

The kernel's source is executed as it stands, with stand-ins for CuTe DSL (plain numbers, `range`) and for the functions of
ptx.py and keys.py (a model of shared memory, of asynchronous copies and of mbarriers, on symbolic values). So what is checked
is the device code and not a copy of it. All warps of one CTA run, lane 0 of each, which starts every bulk copy and
finishes a tile's first entries of request row 0. They run by turns: a warp until it waits, and at random, from a seed,
which warp goes on and which bulk copy arrives next. The rows' embeddings and states, and the exchange, are left out; so
is what ranks send each other and copy beside it.

A simulation raises AssertionError when
- a copy reads beyond its array, writes outside its place, or is not announced to the byte;
- a slot is filled before its content was waited for and read, or a warp reads it without having waited for its content;
- a wait ends by another phase of its mbarrier than the one meant, or two warps wait on one mbarrier;
- all warps wait, and nothing that they wait for is under way;
- a product is not of all chunks of one whole tile, in order;
- noise or base logits are read before their copy was waited for, are overwritten before they were read, or fetched and not read;
- bias, base logit, noise, cache address and token id of a result do not belong together;
- an entry is cached, made a candidate, or with several ranks staged at each peer, other than once for each position.
"""

from __future__ import annotations

import importlib
import itertools
import random
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
HEAD, NOISE, BASE, CACHE, STAGING = (
    1 << bits for bits in (40, 42, 44, 46, 48)
)  # addresses of arrays: nothing else lies there
STAGING_BYTES = 1 << 40  # from one peer's staging to the next
SMEM = 1 << 10
LANES = 32
TILE_ROWS = 16
NOISE_BYTES = 4
SIZES = {"bf16": 2, "fp32": 4}
_names = itertools.count()


class _Uint32(int):
    """Unsigned 32 bits: made by wrapping, as on the device."""

    def __new__(cls, value: Any = 0) -> _Uint32:
        return super().__new__(cls, int(value) & 0xFFFF_FFFF)


def _int32(value: Any) -> int:
    """Signed 32 bits. The bits of a Uint32 are taken as they are; a number that does not fit is a mistake of the kernel."""
    if isinstance(value, _Uint32):
        return int(value) - (2**32 if value >= 2**31 else 0)
    value = int(value)
    assert -(2**31) <= value < 2**31, f"{value} does not fit into 32 bits"
    return value


class _Anything:
    """A namespace whose every function does nothing: fences and barriers of a single thread."""

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **keywords: None


def device_module(name: str, module: str, **stand_ins: ModuleType) -> ModuleType:
    """A module of templates/device as it stands, over numbers in place of DSL values.

    Args:
        name: what its package is called, for as long as it is imported.
        module: the module's name.
        stand_ins: modules of the package to take in place of the files of that name.
    """
    package = ModuleType(name)
    package.__path__ = [str(ROOT / "templates" / "device")]
    mine = _cutlass({"tid": 0, "cta": 0, "ctas": 1}) | {name: package}
    for stand_in, found in stand_ins.items():
        setattr(package, stand_in, found)
        mine[f"{name}.{stand_in}"] = found
    with _importable(name, mine):
        return importlib.import_module(f"{name}.{module}")


@contextmanager
def _importable(package: str, modules: dict[str, ModuleType]) -> Iterator[None]:
    """Modules that imports find, stand-ins for the DSL among them, until the package of that name is forgotten again."""
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "cutlass"}
    for name in before:
        del sys.modules[name]
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] in ("cutlass", package)]:
            del sys.modules[name]
        sys.modules.update(before)


def _cutlass(place: dict[str, int], sync_threads: Callable[[], None] = lambda: None) -> dict[str, ModuleType]:
    """Stand-ins for the DSL's modules. `place`: this thread's "tid", "cta" and "ctas"; `sync_threads`: the CTA's barrier."""
    arch = _Anything()
    arch.sync_threads = sync_threads
    arch.thread_idx = lambda: (place["tid"], 0, 0)
    arch.block_idx = lambda: (place["cta"], 0, 0)
    arch.grid_dim = lambda: (place["ctas"], 1, 1)
    arch.make_warp_uniform = int
    arch.vote_all_sync = bool  # of the one lane that is run
    cute = ModuleType("cutlass.cute")
    cute.arch = arch
    cute.jit = cute.kernel = lambda function: function
    cute.make_layout = lambda size: size
    cute.make_rmem_tensor = lambda size, kind: [kind(0)] * size
    runtime = ModuleType("cutlass.cute.runtime")
    runtime.make_fake_stream = object
    cutlass = ModuleType("cutlass")
    cutlass.cute = cute
    cutlass.Constexpr = object
    cutlass.Boolean, cutlass.Float32, cutlass.Int32, cutlass.Int64, cutlass.Uint32 = bool, float, _int32, int, _Uint32
    cutlass.Uint64 = lambda value: int(value) & 0xFFFF_FFFF_FFFF_FFFF
    cutlass.const_expr = lambda value: value
    cutlass.range_constexpr = range
    cutlass.range = lambda *bounds, unroll=1: range(*bounds)
    cutlass.min, cutlass.max = min, max
    address = _Anything()
    address.toint = lambda: SMEM
    allocator = _Anything()
    allocator.allocate = lambda size, alignment: address
    cutlass.memory = _Anything()
    cutlass.memory.SmemAllocator = lambda: allocator
    return {"cutlass": cutlass, "cutlass.cute": cute, "cutlass.cute.runtime": runtime}


class _Value(NamedTuple):
    """A number by what it stands for, in fp32 or bf16 bits alike. `step` is None for a bias, the same at any position."""

    kind: str  # "noise", "base", "bias", "logit", "score"
    step: int | None
    column: int  # of the shard

    def __lshift__(self, bits: int) -> _Value:
        return self

    def __or__(self, other: _Value) -> _Pair:  # type: ignore[override]
        return _Pair(self, other)


class _Pair(NamedTuple):
    """Two bf16 in one word."""

    low: _Value
    high: _Value

    def __lshift__(self, bits: int) -> _Value:
        return self.low

    def __and__(self, mask: int) -> _Value:
        return self.high

    def __rshift__(self, bits: int) -> _Value:
        return self.high if bits else self.low


@dataclass
class _Slot:
    """One slot of shared memory."""

    segments: list[tuple[int, int, int]] = field(default_factory=list)  # offset, bytes, byte of the head
    barrier: _Barrier | None = None  # of the fill under way, or of the last one
    reader: int | None = None  # the warp that waited for the last fill
    unread: bool = False  # is being filled, or was and has not been read yet


@dataclass
class _Barrier:
    """One mbarrier that a fill completes."""

    announced: int = 0  # bytes of the fill under way; 0: none is
    phases: int = 0  # that are complete
    slot: _Slot | None = None  # of the fill under way, or of the last one
    waiter: int | None = None  # the warp that waits on it, once and for all
    waits: int = 0  # that have ended


class _Ended(BaseException):
    """Ends a warp whose simulation has failed elsewhere."""


class _Turns:
    """Runs the warps of a CTA by turns, each in a thread of its own of which one at a time goes on.

    Args:
        warps: how many.
        work: what a warp runs.
        switch: called before a warp goes on.
        arrive: lets one copy under way arrive, and says whether there was one.
        seed: of the order.
    """

    def __init__(
        self,
        warps: int,
        work: Callable[[int], None],
        *,
        switch: Callable[[int], None],
        arrive: Callable[[random.Random], bool],
        seed: int,
    ) -> None:
        self.work, self.switch, self.arrive = work, switch, arrive
        self.rng = random.Random(seed)
        self.waiting: dict[int, Callable[[], bool]] = {warp: lambda: True for warp in range(warps)}  # until that holds
        self.turns = [threading.Semaphore(0) for _ in range(warps)]
        self.back = threading.Semaphore(0)
        self.failure: BaseException | None = None
        self.at_barrier: set[int] = set()
        self.current = 0

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """The current warp goes on when the condition holds."""
        warp = self.current
        self.waiting[warp] = condition
        self.back.release()
        self.turns[warp].acquire()
        if self.failure is not None:
            raise _Ended

    def sync_threads(self) -> None:
        """The CTA's barrier."""
        here = self.at_barrier
        here.add(self.current)
        if here >= self.waiting.keys() | {self.current}:
            self.at_barrier = set()
        self.wait_until(lambda: self.at_barrier is not here)

    def run(self) -> None:
        """Run all warps to their end; raises what the first of them raised."""
        threads = [threading.Thread(target=self._run, args=(warp,), daemon=True) for warp in self.waiting]
        for thread in threads:
            thread.start()
        while self.waiting and self.failure is None:
            ready = [warp for warp, condition in self.waiting.items() if condition()]
            if self.rng.randrange(len(ready) + 1) == len(ready) and self.arrive(self.rng):
                continue
            if ready:
                self._resume(self.rng.choice(ready))
            elif not self.arrive(self.rng):
                self.failure = AssertionError(f"warps {sorted(self.waiting)} wait for what nobody has started")
        for warp in list(self.waiting):
            self._resume(warp)
        for thread in threads:
            thread.join()
        if self.failure is not None:
            raise self.failure

    def _resume(self, warp: int) -> None:
        self.current = warp
        del self.waiting[warp]
        self.switch(warp)
        self.turns[warp].release()
        self.back.acquire()

    def _run(self, warp: int) -> None:
        self.turns[warp].acquire()
        try:
            if self.failure is None:
                self.work(warp)
        except _Ended:
            pass
        except BaseException as error:  # of the kernel's source: it is raised where the simulation was started
            self.failure = error
        self.back.release()


@dataclass
class _Staged:
    """The first entries of a tile's noise or base logits of request row 0 in their staging, or a parked chunk of the head."""

    warp: int
    first: Any  # _Value; of a parked chunk its byte of the head
    arrived: bool = False


@dataclass
class Simulation:
    """What one CTA did: how often each (position, column of the shard) was cached, made a candidate, and staged at all peers together."""

    cached: Counter[tuple[int, int]]
    candidates: Counter[tuple[int, int]]
    staged: Counter[tuple[int, int]]


class _Machine(ModuleType):
    """What stands for ptx.py and keys.py: memory, copies, mbarriers, and arithmetic on symbolic values."""

    def __init__(self, width: int, first_id: int, row_bytes: int, base_bytes: int, cache_bytes: int) -> None:
        super().__init__("ptx")
        self.width, self.first_id, self.row_bytes = width, first_id, row_bytes
        self.base_bytes, self.cache_bytes = base_bytes, cache_bytes
        self.pitch = -(-width // TILE_ROWS) * TILE_ROWS  # entries between two positions of noise, base logits and cache
        self.kernel: Any = None
        self.turns: Any = None
        self.warp = 0
        same: Callable[[Any], Any] = lambda x: x  # noqa: E731
        self.opaque = self.opaque_lane = self.float_of = self.bits_of = self.bf16_bits = same
        self.ldg_b32 = self.ldg_u16 = same
        self.bf16x2_bits = _Pair
        self.select = lambda condition, a, b: a if condition else b
        self.div_full = lambda logit, temperature: logit
        self.min_u32 = lambda word, limit: word
        self.shuffle_xor = lambda value, distance: value._replace(
            column=value.column + 1
        )  # what the lane 2 further has
        self.st_relaxed_sys_words = lambda address, words: self.stg_words(address, words)
        self.sts_b32 = self._store_input
        self.stg_u16 = self.stg_b32 = lambda address, x: self.stg_words(address, [x])
        self.start(0)

    def __getattr__(self, name: str) -> Any:
        """A predicated instruction, `x_if(condition, ...)`, is `x` where the condition holds."""
        plain = name.removesuffix("_if")
        if plain == name or name.startswith("__"):
            raise AttributeError(f"the simulation has no ptx.{name}")
        instruction = getattr(self, plain)
        return lambda condition, *arguments: instruction(*arguments) if condition else None

    def start(self, first_column: int) -> None:
        """Forget the CTA before."""
        self.first_column = first_column
        self.slots: dict[int, _Slot] = {}
        self.barriers: dict[int, _Barrier] = {}
        self.under_way: list[_Barrier] = []  # whose fills have been started whole
        self.parked: dict[int, _Staged] = {}
        self.staged: dict[int, _Staged] = {}
        self.orders: dict[int, tuple[int, int]] = {}
        self.other_lane = False
        self.found = Simulation(Counter(), Counter(), Counter())
        self.groups: defaultdict[int, list[list[_Staged]]] = defaultdict(list)  # by warp: who made a copy waits for it
        self.open: defaultdict[int, list[_Staged]] = defaultdict(list)

    # Shared memory

    def _region(self, address: int) -> str:
        """Which part of the layout an address lies in."""
        shared, place = self.kernel.shared, address - SMEM
        assert 0 <= place < shared.total, f"address {place} of {shared.total} bytes of shared memory"
        return [name for name, offset in shared._asdict().items() if offset <= place and name != "total"][-1]

    def lds_b128(self, address: int) -> list[Any]:
        if address - SMEM < self.kernel.slots * self.kernel.tile.slot_bytes:
            return [self._read_slot(address)] * 4
        if self._region(address) == "row_table":
            entry, rest = divmod(address - SMEM - self.kernel.shared.row_table, 16)
            row, step = divmod(entry, self.kernel.num_steps)
            assert (rest, row) == (0, 0)
            cache = CACHE + (step * self.pitch + self.first_column) * self.cache_bytes
            return [cache & 0xFFFF_FFFF, cache >> 32, 1.0, self.kernel.staged_mark(self.context, row, step, 0)]
        if self._region(address) == "embedding":
            return [None] * 4
        assert address in self.parked, "a parked chunk that nobody stored"
        assert self.parked[address].arrived, "a parked chunk is read before its copy was waited for"
        return [self.parked[address].first] * 4

    def sts_b128(self, address: int, x: list[Any]) -> None:
        self._park(address, x[0]).arrived = True

    def _park(self, address: int, source: Any) -> _Staged:
        assert self._region(address) == "parked", "a parked chunk lies outside its place"
        assert address not in self.parked, "two parked chunks share a place"
        self.parked[address] = _Staged(self.warp, source)
        return self.parked[address]

    def lds_b64(self, address: int) -> list[Any]:
        if self._region(address) == "inputs":
            first = self._read_input(address)
            return [first, first._replace(column=first.column + 1)]
        if self._region(address) == "ranks":
            peer = (address - SMEM - self.kernel.shared.ranks) // 8 - self.kernel.world
            assert 0 <= peer < self.kernel.peers
            return [0, (STAGING + peer * STAGING_BYTES) >> 32]
        return [None] * 2  # an embedding

    def lds_b32(self, address: int) -> Any:
        first = self._read_input(address)
        if first.kind == "base" and self.base_bytes == 2:
            return _Pair(first, first._replace(column=first.column + 1))
        return first

    def lds_u16(self, address: int) -> Any:
        if self._region(address) == "inputs":
            return self._read_input(address)
        if self.other_lane:
            return 0
        assert address in self.orders, "an entry of the order that nobody wrote"
        warp, tile = self.orders[address]
        assert warp == self.warp, f"the order of warp {warp}"
        return tile

    def sts_u16(self, address: int, x: int) -> None:
        if self._region(address) == "inputs":
            self._store_input(address, x)
            return
        assert self._region(address) == "order" and address not in self.orders
        self.orders[address] = self.warp, x

    # Noise and base logits

    def _stage(self, dst: int, src: int, nbytes: int) -> _Staged | None:
        assert self._region(dst) == "inputs" and dst - SMEM + nbytes <= self.kernel.shared.total
        if self.other_lane or (dst - SMEM - self.kernel.shared.inputs) // self.kernel.stage_bytes % self.kernel.rows:
            return None  # of another request row, or another piece of row 0
        array, size, kind = (BASE, self.base_bytes, "base") if src >= BASE else (NOISE, NOISE_BYTES, "noise")
        place, rest = divmod(src - array, size)
        step, column = divmod(place, self.pitch)
        assert rest == 0 and step < self.kernel.num_steps
        assert column + nbytes // size <= self.width, "reads beyond the shard"
        assert dst not in self.staged, "inputs are overwritten before they were read"
        self.staged[dst] = _Staged(self.warp, _Value(kind, step, column))
        return self.staged[dst]

    def _store_input(self, dst: int, src: int) -> None:
        """One base logit, stored by the thread that loaded it: there at once."""
        staged = self._stage(dst, src, self.base_bytes)
        if staged is not None:
            staged.arrived = True

    def copy_async_16(self, dst: int, src: int) -> None:
        self.copy_async_16_of(dst, src, 16)

    def copy_async_16_of(self, dst: int, src: int, nbytes: int) -> None:
        assert 0 <= nbytes <= 16 and dst % 16 == 0 and src % 16 == 0
        if self._region(dst) == "parked":
            assert nbytes in (0, 16)
            self.open[self.warp].append(self._park(dst, self._head_source(nbytes > 0, src)))
            return
        staged = self._stage(dst, src, nbytes)
        if staged is not None:
            assert nbytes > 0
            self.open[self.warp].append(staged)

    def copy_async_commit(self) -> None:
        if not self.other_lane:
            self.groups[self.warp].append(self.open.pop(self.warp, []))

    def copy_async_wait(self, pending: int) -> None:
        groups = self.groups[self.warp]
        for group in groups[: len(groups) - pending]:
            for staged in group:
                staged.arrived = True

    def _read_input(self, address: int) -> _Value:
        staged = self.staged.pop(address, None)
        assert staged is not None, "inputs that nobody fetched"
        assert staged.warp == self.warp, f"inputs of warp {staged.warp}"
        assert staged.arrived, "inputs are read before their copy was waited for"
        return staged.first

    # The head

    def _head_source(self, exists: bool, address: int) -> int | None:
        """The byte of the head at an address; None where nothing is read."""
        if not exists:
            return None
        assert 0 <= address - HEAD <= self.width * self.row_bytes - 16, "reads beyond the head"
        return address - HEAD

    def ldg_head_b128(self, condition: bool, address: int) -> list[int | None]:
        return [self._head_source(condition, address)] * 4

    def _barrier(self, bar: int) -> _Barrier:
        number, rest = divmod(bar - SMEM - self.kernel.shared.barriers, 8)
        assert rest == 0 and self._region(bar) == "barriers"
        assert number in self.barriers, f"mbarrier {number} is used before it was made"
        return self.barriers[number]

    def mbarrier_init(self, bar: int, arrivals: int) -> None:
        number = (bar - SMEM - self.kernel.shared.barriers) // 8
        assert arrivals == 1 and number not in self.barriers, f"mbarrier {number} is made twice"
        self.barriers[number] = _Barrier()
        self._barrier(bar)

    def mbarrier_expect(self, bar: int, nbytes: int) -> None:
        barrier = self._barrier(bar)
        assert not barrier.announced and barrier.phases == barrier.waits, (
            "announced before the last fill was waited for"
        )
        assert nbytes > 0
        barrier.announced, barrier.slot = nbytes, None

    def bulk_load(self, dst: int, src: int, nbytes: int, bar: int, keep: bool) -> None:
        barrier = self._barrier(bar)
        number, offset = divmod(dst - SMEM, self.kernel.tile.slot_bytes)
        assert 0 <= number < self.kernel.slots, f"slot {number} of {self.kernel.slots}"
        assert nbytes > 0 and nbytes % 16 == 0 and offset + nbytes <= self.kernel.tile.slot_bytes
        assert 0 <= src - HEAD and src - HEAD + nbytes <= self.width * self.row_bytes, "reads beyond the head"
        slot = self.slots.setdefault(number, _Slot())
        if barrier.slot is None:
            assert not slot.unread, "filled again before it was read"
            barrier.slot, slot.barrier, slot.segments, slot.reader, slot.unread = slot, barrier, [], None, True
        assert slot is barrier.slot, "a fill of two slots"
        slot.segments.append((offset, nbytes, src - HEAD))
        copied = sum(nbytes for _, nbytes, _ in slot.segments)
        assert copied <= barrier.announced, "copies more bytes than were announced"
        if copied == barrier.announced:
            self._check_rows(slot)
            self.under_way.append(barrier)

    def arrive(self, rng: random.Random) -> bool:
        """One of the copies under way arrives."""
        if self.under_way:
            barrier = self.under_way.pop(rng.randrange(len(self.under_way)))
            barrier.announced, barrier.phases = 0, barrier.phases + 1
            return True
        return False

    def mbarrier_wait(self, bar: int, parity: int) -> None:
        barrier, warp = self._barrier(bar), self.warp
        assert barrier.waiter in (None, warp), f"warps {barrier.waiter} and {warp} wait on one mbarrier"
        barrier.waiter = warp
        self.turns.wait_until(lambda: barrier.phases & 1 != parity)
        barrier.waits += 1
        assert barrier.waits == barrier.phases and barrier.slot is not None, "a wait ended by another phase"
        barrier.slot.reader = warp

    def _check_rows(self, slot: _Slot) -> None:
        """A slot holds consecutive rows of the head from a tile's first on, the upper eight shifted by 64 bytes."""
        tile = self.kernel.tile
        rows = {}
        for offset, nbytes, source in slot.segments:
            assert nbytes % tile.row_bytes == 0
            rows |= {offset + done: source + done for done in range(0, nbytes, tile.row_bytes)}
        first = min(rows.values())
        count = min(self.width - first // tile.row_bytes, TILE_ROWS)
        places = [row * tile.row_bytes + (64 if row >= TILE_ROWS // 2 else 0) for row in range(count)]
        wanted = {place: first + row * tile.row_bytes for row, place in enumerate(places)}
        assert rows == wanted, "a slot holds other rows than its tile's"

    def _read_slot(self, address: int) -> int | None:
        number, offset = divmod(address - SMEM, self.kernel.tile.slot_bytes)
        slot = self.slots[number]
        assert slot.reader == self.warp, "read before it was waited for"
        slot.unread = False
        for start, nbytes, source in slot.segments:
            if start <= offset < start + nbytes:
                return source + offset - start
        return None  # a vocabulary row that does not exist

    def mma_bf16(self, fragment: list[Any], e0: Any, e1: Any, acc: list[Any]) -> list[Any]:
        """Accumulators grow by what they were made from, behind their four numbers."""
        return [*acc, fragment[0]]

    def biases(self, row_slots: int, lane: int, acc: list[Any]) -> list[list[_Value | None]]:
        """The lane's biases of row 0, when the accumulators hold every chunk of both groups of a tile, in order."""
        column = acc[0][0][4] // self.row_bytes
        for groups in acc:
            for group, (_, _, _, _, *sources) in enumerate(groups):
                first = (column + group) * self.row_bytes
                wanted: list[Any] = [first + chunk * 64 for chunk in range(self.kernel.tile.chunks)]
                if column + group >= self.width:
                    wanted = [None] * self.kernel.tile.chunks
                assert sources == wanted, f"the product of column {column + group} is not of its chunks"
        return [[_Value("bias", None, column + entry) for entry in range(self.kernel.entries)]]

    # Results

    def add_rn(self, a: _Value, b: _Value) -> _Value:
        kinds = {("base", "bias"): "logit", ("logit", "noise"): "score"}
        assert (a.kind, b.kind) in kinds, f"{a} + {b}"
        assert a.column == b.column and b.step in (None, a.step), f"{a} and {b} do not belong together"
        return _Value(kinds[a.kind, b.kind], a.step, a.column)

    def stg_words(self, address: int, words: list[Any]) -> None:
        if address < CACHE:
            return  # the launch count
        values = [value for word in words for value in (word if isinstance(word, _Pair) else [word])]
        if address >= STAGING:
            self._store_staged((address - STAGING) % STAGING_BYTES, values)
            return
        place, rest = divmod(address - CACHE, self.cache_bytes)
        assert rest == 0
        for entry, value in enumerate(values):
            step, column = divmod(place + entry, self.pitch)
            assert value == _Value("logit", step, column), f"{value} cached at position {step}, column {column}"
            assert column < self.width
            self.found.cached[step, column] += 1

    def _store_staged(self, offset: int, values: list[_Value]) -> None:
        """Entries of row 0, which comes first of a tile's rows."""
        entry_bytes, kernel = self.cache_bytes, self.kernel
        tile, place = divmod(offset, kernel.rows * TILE_ROWS * entry_bytes)
        step, tile = divmod(tile, -(-kernel.shard_width // TILE_ROWS))
        for entry, value in enumerate(values):
            column = tile * TILE_ROWS + place // entry_bytes + entry
            assert value == _Value("logit", step, column), f"{value} staged at position {step}, column {column}"
            if column < self.width and entry < kernel.entries:  # the others are another lane's
                self.found.staged[step, column] += 1

    def ordered(self, score: _Value) -> int:
        """Later scores are larger, so that every one is kept."""
        assert score.kind == "score"
        self.scored = score
        self.found.candidates[score.step or 0, score.column] += score.column < self.width
        return sum(self.found.candidates.values())

    def low_word(self, token: int, id_bits: int) -> int:
        assert token == self.first_id + self.scored.column, f"token {token} for column {self.scored.column}"
        return 0


class Simulator:
    """The kernel of one model shape and plan line, ready to be run for any CTA.

    Args:
        rank_dim: Markov rank.
        num_steps: draft positions.
        vocab_size: target vocabulary.
        line: the plan line.
        base_dtype: "bf16" or "fp32".
        cache_dtype: "bf16" or "fp32".
        width: columns of the shard.
        rank: of the line's tensor-parallel ranks, when they exchange; else the kernel has one.
    """

    def __init__(
        self,
        *,
        rank_dim: int,
        num_steps: int,
        vocab_size: int,
        line: Any,
        base_dtype: str,
        width: int,
        cache_dtype: str = "bf16",
        rank: int | None = None,
    ) -> None:
        self.place = {"tid": 0, "cta": 0, "ctas": line.ctas}
        self.line, self.num_steps, self.width = line, num_steps, width
        self.rank, world = (0, 1) if rank is None else (rank, line.tp)
        self.shard_width = width if rank is None else -(-vocab_size // world)
        first_id = self.rank * self.shard_width
        self.machine = _Machine(width, first_id, 2 * rank_dim, SIZES[base_dtype], SIZES[cache_dtype])
        config = ModuleType("config")
        constants = {"RANK_DIM": rank_dim, "NUM_STEPS": num_steps, "VOCAB_SIZE": vocab_size, "ID_BITS": 19}
        constants |= {
            "DRAFT_VOCAB_SIZE": vocab_size,
            "DRAWN_COLUMNS": first_id + width,
            "SAMPLING_LIMIT": vocab_size,
            "D2T": False,
            "TRANSFORM": "none",
        }
        constants |= {"MULTIPLIER": 1.0, "SOFT_CAP": None, "INVERSE_SOFT_CAP": None, "BASE_CAPPED": False}
        config.__dict__.update(constants | {"DTYPE_BYTES": SIZES})
        self.name = f"simulated_{next(_names)}"
        with self._modules(config):
            self.module = importlib.import_module(f"{self.name}.model.chain")
            for name, functions in (("head_tiles", ("biases",)), ("keys", ("ordered", "low_word"))):
                module = importlib.import_module(f"{self.name}._device.{name}")
                for function in functions:
                    assert hasattr(module, function), f"{name}.{function} is gone"
                    setattr(module, function, getattr(self.machine, function))
        parts = (
            "reduce_warp",
            "agree",
            "agree_ranks",
            "meet_ranks",
            "fetch_embedding",
            "load_anchor",
            "fill_rest",
        )
        assert all(hasattr(self.module.ChainKernel, part) for part in (*parts, "load_row_table"))
        changed: dict[str, Any] = dict.fromkeys(parts, lambda self, *arguments: None)
        changed |= {part: self._by_all_lanes(part) for part in ("fetch_first_inputs", "make_barriers")}
        changed |= {"load_row_table": self._keep_context()}
        self.kernel_type = type("Instrumented", (self.module.ChainKernel,), changed)
        self.kernel = self.kernel_type(line, base_dtype, cache_dtype, world)
        self.kernel.shard_width = self.shard_width
        self.kernel.lane_rows = 1  # of lane 0 only row 0, whose inputs it copies itself
        self.machine.kernel = self.kernel

    @contextmanager
    def _modules(self, config: ModuleType) -> Iterator[None]:
        """A package of the checked-in kernel, this configuration and the stand-ins, for as long as it is imported."""
        generated = ROOT / "generated" / "dspark_kernels"
        packages = {self.name: generated, f"{self.name}._device": generated / "_device"}
        packages[f"{self.name}.model"] = generated / "deepseek_v41"
        mine: dict[str, ModuleType] = {}
        for name, folder in packages.items():
            mine[name] = ModuleType(name)
            mine[name].__path__ = [str(folder)]
        mine[f"{self.name}._device"].ptx = mine[f"{self.name}._device"].staging_memory = self.machine
        # Of transforms and of reduced vocabularies, which this model has not.
        for absent in ("score_ops", "row_memory"):
            mine[f"{self.name}._device.{absent}"] = ModuleType(absent)
            setattr(mine[f"{self.name}._device"], absent, mine[f"{self.name}._device.{absent}"])
        mine[f"{self.name}.model"].config = config
        mine |= {f"{self.name}._device.{memory}": self.machine for memory in ("ptx", "staging_memory")}
        mine[f"{self.name}.model.config"] = config
        mine |= _cutlass(self.place, lambda: self.machine.turns.sync_threads())
        with _importable(self.name, mine):
            yield

    def _by_all_lanes(self, part: str) -> Callable[[Any, Any], None]:
        """A part of the kernel in which the lanes share out what they write down; lane 0 comes last."""
        original, machine = getattr(self.module.ChainKernel, part), self.machine

        def by_all_lanes(kernel: Any, c: Any) -> None:
            machine.other_lane = True
            for lane in range(1, LANES):
                original(kernel, c._replace(lane=lane))
            machine.other_lane = False
            original(kernel, c)

        return by_all_lanes

    def _keep_context(self) -> Callable[[Any, Any], None]:
        """In the place of load_row_table: the machine makes the table's entries as they are read."""

        def load_row_table(kernel: Any, c: Any) -> None:
            self.machine.context = c

        return load_row_table

    def run(self, cta: int, *, base_vector: bool = True) -> Simulation:
        """Simulate one CTA, with base logits copied by 16 bytes or entry by entry. Raises AssertionError as the module says."""
        machine = self.machine
        tiles = -(-self.width // TILE_ROWS)
        first, last = (tiles * n // self.line.ctas for n in (cta, cta + 1))
        machine.start(first * TILE_ROWS)
        arguments = dict.fromkeys(self.module.ARGUMENTS, 0)
        arguments |= {
            "head": HEAD,
            "rows": self.line.row_slots,
            "shard_width": self.shard_width,
            "ctas": self.line.ctas,
        }
        arguments |= {"noise": NOISE, "noise_pitch": machine.pitch, "base": BASE, "base_pos_stride": machine.pitch}
        arguments |= {"base_row_stride": self.num_steps * machine.pitch, "base_vector": int(base_vector)}
        arguments |= {"cache_vector": 1, "rank": self.rank}
        self.place["cta"] = cta

        def switch(warp: int) -> None:
            machine.warp, self.place["tid"] = warp, warp * LANES

        machine.turns = _Turns(
            self.line.warps,
            lambda warp: self.kernel.kernel(tuple(arguments.values())),
            switch=switch,
            arrive=machine.arrive,
            seed=cta,
        )
        machine.turns.run()
        for number, slot in machine.slots.items():
            assert not slot.unread, f"slot {number}: a copy that nobody waited for or read"
        assert not machine.staged, f"inputs that nobody read: {machine.staged}"
        columns = [
            column
            for tile in range(first, last)
            for column in range(tile * TILE_ROWS, min(tile * TILE_ROWS + self.kernel.entries, self.width))
        ]
        wanted = dict.fromkeys(itertools.product(range(self.num_steps), columns), 1)
        assert machine.found.cached == wanted, "a tile was not cached once for each position"
        assert +machine.found.candidates == wanted, "a tile was not a candidate once for each position"
        peers = self.kernel.peers
        assert machine.found.staged == {at: peers for at in wanted if peers}, (
            "a tile was not staged once for each position"
        )
        return machine.found
