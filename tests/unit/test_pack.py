"""`dsparkgen build`: a wheel of compiled kernels that the package it was built from finds."""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from typer.testing import CliRunner  # noqa: E402

from dsparkgen import cli, pack  # noqa: E402
from dsparkgen.device import load_devices  # noqa: E402

ROOT = Path(__file__).parents[2]
compiled = pytest.mark.skipif(find_spec("cutlass") is None, reason="needs CuTe DSL (the cuda extra)")


def small(sandbox: Any) -> None:
    """One chain build for each arch: one row slot, one dtype pair."""
    sandbox.edit(
        "specs/deepseek_v41.toml",
        ("max_rows = 8", "max_rows = 1"),
        ('base_dtypes = ["bf16", "fp32"]', 'base_dtypes = ["bf16"]'),
        ('cache_dtypes = ["bf16", "fp32"]', 'cache_dtypes = ["bf16"]'),
    )
    text = (sandbox.root / "specs" / "deepseek_v41.toml").read_text()
    lines = [
        'kernels = ["noise", "chain", "fused"]' if line.startswith("kernels = ") else line for line in text.split("\n")
    ]
    (sandbox.root / "specs" / "deepseek_v41.toml").write_text("\n".join(lines))
    sandbox.generate()


def run(sandbox: Any, *options: str) -> Any:
    return CliRunner().invoke(cli.app, ["build", "--root", str(sandbox.root), *options])


@compiled
def test_a_wheel_holds_what_its_package_asks_for(sandbox: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small(sandbox)
    out = tmp_path / "wheels"
    ran = run(
        sandbox,
        "--arch",
        "sm_90a,sm_100a",
        "--device",
        "h200,b200",
        "--tp",
        "1",
        "--out",
        str(out),
        "--name",
        "my_pack",
    )
    assert ran.exit_code == 0, ran.output
    (wheel,) = out.iterdir()
    assert str(wheel) in ran.output
    # Another place and name of the package: its digests are the same.
    (sandbox.root / "generated" / "dspark_kernels").rename(sandbox.root / "generated" / "packed_kernels")
    monkeypatch.syspath_prepend(sandbox.root / "generated")
    monkeypatch.syspath_prepend(wheel)
    try:
        device = {
            name: importlib.import_module(f"packed_kernels._device.{name}")
            for name in ("kernel_recipes", "kernel_store")
        }
        config = importlib.import_module("packed_kernels.deepseek_v41.config")
        monkeypatch.setattr(device["kernel_store"], "compiler_version", lambda: None)
        for name, arch in (("h200", "sm_90a"), ("b200", "sm_100a")):
            (recipe,) = device["kernel_recipes"].chain_recipes(config, None, name, (1,), False)
            image, origin = device["kernel_store"].find_or_compile(recipe, arch)
            assert origin == "pack my_pack"
            assert image.cubin[:4] == b"\x7fELF" and image.entry.encode() in image.cubin
            ctas = config.PLANS[name, 1, 1].ctas
            assert image.description.shape.grid == (ctas, 1, 1) and image.description.shape.cooperative
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] in ("packed_kernels", "my_pack")]:
            del sys.modules[name]


@compiled
def test_a_kernel_that_does_not_compile_leaves_no_wheel(sandbox: Any, tmp_path: Path) -> None:
    small(sandbox)
    path = sandbox.package / "deepseek_v41" / "chain.py"
    path.write_text(
        path.read_text().replace("class ChainKernel(", "raise RuntimeError('provoked')\nclass ChainKernel(")
    )
    ran = run(sandbox, "--arch", "sm_90a", "--device", "h200", "--tp", "1", "--out", str(tmp_path / "wheels"))
    assert ran.exit_code == 1
    assert "RuntimeError: provoked" in ran.output
    assert not (tmp_path / "wheels").exists()


@pytest.mark.parametrize(
    "options, words",
    [
        (("--arch", "sm_80"), "--arch: expected a list out of"),
        (("--arch", "sm_90a", "--device", "h300"), "--device: expected a list out of"),
        (("--arch", "sm_90a", "--device", "b200"), "--arch: expected archs of the devices b200 (got sm_90a)"),
        (("--arch", "sm_90a", "--name", "My-Pack"), "--name: expected lower-case letters"),
        (("--arch", "sm_90a", "no_model"), "no such spec"),
        (("--arch", "sm_90a", "--tp", "0"), "--tp: expected positive numbers"),
    ],
)
def test_bad_usage(generated: Any, tmp_path: Path, options: tuple[str, ...], words: str) -> None:
    ran = run(generated, *options, "--out", str(tmp_path / "wheels"))
    assert ran.exit_code == 2
    assert words in ran.output


def test_without_the_compiler(generated: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "compiler_version", lambda name: None)
    ran = run(generated, "--arch", "sm_90a", "--out", str(tmp_path / "wheels"))
    assert ran.exit_code == 3
    assert "nvidia-cutlass-dsl is not installed" in ran.output


def test_a_model_without_such_kernels_is_named(generated: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "compiler_version", lambda name: "nvidia-cutlass-dsl 4.8.1")
    monkeypatch.setattr(pack, "ask_worker", lambda request: iter(()))
    devices = {"h200": load_devices(ROOT)["h200"]}
    done = pack.run_build(generated.root / "generated", ["deepseek_v41"], ["sm_90a"], devices, tmp_path / "wheels")
    assert done == 1 and not (tmp_path / "wheels").exists()
