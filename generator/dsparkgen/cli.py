"""Verbs and exit codes.

Data goes to stdout, progress to stderr. Exit codes: 0 fine; 1 the answer is no; 2 bad input or usage; 3 this machine
cannot tell.
"""

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, NoReturn, get_args

import typer
from rich.console import Console

from dsparkgen import evidence, report, schema, tree
from dsparkgen.locate import InvalidFile, show_path
from dsparkgen.render import TemplateError
from dsparkgen.spec import Arch
from dsparkgen.workers import SECONDS

NO, BAD_INPUT, CANNOT_TELL = 1, 2, 3

app = typer.Typer(
    help="Generates GPU kernels that sample draft tokens, specialised for each model spec.",
    epilog="Exit codes: 0 fine; 1 the answer is no; 2 bad input or usage; 3 this machine cannot tell.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Models = Annotated[list[str] | None, typer.Argument(metavar="MODEL", help="Models; default: all.")]
Model = Annotated[str, typer.Argument(metavar="MODEL", help="A model.")]
Root = Annotated[Path | None, typer.Option(help="Folder with specs/ and templates/; default: the nearest parent.")]
Specs = Annotated[Path | None, typer.Option(help="Folder of private specs, instead of specs/; needs --out.")]
SpecsAlone = Annotated[Path | None, typer.Option("--specs", help="Folder of private specs, instead of specs/.")]
Out = Annotated[Path | None, typer.Option(help="Source root of the generated code, instead of generated/.")]
TensorParallel = Annotated[
    int | None,
    typer.Option("--tp", min=2, metavar="N", help="Instead: the chain over N ranks, each a GPU of this machine."),
]
Emulated = Annotated[
    str | None, typer.Option(metavar="LIST", help="Instead: the chain over so many ranks, all on one GPU, such as 4,8.")
]
Seconds = Annotated[
    float,
    typer.Option(
        min=1, help="Time limit of each process, not how long it measures; what it has not done by then has failed."
    ),
]
DTYPE_PAIR = re.compile(r"(bf16|fp32)/(bf16|fp32|none)")
Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write JSON here; - is stdout.")]


def main() -> None:
    """Entry point of the `dsparkgen` script."""
    app(prog_name="dsparkgen")


def _guarded(verb: Callable[..., None]) -> Callable[..., None]:
    """Bad input, and a file that cannot be read or written, end a verb with exit code 2, a missing library with 3: a message, no traceback."""

    @wraps(verb)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            verb(*args, **kwargs)
        except InvalidFile as error:
            report.problems(error.problems, kwargs.get("style", "text"))
            if _of_others(error, kwargs):
                print("(every verb reads all specs; move an unfinished one out of specs/)", file=sys.stderr)
            raise typer.Exit(BAD_INPUT) from None
        except (TemplateError, tree.FormatterError, tree.UsageError, evidence.EvidenceError) as error:
            _fail(str(error), BAD_INPUT)
        except OSError as error:
            if not isinstance(error.filename, str):
                raise
            _fail(f"{show_path(Path(error.filename))}: cannot be read or written: {error.strerror}", BAD_INPUT)
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] not in ("torch", "triton", "cutlass", "cuda", "numpy"):
                raise
            _fail(f"{error.name} is not installed here; run: pip install 'dsparkgen[cuda]'", CANNOT_TELL)

    return run


def _of_others(error: InvalidFile, arguments: Mapping[str, Any]) -> bool:
    """Whether a spec is at fault that the verb was not asked for by name."""
    asked = {*(arguments.get("models") or ()), *map(arguments.get, ("model", "against", "like"))}
    files = {Path(problem.file) for problem in error.problems}
    specs = {file.stem for file in files if file.suffix == ".toml" and file.parent.name != "devices"}
    return bool(specs - asked)


def _fail(message: str, code: int) -> NoReturn:
    print(f"dsparkgen: {message}", file=sys.stderr)
    raise typer.Exit(code)


def _working(what: str) -> Any:
    return Console(stderr=True).status(what)


@app.command()
@_guarded
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the new model.")],
    from_config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="config.json of the draft: vLLM's own or speculators format.")
    ] = None,
    like: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Take what the config does not state from this model's spec.")
    ] = None,
    root: Root = None,
    specs: SpecsAlone = None,
) -> None:
    """Write a commented spec for a new model. An existing one is left as it is."""
    from dsparkgen import hf

    roots = tree.find_roots(root, specs, reads_only=True)
    hf.check_name(name)
    related = hf.read_like(like, roots) if like is not None else None
    config = hf.read_config(from_config) if from_config is not None else None
    path = hf.write_new(name, hf.spec_text(name, config, related), roots)
    report.new_spec(path)


@app.command()
@_guarded
def generate(models: Models = None, root: Root = None, specs: Specs = None, out: Out = None) -> None:
    """Render the kernels and write what changed. Files that no spec asks for are deleted."""
    roots = tree.find_roots(root, specs, out)
    with _working("rendering"):
        built = tree.build_tree(roots, only=models or ())
        done = tree.write(built, roots)
    report.written(done, built, roots)


@app.command()
@_guarded
def check(
    models: Models = None,
    root: Root = None,
    specs: Specs = None,
    out: Out = None,
    json_path: Json = None,
    device: Annotated[
        str | None, typer.Option("--evidence", metavar="GPU", help="Also demand a recorded run on this GPU's arch.")
    ] = None,
    style: Annotated[report.Style, typer.Option("--format", help="github: annotations for a workflow.")] = "text",
) -> None:
    """Compare the generated tree, or that of some models, with specs and templates. Also shows which kernels recorded runs cover."""
    roots = tree.find_roots(root, specs, out)
    with _working("rendering"):
        built = tree.build_tree(roots)
        changes = tree.compare(built, roots)
    faults, table = _evidence(built, roots)
    if models:
        for name in models:
            tree.require_spec(name, built.specs, roots)
        built, changes = tree.narrow(built, changes, models)
        faults = [fault for fault in faults if any(f"/{name}.json:" in fault for name in models)]
        table = [line for line in table if line.model in models]
    if device is not None and not faults:
        faults += _unverified(table, device, roots)
    ok = not changes and not faults
    if json_path is not None:
        report.write_json(report.check_json(changes, faults, table, built, ok), json_path)
    if str(json_path) != "-":
        report.checked(changes, faults, table, built, roots, style)
    raise typer.Exit(0 if ok else NO)


@app.command()
@_guarded
def diff(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="A model; default: the whole tree.")] = None,
    against: Annotated[
        str | None,
        typer.Option(metavar="OTHER", help="Compare with this model instead, a private one or one of specs/."),
    ] = None,
    root: Root = None,
    specs: Specs = None,
    out: Out = None,
) -> None:
    """Print what regenerating would change, or how two models differ. Ends with 1 where something differs."""
    if against is not None and model is None:
        raise tree.UsageError("--against needs a MODEL to compare")
    roots = tree.find_roots(root, specs, out, reads_only=against is not None)
    with _working("rendering"):
        if model is not None and against is not None:
            text = tree.diff_models(roots, model, against)
        else:
            built = tree.build_tree(roots)
            if model is not None:
                tree.require_spec(model, built.specs, roots)
            text = tree.diff(built, roots, only=(model,) if model else ())
    sys.stdout.write(text)
    raise typer.Exit(NO if text else 0)


@app.command()
@_guarded
def plan(
    model: Model,
    device: Annotated[str, typer.Option(metavar="GPU", help="A file of specs/devices.")] = "h200",
    tp: Annotated[
        str | None, typer.Option(metavar="LIST", help="TP sizes, such as 1,2,4; default: the spec's.")
    ] = None,
    rows: Annotated[
        str | None, typer.Option(metavar="LIST", help="Request rows, such as 1,8; default: all slots.")
    ] = None,
    json_path: Json = None,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the residency picture here.")] = None,
    root: Root = None,
    specs: SpecsAlone = None,
) -> None:
    """Show the plan: residency, bytes a position, the floor."""
    from dsparkgen import plan as planner

    roots = tree.find_roots(root, specs, reads_only=True)
    all_specs, devices = tree.read_specs(roots.specs), tree.load_all_devices(roots)
    tree.require_spec(model, all_specs, roots)
    if device not in devices:
        raise tree.UsageError(f"--device: expected one of {', '.join(devices)} (got {device})")
    spec = all_specs[model]
    planned = planner.plan_model(spec, devices)
    slots = tuple(sorted({line.row_slots for line in planned.lines}))
    asked = (
        device,
        _known("--tp", tp, spec.parallel.tp),
        _known("--rows", rows, slots),
    )
    if json_path is not None:
        report.write_json(planner.to_json(planned, *asked), json_path)
    if svg is not None:
        svg.write_text(planner.to_svg(planned, *asked), encoding="utf-8")
    if str(json_path) != "-":
        print(planner.render_text(planned, *asked))


@app.command("compile")
@_guarded
def compile_(
    models: Models = None,
    arch: Annotated[
        str | None, typer.Option(metavar="LIST", help="Such as sm_90a,sm_100a; default: the spec's.")
    ] = None,
    all_: Annotated[
        bool, typer.Option("--all", help="Every plan line and dtype pair, not the default selection.")
    ] = False,
    page: Annotated[
        bool, typer.Option("--page", help="Write the figures into docs/resources.md; takes no MODEL.")
    ] = False,
    json_path: Json = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes; default: one a core.")] = None,
    root: Root = None,
    specs: Specs = None,
    out: Out = None,
) -> None:
    """Compile the kernels, without a GPU. Shows registers, spills, local and shared memory; a spill is a fault."""
    from dsparkgen.compile import run_compile

    roots = tree.find_roots(root, specs, out)
    _selected(models, roots)
    archs = _archs(arch) if arch else None
    raise typer.Exit(run_compile(roots, tuple(models or ()), archs, all_, json_path, jobs, page))


@app.command()
@_guarded
def build(
    arch: Annotated[str, typer.Option(metavar="LIST", help="Such as sm_90a,sm_100a.")],
    to: Annotated[Path, typer.Option("--out", metavar="DIR", help="The folder that the wheel is written to.")],
    models: Models = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Files of specs/devices, such as h200; default: all of the archs."),
    ] = None,
    tp: Annotated[
        str | None, typer.Option(metavar="LIST", help="TP sizes, such as 1,2; default: each model's.")
    ] = None,
    pdl: Annotated[
        bool, typer.Option("--pdl", help="Also the chain for programmatic dependent launches on one GPU.")
    ] = False,
    name: Annotated[str, typer.Option(help="Name of the wheel's package.")] = "dspark_kernels_pack",
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes; default: one a core.")] = None,
    root: Root = None,
    specs: Specs = None,
    generated: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Source root of the generated code, instead of generated/.")
    ] = None,
) -> None:
    """Compile the kernels that need CuTe DSL into a wheel, without a GPU. Machines that install it need no compiler."""
    from dsparkgen.pack import run_build

    roots = tree.find_roots(root, specs, generated)
    names = _selected(models, roots)
    archs = _archs(arch)
    devices = tree.load_all_devices(roots)
    unknown = set(device.split(",") if device else ()) - set(devices)
    if unknown:
        raise tree.UsageError(f"--device: expected a list out of {','.join(devices)} (got {device})")
    chosen = {key: spec for key, spec in devices.items() if device is None or key in device.split(",")}
    sizes = None if tp is None else _positive("--tp", tp)
    jobs = jobs or os.cpu_count() or 1
    raise typer.Exit(run_build(roots.out, names, archs, chosen, to, tp=sizes, pdl=pdl, name=name, jobs=jobs))


@app.command()
@_guarded
def verify(
    models: Models = None,
    batches: Annotated[int, typer.Option(min=1, help="Random batches of each kernel variant.")] = 200,
    replays: Annotated[int, typer.Option(min=1, help="Replays of a captured graph with changing inputs.")] = 1000,
    rows: Annotated[
        str | None, typer.Option(metavar="LIST", help="Request rows of the random batches; default: all.")
    ] = None,
    tp: TensorParallel = None,
    emulated: Emulated = None,
    dtypes: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Base logits/cache, such as bf16/bf16,fp32/bf16; default: all of a model."),
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes at a time; default: one a core.")] = None,
    seconds: Seconds = SECONDS,
    record: Annotated[bool, typer.Option("--record", help="Write the evidence below benchmarks/results.")] = False,
    json_path: Json = None,
    root: Root = None,
    specs: Specs = None,
    out: Out = None,
) -> None:
    """Run the kernels on this machine's GPU against the reference; with --tp or --emulated the chain over ranks."""
    roots = tree.find_roots(root, specs, out)
    names = _selected(models, roots)
    counts = None if rows is None else _positive("--rows", rows)
    worlds = () if emulated is None else _worlds("--emulated", emulated)
    pairs = [] if dtypes is None else dtypes.split(",")
    for pair in pairs:
        if not DTYPE_PAIR.fullmatch(pair):
            raise tree.UsageError(f"--dtypes: expected a list such as bf16/bf16,fp32/bf16 (got {dtypes})")
    _current(names, roots, record=record)
    from dsparkgen.verify import run_verify

    raise typer.Exit(
        run_verify(
            roots.templates.parent,
            names,
            out=roots.out,
            results=roots.results,
            batches=batches,
            replays=replays,
            rows=counts,
            tp=tp,
            emulated=worlds,
            dtypes=pairs,
            seconds=seconds,
            jobs=jobs,
            record=record,
            json_path=json_path,
        )
    )


@app.command()
@_guarded
def bench(
    models: Models = None,
    rows: Annotated[
        str | None,
        typer.Option(
            metavar="LIST", help="Request rows of a batch; default 1,4,8, with step kernels 16,64; with --pdl 1."
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(min=30, help="Rounds; medians are reported.")] = 35,
    shapes: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="More vocabularies x steps to measure, such as 151936x7,262144x7."),
    ] = None,
    shards: Annotated[bool, typer.Option("--shards", help="Also the vocabulary shards of the other TP sizes.")] = False,
    sweep: Annotated[bool, typer.Option("--sweep", help="Also a range of vocabularies, one row.")] = False,
    pdl: Annotated[
        bool,
        typer.Option("--pdl", help="Also the latency visible behind a kernel, by programmatic and by ordinary launch."),
    ] = False,
    tp: TensorParallel = None,
    emulated: Emulated = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes that prepare; default: one a core.")] = None,
    seconds: Seconds = SECONDS,
    record: Annotated[bool, typer.Option("--record", help="Write the timings below benchmarks/results.")] = False,
    json_path: Json = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Write an SVG plot here.")] = None,
    root: Root = None,
    specs: Specs = None,
    out: Out = None,
) -> None:
    """Time the kernels on this machine's GPU. The L2 cache is cold; the eager loop and the floor stand beside."""
    roots = tree.find_roots(root, specs, out)
    names = _selected(models, roots)
    numbers = None if rows is None else _positive("--rows", rows)
    worlds = () if emulated is None else _worlds("--emulated", emulated)
    pairs = [_positive("--shapes", shape, separator="x", count=2) for shape in shapes.split(",")] if shapes else []
    _current(names, roots, record=record)
    from dsparkgen.bench import run_bench

    raise typer.Exit(
        run_bench(
            roots.templates.parent,
            names,
            out=roots.out,
            specs=roots.specs,
            results=roots.results,
            rows=numbers,
            repeats=repeats,
            shapes=[(vocabulary, steps) for vocabulary, steps in pairs],
            shards=shards,
            sweep=sweep,
            pdl=pdl,
            tp=tp,
            emulated=worlds,
            jobs=jobs,
            seconds=seconds,
            record=record,
            json_path=json_path,
            plot_path=plot,
        )
    )


@app.command("list")
@_guarded
def list_(root: Root = None, specs: SpecsAlone = None, out: Out = None) -> None:
    """List the models with their kernels, archs and evidence."""
    roots = tree.find_roots(root, specs, out, reads_only=True)
    with _working("rendering"):
        built = tree.build_tree(roots)
    faults, table = _evidence(built, roots)
    for fault in faults:
        print(fault, file=sys.stderr)
    report.models(built.specs, table)


@app.command()
@_guarded
def vendor(
    model: Model,
    to: Annotated[
        Path, typer.Option(metavar="DIR", help="The folder that becomes the package; MODEL is a subpackage of it.")
    ],
    root: Root = None,
    specs: SpecsAlone = None,
) -> None:
    """Copy one model's kernels out. The package works without this tool and may have any name."""
    roots = tree.find_roots(root, specs, reads_only=True)
    with _working("rendering"):
        built = tree.build_tree(roots)
    tree.require_spec(model, built.specs, roots)
    for name in tree.vendor(built, model, roots.templates, to):
        print(show_path(to / name))


@app.command()
@_guarded
def take(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Results files, <gpu>/<model>.json.")],
    root: Root = None,
) -> None:
    """Merge results that verify and bench recorded on other machines into benchmarks/results."""
    roots = tree.find_roots(root)
    with _working("rendering"):
        built = tree.build_tree(roots)
    kernels = built.manifest["kernels"]
    for file in files:
        tree.require_spec(file.stem, built.specs, roots)
        print(show_path(evidence.take(roots.results, file, kernels)))


@app.command("schema")
@_guarded
def schema_(
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write it here instead of printing it.")] = None,
) -> None:
    """Print the JSON Schema of the spec format."""
    if out is None:
        sys.stdout.write(schema.schema_text())
    else:
        out.write_text(schema.schema_text(), encoding="utf-8")


@app.command()
@_guarded
def doctor(root: Root = None, specs: SpecsAlone = None, out: Out = None) -> None:
    """Report versions, folders and GPU of this machine."""
    roots = tree.find_roots(root, specs, out, reads_only=True)
    all_specs, devices = tree.read_specs(roots.specs), tree.load_all_devices(roots)
    if not report.environment(roots, len(all_specs), tuple(devices)):
        raise typer.Exit(BAD_INPUT)


def _selected(models: list[str] | None, roots: tree.Roots) -> list[str]:
    """The models asked for, or all; each with a spec."""
    specs = tree.read_specs(roots.specs)
    for name in models or ():
        tree.require_spec(name, specs, roots)
    return list(models or specs)


def _current(names: Sequence[str], roots: tree.Roots, *, record: bool) -> None:
    """What is recorded is of the code that specs and templates give: other code on disk ends the verb before it runs."""
    outdated = tree.stale(roots, names) if record else []
    if outdated:
        _fail("\n".join(["--record: not with this code", *outdated]), NO)


def _known(option: str, text: str | None, known: Sequence[int]) -> tuple[int, ...]:
    """`1,2,4` as numbers, each one that the plan has."""
    numbers = tuple(known) if text is None else _positive(option, text)
    if not set(numbers) <= set(known):
        raise tree.UsageError(f"{option}: expected numbers out of {','.join(map(str, known))} (got {text})")
    return numbers


def _archs(text: str) -> list[str]:
    """`sm_90a,sm_100a` as archs that kernels are compiled for."""
    archs = text.split(",")
    for name in archs:
        if name not in get_args(Arch):
            raise tree.UsageError(f"--arch: expected a list out of {','.join(get_args(Arch))} (got {text})")
    return archs


def _positive(option: str, text: str, *, separator: str = ",", count: int | None = None) -> tuple[int, ...]:
    """`1,2,4` as numbers above 0."""
    parts = text.split(separator)
    if not all(part.isdecimal() and len(part) < 10 and int(part) for part in parts) or len(parts) != (
        count or len(parts)
    ):
        raise tree.UsageError(
            f"{option}: expected positive numbers, such as {separator.join('12'[: count or 2])} (got {text})"
        )
    return tuple(map(int, parts))


def _worlds(option: str, text: str) -> tuple[int, ...]:
    """`4,8` as numbers of ranks, each at least 2."""
    numbers = _positive(option, text)
    if min(numbers) < 2:
        raise tree.UsageError(f"{option}: expected numbers of ranks from 2 on, such as 4,8 (got {text})")
    return numbers


def _evidence(built: tree.Tree, roots: tree.Roots) -> tuple[list[str], list[evidence.KernelState]]:
    """Faults of the recorded runs, and, where there are none, the state of every kernel on every arch."""
    kernels = built.manifest["kernels"]
    faults = evidence.problems(roots.results, kernels)
    archs = {name: spec.emit.archs for name, spec in built.specs.items()}
    return faults, [] if faults else evidence.states(roots.results, kernels, archs)


def _unverified(table: Sequence[evidence.KernelState], device: str, roots: tree.Roots) -> list[str]:
    devices = tree.load_all_devices(roots)
    if device not in devices:
        raise tree.UsageError(f"--evidence: expected one of {', '.join(devices)} (got {device})")
    return [
        f"{line.model}/{line.kernel}: expected a recorded run on {line.arch} with this code (got {line.state}); "
        f"run on a {device}: dsparkgen verify {line.model} --record"
        for line in evidence.missing(table, devices[device].arch)
    ]
