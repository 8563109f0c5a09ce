"""The pages point to files that exist; the README quotes today's plan, and timings only from runs of the checked-in kernels."""

import json
import re
from pathlib import Path

import pytest

from dsparkgen import evidence, pictures, readme
from dsparkgen.resources import page_sections
from dsparkgen.spec import read_specs

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ROW = {
    "kernel": "chain",
    "vocab_size": 1000,
    "num_steps": 5,
    "rank_dim": 64,
    "tp": 1,
    "rows": 8,
    "us": 20.0,
    "noise_us": 5.0,
    "call_us": 25.0,
    "eager_us": 100.0,
    "fused_us": 80.0,
    "floor_us": 10.0,
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\((?!https?://|#)([^)#]+)[^)]*\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_readme_shows_the_plan_and_the_recorded_runs_of_today() -> None:
    text = (ROOT / "README.md").read_text()
    assert text == readme.fill(text, ROOT), "run `make docs`"


def test_no_section_of_resources_is_of_a_model_that_is_gone() -> None:
    sections = page_sections((ROOT / "docs" / "resources.md").read_text())
    assert len(sections) >= 1
    assert set(sections) <= set(read_specs(ROOT / "specs")), "delete it, or run `dsparkgen compile --page`"


def recorded(root: Path, inputs: str) -> None:
    manifest = {"kernels": {f"{readme.MODEL}/chain": {"inputs": "a" * 12, "earlier": ["b" * 12]}}}
    rows = [ROW | {"inputs": inputs}, ROW | {"inputs": inputs, "tp": 2}]
    (root / "generated").mkdir()
    (root / "generated" / "MANIFEST.json").write_text(json.dumps(manifest))
    evidence.record(root / "benchmarks" / "results", "h200", readme.MODEL, "bench", rows=rows)


def test_a_current_run_is_quoted(tmp_path: Path) -> None:
    recorded(tmp_path, "a" * 12)
    text = readme.timings(tmp_path)
    assert f"{readme.MODEL} on h200" in text
    assert readme.ONLY_EARLIER_RUNS not in text
    assert text.count("| 1000 |") == 1
    header, rule = next(line for line in text.splitlines() if "engine / alone" in line), "|---" * 10 + "|"
    assert header.count("|") == rule.count("|") and rule in text
    assert "| 1000 | 5 | 8 | 100.0 | 80.0 | 20.0 | 50 % | 5.0 | 25.0 | 4.0 |" in text


def test_a_run_of_earlier_code_is_not_quoted(tmp_path: Path) -> None:
    assert readme.timings(tmp_path) == readme.NO_RUN
    recorded(tmp_path, "b" * 12)
    assert readme.timings(tmp_path) == readme.ONLY_EARLIER_RUNS


def test_an_edited_run_is_refused(tmp_path: Path) -> None:
    recorded(tmp_path, "a" * 12)
    path = tmp_path / "benchmarks" / "results" / "h200" / f"{readme.MODEL}.json"
    path.write_text(path.read_text().replace("25.0", "15.0"))
    with pytest.raises(evidence.EvidenceError, match="seal"):
        readme.timings(tmp_path)


def test_a_page_without_a_place_for_a_part_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="got a page without"):
        readme.fill("# no place\n", tmp_path)


def test_what_a_programmatic_launch_hides_is_quoted(tmp_path: Path) -> None:
    (tmp_path / "specs").symlink_to(ROOT / "specs")
    (tmp_path / "generated").mkdir()
    manifest = {"kernels": {f"{readme.MODEL}/chain": {"inputs": "a" * 12}}}
    (tmp_path / "generated" / "MANIFEST.json").write_text(json.dumps(manifest))
    assert readme.pdl(tmp_path) == readme.NO_RUN
    rows = [ROW | {"inputs": "a" * 12, "rows": 1, "pdl_us": 30.25, "pdl_off_us": 30.0}]
    rows += [ROW | {"inputs": "a" * 12, "pdl_us": 18.0, "pdl_off_us": 20.5}, ROW | {"inputs": "a" * 12, "rows": 4}]
    evidence.record(tmp_path / "benchmarks" / "results", "h200", readme.MODEL, "bench", rows=rows)
    text = readme.pdl(tmp_path)
    assert "| 1000 | 5 | 8 | 20.50 | 18.00 | 2.50 |\n" in text and text.count("| 1000 |") == 2
    assert text.endswith("Less than 0.5 us hidden: 1000 x 5 rows 1 (-0.25).\n")


def test_pictures_are_of_the_recorded_rows() -> None:
    """Each results file with rows of the chain has its picture, drawn from them; no other picture is there."""
    drawn = pictures.recorded(ROOT)
    folder = ROOT / "benchmarks" / "results"
    assert sorted(drawn) == sorted(folder.glob("*/*.svg")), "run `make docs`"
    for path, text in drawn.items():
        assert path.read_text() == text, f"{path.name}: run `make docs`"
    assert folder / "h200" / f"{readme.MODEL}.svg" in drawn and folder / "h200" / f"{readme.MODEL}-sweep.svg" in drawn


def test_a_picture_is_of_current_rows_or_says_that_it_is_not(tmp_path: Path) -> None:
    for name in ("specs", "benchmarks"):
        (tmp_path / name).mkdir()
    (tmp_path / "specs" / f"{readme.MODEL}.toml").symlink_to(ROOT / "specs" / f"{readme.MODEL}.toml")
    (tmp_path / "generated").mkdir()
    kernels = {f"{readme.MODEL}/chain": {"inputs": "a" * 12, "earlier": ["b" * 12]}}
    (tmp_path / "generated" / "MANIFEST.json").write_text(json.dumps({"kernels": kernels}))
    results = tmp_path / "benchmarks" / "results"
    own = ROW | {"vocab_size": 129280, "rows": 1, "us": 41.0}
    old = own | {"inputs": "b" * 12, "rows": 8, "us": 71.0}
    other = own | {"inputs": "b" * 12, "vocab_size": 64640, "us": 31.0}
    evidence.record(results, "h200", readme.MODEL, "bench", rows=[old, other])
    (results / "h200" / "gone.svg").write_text("<svg/>")
    pictures.write(tmp_path)
    (path,) = results.glob("*/*.svg")
    assert path.name == f"{readme.MODEL}.svg" and "earlier kernels" in path.read_text() and ">71<" in path.read_text()
    evidence.record(results, "h200", readme.MODEL, "bench", rows=[own | {"inputs": "a" * 12}])
    pictures.write(tmp_path)
    text = path.read_text()
    assert "earlier kernels" not in text and ">41<" in text and ">71<" not in text
    swept = own | {"inputs": "c" * 12, "parent": "a" * 12, "vocab_size": 64640}
    evidence.record(results, "h200", readme.MODEL, "bench", rows=[swept])
    assert set(pictures.recorded(tmp_path)) == {path, path.with_stem(f"{readme.MODEL}-sweep")}


def startup_run(root: Path, digest: str, passed: bool = True) -> None:
    """A recorded run from a pack, and a manifest with one chain kernel."""
    start = {
        "max_reqs": 64, "origins": {"pack some": 30}, "first_draw_s": 0.881, "warm_s": 1.066, "launch_us": 6.25,
        "calls": {"1": {"kernel": "chain", "us": 50.4}, "16": {"kernel": "step", "us": 130.0}},
    }  # fmt: skip
    cold = start | {"origins": {"compiled": 30}, "first_draw_s": 6.1, "warm_s": 30.2, "launch_us": None}
    run = {
        "model": "some", "date": "2026-11-30", "kernels": {"chain": digest}, "passed": passed,
        "versions": {"torch": "2.11", "triton": "3.6.0", "compiler": "dsl 4.8.1 cu13"},
        "tests": {"kernels": {"ran": 6}, "step kernels": {"ran": 31}}, "startup": {"pack": start, "compiler, cold": cold},
    }  # fmt: skip
    folder = root / "benchmarks" / "results" / "h200" / "startup"
    folder.mkdir(parents=True)
    (folder / "some.json").write_text(json.dumps(run))
    (root / "generated").mkdir()
    (root / "generated" / "MANIFEST.json").write_text(json.dumps({"kernels": {"some/chain": {"inputs": "a" * 12}}}))


def test_a_run_from_a_pack_is_quoted(tmp_path: Path) -> None:
    startup_run(tmp_path, "a" * 12)
    text = readme.startup(tmp_path)
    assert "some on h200, 2026-11-30, PyTorch 2.11, Triton 3.6.0, dsl 4.8.1 cu13: 37 tests and all checks" in text
    assert "| kernels from | first draw, s | all warm, s | launch, us | call of 1 row (chain), us |" in text
    assert "| pack | 0.88 | 1.07 | 6.2 | 50 | 130 |\n" in text
    assert "| compiler, cold | 6.10 | 30.20 |  | 50 | 130 |\n" in text


@pytest.mark.parametrize(("digest", "passed"), [("b" * 12, True), ("a" * 12, False)])
def test_a_run_of_earlier_kernels_or_that_failed_is_not_quoted(tmp_path: Path, digest: str, passed: bool) -> None:
    startup_run(tmp_path, digest, passed)
    assert readme.startup(tmp_path) == readme.NO_RUN
