"""Where compiled kernels come from: packs, the disk cache, the compiler; nothing here needs a GPU or CuTe DSL."""

from __future__ import annotations

import importlib
import json
import logging
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from dspark_kernels._device import cubin_pack, kernel_image, kernel_store  # noqa: E402
from dspark_kernels._device.kernel_image import Description, KernelImage, LaunchShape  # noqa: E402
from dspark_kernels._device.kernel_store import KernelCache, Recipe  # noqa: E402
from dsparkgen import pack  # noqa: E402

GENERATED = Path(__file__).parents[2] / "generated" / "dspark_kernels"
COMPILER = "nvidia-cutlass-dsl 4.8.1"
DESCRIBED = Description(
    kernel_image.parameters(("a", "rows"), ("rows",)),
    LaunchShape((("a", 16), "rows", 1), 128, 40, cooperative=False, pdl=True),
    {"words": 7},
)


class Toy:
    """A recipe whose compiler is a function; `compiled` counts."""

    def __init__(self, folder: Path, cubin: bytes = b"cubin", **arguments: Any) -> None:
        source = folder / "kernel.py"
        source.write_text("x = 1\n")
        self.cubin, self.compiled = cubin, 0
        self.recipe = Recipe("toy", source, {"line": (1, ("a", 2)), **arguments}, self.compile, lambda: DESCRIBED)

    def compile(self, arch: str, options: str) -> Any:
        self.compiled += 1
        assert options.startswith("--keep-cubin --dump-dir=")
        return SimpleNamespace(kernel_info={"entry_0": {}}, artifacts=SimpleNamespace(CUBIN=self.cubin))

    def image(self, arch: str = "sm_90a") -> KernelImage:
        return kernel_store.compile_image(self.recipe, arch)


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A compiler, an empty cache and no pack."""
    monkeypatch.setattr(kernel_store, "compiler_version", lambda: COMPILER)
    monkeypatch.setenv(kernel_store.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(cubin_pack, "installed_packs", lambda: ())
    kernel_image.source_digest.cache_clear()
    yield
    kernel_image.source_digest.cache_clear()


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    return Toy(tmp_path)


# Images


def test_an_image_survives_json(toy: Toy) -> None:
    made = toy.image()
    entry = json.loads(json.dumps(kernel_image.to_json(made)))
    assert kernel_image.from_json(entry, b"cubin") == made
    assert kernel_image.build_of(entry) == made.build == toy.recipe.build("sm_90a")


def test_another_cubin_is_refused(toy: Toy) -> None:
    entry = kernel_image.to_json(toy.image())
    with pytest.raises(ValueError, match="expected SHA-256 .*, got"):
        kernel_image.from_json(entry, b"other")


def test_a_cubin_holds_one_kernel(toy: Toy) -> None:
    two = SimpleNamespace(kernel_info={"a": {}, "b": {}}, artifacts=SimpleNamespace(CUBIN=b""))
    with pytest.raises(RuntimeError, match="expected one kernel in the cubin, got 2"):
        kernel_store.compile_image(toy.recipe._replace(compile=lambda *_: two), "sm_90a")


def test_a_build_is_told_by_arguments_arch_and_source(toy: Toy, tmp_path: Path) -> None:
    build = toy.recipe.build("sm_90a")
    assert toy.recipe.build("sm_100a") != build
    assert toy.recipe._replace(arguments={"line": (1, ("a", 3))}).build("sm_90a") != build
    assert toy.recipe._replace(kernel="other").build("sm_90a") != build
    toy.recipe.source.write_text("x = 2\n")
    kernel_image.source_digest.cache_clear()
    assert toy.recipe.build("sm_90a") != build


# The digest of sources


def digest(package: Path, module: str) -> str:
    kernel_image.source_digest.cache_clear()
    return kernel_image.source_digest(package / module)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the generated package under another name."""
    shutil.copytree(GENERATED, tmp_path / "copied", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "copied"


def test_a_copied_package_has_the_same_digest(package: Path) -> None:
    assert digest(package, "deepseek_v41/chain.py") == digest(GENERATED, "deepseek_v41/chain.py")


@pytest.mark.parametrize(
    "name", ["deepseek_v41/config.py", "_device/ptx.py", "_device/exchange.py", "_device/plan_line.py"]
)
def test_what_a_kernel_imports_is_in_its_digest(package: Path, name: str) -> None:
    before = digest(package, "deepseek_v41/chain.py")
    with (package / name).open("a") as file:
        file.write("# another\n")
    assert digest(package, "deepseek_v41/chain.py") != before


@pytest.mark.parametrize(
    "name", ["_device/host.py", "_device/draft_launcher.py", "deepseek_v41/launch.py", "engines/vllm.py"]
)
def test_host_code_is_not_in_a_kernels_digest(package: Path, name: str) -> None:
    before = digest(package, "deepseek_v41/chain.py")
    with (package / name).open("a") as file:
        file.write("# another\n")
    assert digest(package, "deepseek_v41/chain.py") == before


# The cache


def test_compiles_once(toy: Toy) -> None:
    first, again = (
        kernel_store.find_or_compile(toy.recipe, "sm_90a"),
        kernel_store.find_or_compile(toy.recipe, "sm_90a"),
    )
    assert (first[1], again[1]) == ("compiled", "cache") and toy.compiled == 1
    assert again[0] == first[0]
    assert kernel_store.find_or_compile(toy.recipe, "sm_100a")[1] == "compiled"


def test_another_compiler_compiles_anew(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_store.find_or_compile(toy.recipe, "sm_90a")
    monkeypatch.setattr(kernel_store, "compiler_version", lambda: "nvidia-cutlass-dsl 5.0.0")
    assert kernel_store.find_or_compile(toy.recipe, "sm_90a")[1] == "compiled"


@pytest.mark.parametrize("damage", ["cubin", "json", "half", "missing"])
def test_damaged_entries_are_compiled_anew(toy: Toy, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    kernel_store.find_or_compile(toy.recipe, "sm_90a")
    folder = kernel_store.cache_folder()
    (cubin,), (entry,) = folder.glob("*.cubin"), folder.glob("*.json")
    if damage == "cubin":
        cubin.write_bytes(b"other")
    elif damage == "json":
        entry.write_text("[]")
    elif damage == "half":
        entry.write_text(entry.read_text()[:40])
    else:
        cubin.unlink()
    assert kernel_store.find_or_compile(toy.recipe, "sm_90a")[1] == "compiled"
    assert ("is not used" in caplog.text) == (damage != "missing")
    assert kernel_store.find_or_compile(toy.recipe, "sm_90a")[1] == "cache"


def test_nothing_half_written_stays(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", fail)
    image, origin = kernel_store.find_or_compile(toy.recipe, "sm_90a")
    assert (image.cubin, origin) == (b"cubin", "compiled")
    assert "no space left" in caplog.text
    assert [path.suffix for path in kernel_store.cache_folder().iterdir()] == [".lock"]


def test_a_folder_that_cannot_be_made_is_named(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(kernel_store.CACHE_VARIABLE, str(tmp_path / "file"))
    assert kernel_store.find_or_compile(toy.recipe, "sm_90a")[1] == "compiled"
    assert str(tmp_path / "file") in caplog.text


def test_the_cache_is_below_the_users_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(kernel_store.CACHE_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kernel_store.cache_folder() == tmp_path / "dspark_kernels"


def compile_slowly(folder: Path, start: Any, found: Any) -> None:
    """One of several processes that want the same build at once."""
    toy = Toy(folder)
    made = toy.compile

    def slow(arch: str, options: str) -> Any:
        time.sleep(0.5)
        return made(arch, options)

    kernel_store.compiler_version = lambda: COMPILER
    cubin_pack.installed_packs = lambda: ()
    start.wait(60)
    image, origin = kernel_store.find_or_compile(toy.recipe._replace(compile=slow), "sm_90a")
    found.put((origin, image.cubin))


def test_one_of_several_processes_compiles(tmp_path: Path) -> None:
    count = 4
    context = multiprocessing.get_context("fork")
    start, found = context.Barrier(count), context.Queue()
    workers = [context.Process(target=compile_slowly, args=(tmp_path, start, found)) for _ in range(count)]
    for worker in workers:
        worker.start()
    answers = sorted(found.get(timeout=60) for _ in workers)
    for worker in workers:
        worker.join(60)
    assert answers == [("cache", b"cubin")] * (count - 1) + [("compiled", b"cubin")]


def test_a_lock_ends_with_its_process(toy: Toy) -> None:
    """A process that dies while it compiles keeps nobody waiting."""
    build = toy.recipe.build("sm_90a")
    cache = KernelCache(kernel_store.cache_folder())
    held = multiprocessing.get_context("fork").Event()

    def hold() -> None:
        with cache.lock(build, COMPILER):
            held.set()
            os._exit(1)

    worker = multiprocessing.get_context("fork").Process(target=hold)
    worker.start()
    assert held.wait(60)
    worker.join(60)
    assert kernel_store.find_or_compile(toy.recipe, "sm_90a")[1] == "compiled"


# Packs


@pytest.fixture
def wheel(toy: Toy, tmp_path: Path) -> Path:
    """A wheel with the toy's kernel for two archs."""
    entries = []
    for arch in ("sm_90a", "sm_100a"):
        made = toy.image(arch)
        entries.append(kernel_image.to_json(made))
        (tmp_path / entries[-1]["cubin"]["file"]).write_bytes(made.cubin)
    return pack.write_wheel(entries, tmp_path, tmp_path / "out", "toy_pack")


@pytest.fixture
def installed(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The wheel where Python finds it."""
    monkeypatch.undo()
    monkeypatch.setattr(kernel_store, "compiler_version", lambda: None)
    monkeypatch.syspath_prepend(wheel)
    cubin_pack.installed_packs.cache_clear()
    yield wheel
    cubin_pack.installed_packs.cache_clear()
    sys.modules.pop("toy_pack", None)


def test_an_installed_pack_serves_without_a_compiler(toy: Toy, installed: Path) -> None:
    compiled = toy.compiled
    assert kernel_store.why_missing(toy.recipe, "sm_90a") is None
    image, origin = kernel_store.find_or_compile(toy.recipe, "sm_90a")
    assert origin == "pack toy_pack" and toy.compiled == compiled
    assert image.cubin == b"cubin" and image.description == DESCRIBED


def test_a_pack_of_other_sources_does_not_serve(toy: Toy, installed: Path) -> None:
    toy.recipe.source.write_text("x = 3\n")
    kernel_image.source_digest.cache_clear()
    with pytest.raises(kernel_store.KernelMissingError) as error:
        kernel_store.find_or_compile(toy.recipe, "sm_90a")
    for words in (
        "toy", "for sm_90a", kernel_image.source_digest(toy.recipe.source), "installed: toy_pack", "CuTe DSL is missing",
        "install nvidia-cutlass-dsl", "dsparkgen build --arch sm_90a",
    ):  # fmt: skip
        assert words in str(error.value)


def test_a_pack_comes_before_cache_and_compiler(toy: Toy, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_store.find_or_compile(toy.recipe, "sm_90a")
    compiled = toy.compiled
    found = cubin_pack.read_pack("toy_pack", unpacked(wheel))
    monkeypatch.setattr(cubin_pack, "installed_packs", lambda: (found,))
    assert kernel_store.find_or_compile(toy.recipe, "sm_90a")[1] == "pack toy_pack"
    assert toy.compiled == compiled


def unpacked(wheel: Path) -> Path:
    shutil.unpack_archive(wheel, wheel.parent / "unpacked", "zip")
    return wheel.parent / "unpacked" / "toy_pack"


@pytest.mark.parametrize("damage", ["index", "format", "cubin"])
def test_a_damaged_pack_is_named_and_left_out(
    toy: Toy, wheel: Path, damage: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = unpacked(wheel)
    if damage == "index":
        (folder / "pack.json").write_text("{")
    elif damage == "format":
        (folder / "pack.json").write_text('{"format": 2, "entries": []}')
    else:
        for path in (folder / "cubins").iterdir():
            path.write_bytes(b"other")
    monkeypatch.undo()
    monkeypatch.syspath_prepend(folder.parent)
    monkeypatch.setattr(kernel_store, "compiler_version", lambda: None)
    cubin_pack.installed_packs.cache_clear()
    try:
        with caplog.at_level(logging.WARNING), pytest.raises(kernel_store.KernelMissingError):
            kernel_store.find_or_compile(toy.recipe, "sm_90a")
    finally:
        cubin_pack.installed_packs.cache_clear()
        sys.modules.pop("toy_pack", None)
    assert "toy_pack" in caplog.text and "is left out" in caplog.text


def test_a_wheel_is_the_same_whenever_it_is_written(toy: Toy, wheel: Path, tmp_path: Path) -> None:
    entries = list(reversed(json.loads((unpacked(wheel) / "pack.json").read_text())["entries"]))
    assert pack.write_wheel(entries, tmp_path, tmp_path / "again", "toy_pack").read_bytes() == wheel.read_bytes()


def test_a_wheels_record_lists_what_is_in_it(wheel: Path) -> None:
    import zipfile

    with zipfile.ZipFile(wheel) as archive:
        (record,) = [name for name in archive.namelist() if name.endswith("RECORD")]
        listed = dict(line.split(",", 1) for line in archive.read(record).decode().splitlines())
        assert set(listed) == set(archive.namelist())
        for name, rest in listed.items():
            assert name == record or rest == f"sha256={pack._digest(archive.read(name))},{len(archive.read(name))}"


# The builds of a model


def test_a_device_whose_line_is_the_same_shares_its_builds() -> None:
    recipes = importlib.import_module("dspark_kernels._device.kernel_recipes")
    config = importlib.import_module("dspark_kernels.deepseek_v41.config")
    lines = {device: config.PLANS[device, 1, 1]._replace(shared_bytes=0) for device in ("h100", "h200")}
    made = {
        device: recipes.chain_recipe(config, None, lines["h200"]._replace(device=device), "bf16", "bf16").build(
            "sm_90a"
        )
        for device in lines
    }
    assert made["h100"] == made["h200"]


def test_every_plan_line_is_in_a_pack() -> None:
    recipes = importlib.import_module("dspark_kernels._device.kernel_recipes")
    config = importlib.import_module("dspark_kernels.deepseek_v41.config")
    builds = [recipe.build("sm_90a") for recipe in recipes.chain_recipes(config, None, "h200", config.TP_SIZES, False)]
    lines = [line for line in config.PLANS.values() if line.device == "h200"]
    assert len(builds) == len(set(builds)) == len(lines) * len(config.BASE_DTYPES) * len(config.CACHE_DTYPES)


def test_why_none_asks_the_device_only_without_a_compiler(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    assert kernel_store.why_none([toy.recipe], torch.device("cuda", 0)) is None
    monkeypatch.setattr(kernel_store, "compiler_version", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 3))
    assert "for sm_103a" in (kernel_store.why_none([toy.recipe], torch.device("cuda", 0)) or "")
