"""The pages point to files that exist; the README quotes today's plan, and timings only from runs of the checked-in kernels."""

import json
import re
from pathlib import Path

import pytest

from dsparkgen import evidence, readme
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
