"""`make demo`: the way from a spec to draft tokens on a machine without a GPU, each step shown.

    python -m dsparkgen.demo [MODEL]

Runs from a checkout: the reference implementation comes from tests/harness. Exit code 1 when a step's answer is no.
"""

import importlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from dsparkgen import tree
from dsparkgen.compile import run_compile
from dsparkgen.plan import plan_model, render_text

MODEL = "deepseek_v41"
DEVICE = "h200"
ARCHS = ("sm_90a", "sm_100a")
TEMPERATURES = (0.9, 0.6, 0.0, 1.2)  # one request row each; 0 is greedy
SEED = 2024

console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)


def show_spec(roots: tree.Roots, model: str) -> bool:
    """Prints the spec as it stands in the repository."""
    console.print((roots.specs / f"{model}.toml").read_text().rstrip(), markup=False, soft_wrap=True)
    return True


def show_plan(roots: tree.Roots, model: str) -> bool:
    """Plans the model for one device and prints what stays where."""
    spec = tree.read_specs(roots.specs)[model]
    plan = plan_model(spec, tree.load_all_devices(roots))
    slots = sorted({line.row_slots for line in plan.lines})
    console.print(render_text(plan, DEVICE, spec.parallel.tp, (slots[0], slots[-1])), markup=False, soft_wrap=True)
    return True


def show_tree(roots: tree.Roots, model: str) -> bool:
    """Renders everything and holds the checked-in tree against it."""
    built = tree.build_tree(roots)
    changes = tree.compare(built, roots)
    for name, text in built.files.items():
        if f"/{model}/" in name:
            console.print(f"rendered generated/{name}: {len(text.splitlines())} lines", markup=False)
    for change in changes:
        console.print(f"{change.kind}: generated/{change.path}", style="red", markup=False)
    if not changes:
        console.print(f"all {len(built.files)} files under generated/ are what the specs and templates give")
    return not changes


def show_resources(roots: tree.Roots, model: str) -> bool:
    """Compiles the checked-in kernels and prints what they take."""
    return run_compile(roots, [model], ARCHS) == 0


def show_draw(roots: tree.Roots, model: str) -> bool:
    """Draws one block of draft tokens a row with the generated sampler on the CPU, beside the reference's."""
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: its kernels run in the interpreter
    sys.path[:0] = [str(roots.out), str(roots.specs.parent)]
    launch = importlib.import_module(f"dspark_kernels.{model}.launch")
    harness = importlib.import_module("tests.harness.oracle")
    cases = importlib.import_module("tests.harness.cases")
    config = launch.config
    # Weights whose dot products are exact in fp32, so that the cache must be equal to the bit whatever the order of sums.
    case = cases.exact_case(
        config.VOCAB_SIZE,
        config.RANK_DIM,
        config.NUM_STEPS,
        len(TEMPERATURES),
        seed=SEED,
        max_reqs=len(TEMPERATURES),
        temperatures=TEMPERATURES,
    )
    sampler = launch.DraftSampler(
        case.embed_weight, case.head_weight, max_reqs=case.max_reqs, cache_dtype=case.logits_cache.dtype
    )
    path, reason = sampler.path(case.rows)
    console.print(
        f"{case.vocab_size} tokens, {case.rows} rows of {case.num_steps} drafts; kernel: {path} ({reason})",
        soft_wrap=True,
    )
    start = time.perf_counter()
    sampler.sample(*case.call_arguments, query_per_row=case.query_per_row)
    drawn = time.perf_counter()
    expected, _ = harness.oracle(case)
    console.print(
        f"sampler {drawn - start:.1f} s in Triton's interpreter, reference {time.perf_counter() - drawn:.1f} s"
    )
    table = Table(box=SIMPLE_HEAD)
    for heading in ("row", "temperature", "anchor", "drafts of the sampler", "drafts of the reference"):
        table.add_column(heading, no_wrap=True)
    for row in range(case.rows):
        heat = case.temperature[case.idx_mapping[row * case.num_steps]].item()
        anchor = case.input_ids[row * case.query_per_row].item()
        tokens = [" ".join(f"{token:6d}" for token in drafts[row].tolist()) for drafts in (case.draft_tokens, expected)]
        table.add_row(str(row), f"{heat:.1f}", str(anchor), *tokens)
    console.print(table)
    difference = harness.why_unequal_on_cpu(case, case.draft_tokens, case.logits_cache)
    console.print(difference or "same tokens, and a logits cache equal to the bit", style="red" if difference else None)
    return difference is None


STEPS: tuple[tuple[str, Callable[[tree.Roots, str], bool]], ...] = (
    ("The spec", show_spec),
    (f"The plan for one GPU ({DEVICE})", show_plan),
    ("Rendered, and compared with the checked-in tree", show_tree),
    (f"Compiled for {' and '.join(ARCHS)}, without a GPU", show_resources),
    ("Draft tokens on the CPU path, beside the reference", show_draw),
)


def main() -> int:
    """Runs every step; 0 when all answers are yes."""
    model = sys.argv[1] if len(sys.argv) > 1 else MODEL
    roots = tree.find_roots(Path(__file__).parents[2])
    begin = time.perf_counter()
    failed = []
    for number, (title, step) in enumerate(STEPS, 1):
        console.rule(f"{number}. {title}", align="left")
        if not step(roots, model):
            failed.append(title)
    console.rule(align="left")
    done = "The tree matches, the kernels compile without spills, and the drafts agree with the reference"
    outcome = f"Not as expected: {', '.join(failed)}" if failed else done
    console.print(f"{outcome} ({time.perf_counter() - begin:.0f} s).", style="red" if failed else None)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
