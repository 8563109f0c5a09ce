"""Packs: the kernels that need CuTe DSL, compiled ahead of time without a GPU, as a wheel that samplers find when it is installed."""

import base64
import hashlib
import json
import re
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from dsparkgen import __version__
from dsparkgen.compile import COMPILERS, WorkerError, arch_of, ask_process, compiler_version
from dsparkgen.device import DeviceSpec
from dsparkgen.device_code import load_device_code
from dsparkgen.tree import UsageError

toolkit = load_device_code("toolkit")

COMPILER = COMPILERS["chain"]
GROUP = "dspark_kernels.packs"  # entry points that samplers look for
FORMAT = 1  # of pack.json
EPOCH = (1980, 1, 1, 0, 0, 0)  # of every file in the wheel, so that equal kernels give equal wheels
_NAME = re.compile(r"[a-z][a-z0-9_]*")

Entry = dict[str, Any]


def run_build(
    source: Path,
    models: Sequence[str],
    archs: Sequence[str],
    devices: Mapping[str, DeviceSpec],
    out: Path,
    *,
    tp: Sequence[int] | None = None,
    pdl: bool = False,
    name: str = "dspark_kernels_pack",
    jobs: int = 1,
) -> int:
    """Compile the chain and step kernels of generated models and write them as a wheel.

    Args:
        source: The source root of the generated code, on which the kernels' digests depend.
        models: Generated models.
        archs: Such as "sm_90a".
        devices: GPU descriptions whose plans are built, by name.
        out: The folder that the wheel is written to; made if absent.
        tp: Tensor-parallel sizes; default: each model's.
        pdl: Also chain builds for programmatic dependent launches.
        name: Name of the wheel's package, so that several packs can be installed.
        jobs: Processes at a time.

    Returns:
        0 when the wheel was written, 1 when a kernel did not compile, 3 when the compiler is not installed.

    Raises:
        UsageError: No device of an arch is described, or the name is no Python package's.
    """
    progress = Console(stderr=True)
    if not _NAME.fullmatch(name):
        raise UsageError(f"--name: expected lower-case letters, digits and _ (got {name!r})")
    by_arch = {
        arch: [device for device, spec in devices.items() if arch_of(spec.compute_capability) == arch] for arch in archs
    }
    for arch, found in by_arch.items():
        if not found:
            raise UsageError(f"--arch: expected archs of the devices {', '.join(devices) or 'none'} (got {arch})")
    if compiler_version(COMPILER) is None:
        progress.print(f"{COMPILER} is not installed: pip install 'dsparkgen[cuda]'", highlight=False, markup=False)
        return 3
    if toolkit.toolkit() != toolkit.RECORDED:
        text = (
            f"{COMPILER}: expected the libraries for CUDA {toolkit.RECORDED}, with which all recorded runs were compiled, got CUDA {toolkit.toolkit()}: "
            f"pip install '{COMPILER}[cu{toolkit.RECORDED}]'"
        )
        progress.print(text, highlight=False, markup=False, soft_wrap=True)
        return 3
    with tempfile.TemporaryDirectory(prefix="dsparkgen-pack-") as work:
        base = {"source": str(source), "models": list(models), "tp": None if tp is None else list(tp), "pdl": pdl}
        requests = [
            {**base, "arch": arch, "devices": named, "folder": work, "part": [part, jobs]}
            for arch, named in by_arch.items()
            for part in range(jobs)
        ]
        with Progress(console=progress, transient=True) as bar, ThreadPoolExecutor(jobs) as pool:
            task = bar.add_task("compiling", total=None)

            def run(request: Mapping[str, Any]) -> list[Entry]:
                answers = []
                for answer in ask_worker(request):
                    answers.append(answer)
                    bar.advance(task)
                return answers

            answers = [answer for part in pool.map(run, requests) for answer in part]
        for answer in answers:
            if "error" in answer:
                text = f"{answer['build']}: {answer['error']}"
                progress.print(text, style="red", highlight=False, markup=False, soft_wrap=True)
        entries = [answer for answer in answers if "error" not in answer]
        if not answers:
            text = f"{', '.join(models)}: no chain and no step kernels for {', '.join(devices)}"
            progress.print(text, style="red", highlight=False, markup=False, soft_wrap=True)
        if not entries or len(entries) != len(answers):
            return 1
        wheel = write_wheel(entries, Path(work), out, name)
    size = wheel.stat().st_size / 2**20
    print(wheel)
    progress.print(
        f"{len(entries)} kernels of {', '.join(models)} for {', '.join(archs)}, {size:.1f} MiB", highlight=False
    )
    return 0


def ask_worker(request: Mapping[str, Any]) -> Iterator[Entry]:
    """Run pack_worker.py for one request and yield its answers as they come; a process that dies is an error among them."""
    try:
        yield from ask_process(("dsparkgen.pack_worker",), request, request["arch"])
    except WorkerError as error:
        yield {"error": str(error), "build": f"a kernel for {request['arch']}"}


def write_wheel(entries: Sequence[Entry], cubins: Path, out: Path, name: str) -> Path:
    """Write a wheel of compiled kernels.

    Args:
        entries: Of the index, as kernel_image.to_json makes them.
        cubins: The folder with the cubin files that they name.
        out: The folder to write to; made if absent.
        name: Of the package.

    Returns:
        The wheel's path.
    """
    info = f"{name}-{__version__}.dist-info"
    ordered = sorted(entries, key=lambda entry: json.dumps(entry, sort_keys=True))
    archs = ", ".join(sorted({entry["arch"] for entry in entries}))
    summary = f"Compiled kernels of dspark_kernels for {archs}"
    files = {
        f"{name}/__init__.py": f'"""{summary}; found by its entry point."""\n'.encode(),
        f"{name}/pack.json": (json.dumps({"format": FORMAT, "entries": ordered}, indent=1) + "\n").encode(),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {__version__}\nSummary: {summary}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: dsparkgen\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[{GROUP}]\n{name} = {name}\n".encode(),
    }
    for entry in ordered:
        file = entry["cubin"]["file"]
        files[f"{name}/cubins/{file}"] = (cubins / file).read_bytes()
    record = [f"{path},sha256={_digest(data)},{len(data)}" for path, data in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""]).encode()
    out.mkdir(parents=True, exist_ok=True)
    wheel = out / f"{name}-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in files.items():
            item = zipfile.ZipInfo(path, EPOCH)
            item.compress_type, item.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            archive.writestr(item, data)
    return wheel


def _digest(data: bytes) -> str:
    """SHA-256 as a wheel's RECORD has it."""
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
