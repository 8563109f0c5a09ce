"""The table of all models: where their heads live, and what recorded runs say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dsparkgen.plan import ModelPlan, numbers
from dsparkgen.spec import ModelSpec

TPS = (1, 2, 4, 8)
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
    timed = " | ".join(f"rows {n}: alone | engine's / own | with noise | engine's / own" for n in ROWS)
    yield f"| model | vocabulary | rank | N | head MB | {tps} | {timed} |\n"
    yield "|---" * (5 + len(TPS) + 4 * len(ROWS)) + "|\n"
    for plan in plans:
        spec = plan.spec
        head = spec.vocabulary.draft * 2 * spec.markov.rank_dim / 1e6
        shape = (vocabulary(spec), spec.markov.rank_dim, spec.draft.num_steps, f"{head:.0f}")
        residency = (where(plan, device, tp) for tp in TPS)
        own = [row for row in rows.get(spec.model.name, ()) if row["vocab_size"] == spec.vocabulary.draft]
        cells = [spec.model.name, *shape, *residency, *(cell for n in ROWS for cell in _timing(own, n))]
        yield f"| {' | '.join(map(str, cells))} |\n"


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


def _timing(rows: Sequence[Row], count: int) -> Iterator[str]:
    """Of the kernel that a batch of so many rows takes first: us alone and with noise, each with the engine's loop to it."""
    for kernel in ("chain", "step", "fused"):
        for row in rows:
            if (row["kernel"], row["tp"], row["rows"]) == (kernel, 1, count):
                mark = "" if kernel == "chain" else f" ({kernel})"
                for us in (row["us"], row["call_us"]):
                    yield f"{us:.1f}{mark}"
                    yield f"{row['eager_us'] / us:.1f}"
                return
    yield from (NONE,) * 4


def step_table(rows: Mapping[str, Sequence[Row]]) -> Iterator[str]:
    """Markdown lines of every recorded run of step kernels; nothing where there is none."""
    found = [(model, row) for model, own in rows.items() for row in own if row["kernel"] == "step"]
    if not found:
        return
    yield "| model | rows | step kernels: us | bias GEMMs alone | their share | floor "
    yield "| engine's loop | / own | without transform | / own | fused loop | / own |\n"
    yield "|---" * 12 + "|\n"
    for model, row in sorted(found, key=lambda one: (one[0], one[1]["rows"])):
        us, gemm = row["call_us"], row["gemm_us"]
        cells = [model, str(row["rows"]), f"{us:.0f}", f"{gemm:.0f}", f"{gemm / us:.0%}", f"{row['floor_us']:.0f}"]
        for name in ("eager_us", "plain_us", "fused_us"):
            cells += [f"{row[name]:.0f}", f"{row[name] / us:.2f}"] if name in row else [NONE, NONE]
        yield f"| {' | '.join(cells)} |\n"
