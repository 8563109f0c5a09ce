"""The table of all models: where their heads live, and what recorded runs say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dsparkgen import pictures
from dsparkgen.plan import ModelPlan, numbers
from dsparkgen.spec import ModelSpec

TPS = (1, 2, 4, 8)
# The engine's loop takes at least so many times as long as the kernels alone for one row, by the largest head in MB.
TARGETS = ((80.0, 3.5), (float("inf"), 2.1))
ROWS = (1, 8)
NONE = "-"
Row = Mapping[str, Any]


def models_table(plans: Sequence[ModelPlan], device: str, rows: Mapping[str, Sequence[Row]]) -> Iterator[str]:
    """Markdown lines.

    Args:
        plans: of every model, in the order of the table.
        device: name of the GPU's description.
        rows: by model, bench rows of the checked-in kernels on one such GPU.
    """
    tps = " | ".join(f"TP {tp}" for tp in TPS)
    timed = " | ".join(f"rows {n}: alone | engine / alone | with noise | engine / with noise" for n in ROWS)
    yield f"| model | vocabulary | rank | N | head MB | {tps} | {timed} | picture |\n"
    yield "|---" * (6 + len(TPS) + 4 * len(ROWS)) + "|\n"
    for plan in plans:
        spec = plan.spec
        shape = (vocabulary(spec), spec.markov.rank_dim, spec.draft.num_steps, f"{head_mb(spec):.0f}")
        residency = (where(plan, device, tp) for tp in TPS)
        own = pictures.own_rows(spec, rows.get(spec.model.name, ()))
        cells = [spec.model.name, *shape, *residency, *(cell for n in ROWS for cell in _timing(own, n))]
        link = f"[svg](../benchmarks/results/{device}/{spec.model.name}.svg)"
        cells.append(link if pictures.drawn_rows(spec, own) else NONE)
        yield f"| {' | '.join(map(str, cells))} |\n"


def misses(specs: Sequence[ModelSpec], rows: Mapping[str, Sequence[Row]]) -> Iterator[str]:
    """Sentences on which recorded models are below `TARGETS`; nothing where none is recorded.

    Args:
        specs: of every model.
        rows: as for `models_table`.
    """
    recorded, below = 0, []
    for spec in specs:
        row = _first(pictures.own_rows(spec, rows.get(spec.model.name, ())), 1)
        if row is None:
            continue
        recorded += 1
        wanted = next(target for largest, target in TARGETS if head_mb(spec) <= largest)
        ratio = row["eager_us"] / row["us"]
        if ratio < wanted:
            below.append(f"{spec.model.name} ({ratio:.2f} of {wanted})")
    if recorded:
        (largest, small), (_, large) = TARGETS
        yield f"Aimed at, for one row: the engine's loop at least {small} times as long as the kernels alone where the head is at most "
        yield f"{largest:.0f} MB, {large} times where it is larger. "
        yield f"{recorded} of {len(specs)} models are recorded; "
        yield f"below that: {', '.join(below)}.\n" if below else "none of them is below that.\n"


def head_mb(spec: ModelSpec) -> float:
    """The Markov head in bf16, in millions of bytes."""
    return spec.vocabulary.draft * 2 * spec.markov.rank_dim / 1e6


def vocabulary(spec: ModelSpec) -> str:
    """The vocabulary, as "draft of target" where they differ."""
    draft, target = spec.vocabulary.draft, spec.vocabulary.target
    return f"{target}" if draft == target else f"{draft} of {target}"


def where(plan: ModelPlan, device: str, tp: int) -> str:
    """Head tiles of an SM in registers + shared memory + streamed each position, for one request row."""
    line = plan.line(device, tp, 1)
    if line is None:
        return NONE
    found = numbers(plan, line)
    return f"{found.register_tiles} + {found.resident_tiles} + {found.streamed_tiles}"


def _first(rows: Sequence[Row], count: int) -> Row | None:
    """The row of the kernel that a batch of so many rows takes first, on one GPU; None where none is recorded."""
    for kernel in ("chain", "step", "fused"):
        for row in rows:
            if (row["kernel"], row["tp"], row["rows"]) == (kernel, 1, count):
                return row
    return None


def _timing(rows: Sequence[Row], count: int) -> Iterator[str]:
    """Of the kernel that a batch of so many rows takes first: us alone and with noise, each with the engine's loop to it."""
    row = _first(rows, count)
    if row is None:
        yield from (NONE,) * 4
        return
    mark = "" if row["kernel"] == "chain" else f" ({row['kernel']})"
    for us in (row["us"], row["call_us"]):
        yield f"{us:.1f}{mark}"
        yield f"{row['eager_us'] / us:.1f}"


def step_table(rows: Mapping[str, Sequence[Row]]) -> Iterator[str]:
    """Markdown lines of every recorded run of step kernels; nothing where there is none."""
    found = [(model, row) for model, own in rows.items() for row in own if row["kernel"] == "step"]
    if not found:
        return
    yield "| model | rows | step kernels: us | bias GEMMs alone | their share | floor "
    yield "| engine's loop | engine / step | without transform | that / step | fused loop | fused / step |\n"
    yield "|---" * 12 + "|\n"
    for model, row in sorted(found, key=lambda one: (one[0], one[1]["rows"])):
        us, gemm = row["call_us"], row["gemm_us"]
        cells = [model, str(row["rows"]), f"{us:.0f}", f"{gemm:.0f}", f"{gemm / us:.0%}", f"{row['floor_us']:.0f}"]
        for name in ("eager_us", "plain_us", "fused_us"):
            cells += [f"{row[name]:.0f}", f"{row[name] / us:.2f}"] if name in row else [NONE, NONE]
        yield f"| {' | '.join(cells)} |\n"
