"""compile.py's choices, cache and verdicts, and the figures that cubin.py reads. The kernels' own figures: test_compile_kernels.py."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dsparkgen import compile as compiling
from dsparkgen import cubin, resources
from dsparkgen.locate import InvalidFile

LISTING = {
    "plans": [
        [device, tp, rows] for device in ("h100", "h200", "b200") for tp in (1, 2, 4, 8) for rows in (1, 2, 4, 8)
    ],
    "devices": {"h100": [9, 0], "h200": [9, 0], "b200": [10, 0]},
    "base_dtypes": ["bf16", "fp32"],
    "cache_dtypes": ["bf16", "fp32"],
    "draft_vocab_size": 129280,
}
FIGURES = {
    "registers": 80,
    "spill_bytes": 0,
    "local_bytes": 0,
    "shared_bytes": 0,
    "spill_source": "nvdisasm",
    "seconds": 1.0,
}


def build(**changes: object) -> resources.Build:
    return resources.Build(
        **{"model": "m", "kernel": "chain", "arch": "sm_90a", "inputs": "0" * 12, "device": "h200", "row_slots": 1}
        | changes
    )


@pytest.mark.parametrize(("turn", "corners"), [(0, {(1, 1), (8, 8)}), (3, {(1, 1), (8, 8)}), (4, {(1, 8), (8, 1)})])
def test_default_set_takes_two_corners_of_the_devices_plan(turn: int, corners: set[tuple[int, int]]) -> None:
    """Which two changes with the round of turns, so that the models together cover all four."""
    chosen = compiling.select_chain(LISTING, "sm_90a", turn, all_=False)
    assert {line["device"] for line in chosen} == {"h200"}
    assert {(line["tp"], line["row_slots"]) for line in chosen} == corners


@pytest.mark.parametrize(
    ("vocab", "sizes", "more"),
    [
        (163840, (1, 2, 4, 8, 12, 16), {(12, 8)}),  # 12 shards of 13654 are 8 rows more than there are
        (163840, (1, 2, 4, 8, 16), set()),
        (163840, (1, 2, 3, 6, 12, 16), {(12, 8)}),
        (163841, (1, 2, 4, 8, 12, 16), set()),  # those of 16 have pad rows
    ],
)
def test_default_set_takes_a_size_that_leaves_pad_rows(vocab: int, sizes: tuple[int, ...], more: set) -> None:
    plans = [["h200", tp, rows] for tp in sizes for rows in (1, 2, 4, 8)]
    listing = LISTING | {"plans": plans, "draft_vocab_size": vocab}
    chosen = compiling.select_chain(listing, "sm_90a", 0, all_=False)
    assert {(line["tp"], line["row_slots"]) for line in chosen} == {(1, 1), (16, 8)} | more


def test_turns_cover_every_dtype_pair() -> None:
    pairs = set()
    for turn in range(4):
        chosen = compiling.select_chain(LISTING, "sm_100a", turn, all_=False)
        assert len({(line["base_dtype"], line["cache_dtype"]) for line in chosen}) == 1
        pairs |= {(line["base_dtype"], line["cache_dtype"]) for line in chosen}
    assert pairs == {("bf16", "bf16"), ("bf16", "fp32"), ("fp32", "bf16"), ("fp32", "fp32")}


def test_all_takes_every_line_of_every_device_of_the_arch() -> None:
    chosen = compiling.select_chain(LISTING, "sm_90a", turn=0, all_=True)
    assert len(chosen) == 2 * 4 * 4 * 4
    assert {line["device"] for line in chosen} == {"h100", "h200"}


def test_an_arch_without_a_described_device_is_an_error() -> None:
    with pytest.raises(
        InvalidFile, match="expected the description of a device with arch sm_120a, got h100, h200, b200"
    ):
        compiling.select_chain(LISTING, "sm_120a", turn=0, all_=False)


@pytest.mark.parametrize("jobs", [1, 2, 3, 64])
def test_groups_hold_every_build_once_and_one_compiler_and_arch_each(jobs: int) -> None:
    builds = [build(arch=arch, row_slots=rows) for arch in ("sm_90a", "sm_100a") for rows in range(5)]
    builds += [build(kernel="fused", arch="sm_90a", variant="bf16/bf16")]
    groups = compiling.group_builds(list(enumerate(builds)), jobs)
    assert sorted(index for group in groups for index, _ in group) == list(range(len(builds)))
    assert all(len({(compiling.COMPILERS[member.kernel], member.arch) for _, member in group}) == 1 for group in groups)
    assert len(groups) >= min(jobs, len(builds))


@pytest.mark.parametrize(
    "changes",
    [{"arch": "sm_100a"}, {"inputs": "1" * 12}, {"tp": 2}, {"row_slots": 8}, {"base_dtype": "fp32"}, {"model": "n"}],
)
def test_what_a_cubin_depends_on_is_in_the_cache_key(changes: dict[str, object]) -> None:
    assert compiling.cache_path(build(), "compiler 1") != compiling.cache_path(build(**changes), "compiler 1")
    assert compiling.cache_path(build(), "compiler 1") != compiling.cache_path(build(), "compiler 2")
    assert compiling.cache_path(build(), "compiler 1") == compiling.cache_path(build(), "compiler 1")


def test_cache_survives_writers_at_the_same_time_and_a_broken_file(tmp_path: Path) -> None:
    path = tmp_path / "kept" / "x.json"
    assert compiling.read_cache(path) is None
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: compiling.write_cache(path, FIGURES | {"registers": number}), range(64)))
    kept = compiling.read_cache(path)
    assert kept is not None and kept["registers"] in range(64)
    assert list(path.parent.iterdir()) == [path]  # no temporary file is left
    path.write_text('{"registers": ')
    assert compiling.read_cache(path) is None


def test_kept_figures_are_not_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked = []

    def ask_worker(verb: str, request: dict, arch: str):
        asked.append([entry["row_slots"] for entry in request["builds"]])
        yield from ({"id": entry["id"], **FIGURES} for entry in request["builds"])

    monkeypatch.setattr(compiling, "ask_worker", ask_worker)
    compiling.run_builds(tmp_path, [build(row_slots=1)], jobs=1, sources={})
    records = compiling.run_builds(tmp_path, [build(row_slots=1), build(row_slots=8)], jobs=1, sources={})
    assert asked == [[1], [8]]
    assert [record.get("cached", False) for record in records] == [True, False]


def test_figures_of_code_that_changed_meanwhile_are_neither_shown_nor_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    kernel = tmp_path / "dspark_kernels" / "m" / "chain.py"
    kernel.parent.mkdir(parents=True)
    kernel.write_text("STEPS = 5\n")
    sources = compiling.read_sources(tmp_path)
    assert sources == {"dspark_kernels/m/chain.py": "STEPS = 5\n"}

    def ask_worker(verb: str, request: dict, arch: str):
        for entry in request["builds"]:
            yield {"id": entry["id"], **FIGURES}
            kernel.write_text("STEPS = 6\n")

    monkeypatch.setattr(compiling, "ask_worker", ask_worker)
    builds = [build(row_slots=1), build(row_slots=8)]
    records = compiling.run_builds(tmp_path, builds, jobs=1, sources=sources)
    assert ["error" in record for record in records] == [False, True]
    assert "changed while it was compiled" in records[1]["error"]
    assert len(list((tmp_path / "cache").rglob("*.json"))) == 1


def test_a_process_that_dies_fails_its_current_build_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def ask_worker(verb: str, request: dict, arch: str):
        for entry in request["builds"]:
            if entry["row_slots"] == 2:
                raise compiling.WorkerError("ended with code -11")
            yield {"id": entry["id"], **FIGURES}

    monkeypatch.setattr(compiling, "ask_worker", ask_worker)
    builds = [build(row_slots=rows) for rows in (1, 2, 4)]
    records = compiling.run_builds(tmp_path, builds, jobs=1, sources={})
    assert ["error" in record for record in records] == [False, True, False]
    assert resources.find_faults(builds, records) == [f"{builds[1].title}: ended with code -11"]
    assert (
        "error" in compiling.run_builds(tmp_path, [build(row_slots=2)], jobs=1, sources={})[0]
    )  # failures are not kept


def test_a_worker_that_cannot_import_the_model_says_why(tmp_path: Path) -> None:
    request = {"out": str(tmp_path), "models": {"absent_model": ["chain"]}}
    with pytest.raises(compiling.WorkerError, match=r"(?s)code 1: .*dspark_kernels"):
        list(compiling.ask_worker("list", request, "sm_90a"))


@pytest.mark.parametrize("key", ["spill_bytes", "local_bytes"])
def test_spills_and_local_memory_are_faults(key: str) -> None:
    assert resources.find_faults([build()], [FIGURES]) == []
    (fault,) = resources.find_faults([build()], [FIGURES | {key: 24}])
    assert "expected no spills and no local memory" in fault and "24 bytes" in fault


def test_json_keeps_failures_apart() -> None:
    written = resources.to_json([build(), build(tp=2)], [FIGURES, {"error": "no"}], ["compiler 1"])
    (kernel,) = written["kernels"]
    stable = {
        "model",
        "kernel",
        "arch",
        "tp",
        "registers",
        "spill_bytes",
        "local_bytes",
        "shared_bytes",
        "seconds",
        "inputs",
    }
    assert stable <= kernel.keys()
    assert [entry["tp"] for entry in written["errors"]] == [2]
    json.dumps(written)


def test_page_shows_the_most_over_dtypes_by_row_slots() -> None:
    builds = [build(row_slots=rows, cache_dtype=cache) for rows in (8, 1) for cache in ("bf16", "fp32")]
    records = [FIGURES | {"registers": number, "shared_bytes": 1025} for number in (90, 91, 70, 69)]
    page = resources.to_markdown(builds, records, ["compiler 1"])
    assert "| chain | sm_90a | h200 | 1 | 70, 91 | 2, 2 | 0 | 0 |" in page
    assert "row slots 1, 8 in that\norder" in page and "compiler 1" in page and f"chain `{'0' * 12}`" in page


def test_what_a_page_does_not_show_of_today_is_named(tmp_path: Path) -> None:
    builds = [build(), build(model="n"), build(model="n", kernel="noise", variant="any")]
    page_of = "docs/resources.md"
    assert compiling.page_remarks(tmp_path, builds, "mn") == [f"{page_of} does not show m, n yet"]
    page = tmp_path / compiling.RESOURCES
    page.parent.mkdir()
    page.write_text(resources.to_markdown(builds, [FIGURES] * 3, ["compiler 1"]))
    assert compiling.page_remarks(tmp_path, builds, "mn") == []
    later = [build(), build(model="n", inputs="1" * 12), build(model="o")]
    assert compiling.page_remarks(tmp_path, later, "no") == [
        f"{page_of} does not show o yet",
        f"{page_of} is of earlier code of n/chain",
        f"{page_of} still shows m, which no spec describes",
    ]


def test_usage_is_the_maximum_over_functions() -> None:
    text = """
 Function a:
  REG:156 STACK:0 SHARED:1024 LOCAL:0 CONSTANT[0]:548 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function b:
  REG:40 STACK:16 SHARED:0 LOCAL:8 CONSTANT[0]:548 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
    assert cubin.parse_usage(text)[:4] == (156, 24, 0, 1024)
    with pytest.raises(ValueError, match="expected at least one 'Function' line"):
        cubin.parse_usage("no kernels here")


def test_spills_are_counted_by_width() -> None:
    text = """
        /*0000*/  STL [R1], R2 ;
        /*0010*/  STL.64 [R1+0x8], R4 ;
        /*0020*/  @P0 LDL.LU.128 R4, [R1] ;
        /*0030*/  LDL.U8 R4, [R1] ;
        /*0040*/  LDS.128 R4, [R1] ;
        /*0050*/  STG.E.64 [R2.64], R4 ;
"""
    assert cubin.count_spills(text) == 4 + 8 + 16 + 1


FORCED_SPILLS = """
import sys
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def copy(source, target, SIZE: tl.constexpr):
    offsets = tl.arange(0, SIZE)
    tl.store(target + offsets, tl.cumsum(tl.load(source + offsets), 0))


for registers in (None, 32):
    for capability in (90, 103):
        kernel = triton.compile(
            ASTSource(copy, {"source": "*fp32", "target": "*fp32", "SIZE": "constexpr"}, {"SIZE": 16384}),
            target=GPUTarget("cuda", capability, 32),
            options={"num_warps": 4, "maxnreg": registers},
        )
        with open(f"{sys.argv[1]}/{registers}_{capability}.cubin", "wb") as file:
            file.write(kernel.asm["cubin"])
"""


@pytest.mark.skipif(cubin.find_tool("nvdisasm") is None, reason="needs Triton")
def test_a_kernel_forced_to_spill_is_found_out(tmp_path: Path) -> None:
    script = (
        tmp_path / "spill.py"
    )  # a file, because Triton reads a kernel's source; a process, because tests may interpret
    script.write_text(FORCED_SPILLS)
    subprocess.run([sys.executable, str(script), str(tmp_path)], check=True, env=compiling.worker_environment("sm_90a"))
    for arch, source in ((90, "nvdisasm"), (103, "frame")):
        free = cubin.read_resources((tmp_path / f"None_{arch}.cubin").read_bytes())
        tight = cubin.read_resources((tmp_path / f"32_{arch}.cubin").read_bytes())
        assert (free.spill_bytes, free.local_bytes, free.spill_source) == (0, 0, source)
        assert tight.registers <= 32 < free.registers
        assert tight.spill_bytes > 0 and tight.local_bytes > 0
