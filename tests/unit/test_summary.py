"""The summary of a CI run says what is stale, what changed, and what the kernels take."""

import json
from pathlib import Path
from typing import Any

import pytest

from dsparkgen import summary

MANIFEST: dict[str, Any] = {
    "models": {"m": {"draft.num_steps": 5, "parallel.tp": [1, 2]}, "n": {"draft.num_steps": 7}},
    "kernels": {"m/chain": {}, "m/noise": {}, "n/fused": {}},
    "devices": {"h200": {"sms": 132}},
}
CHECKED: dict[str, Any] = {
    "files": 9,
    "changes": [],
    "faults": [],
    "evidence": [
        {"model": "m", "kernel": "chain", "state": "verified"},
        {"model": "m", "kernel": "noise", "state": "stale"},
        {"model": "m", "kernel": "noise", "state": "stale"},
    ],
}


def _build(**values: Any) -> dict[str, Any]:
    return {
        "model": "m",
        "kernel": "chain",
        "arch": "sm_90a",
        "device": "h200",
        "tp": 1,
        "row_slots": 8,
        "variant": None,
        "registers": 160,
        "spill_bytes": 0,
        "local_bytes": 0,
    } | values


def _table(page: str) -> dict[str, list[str]]:
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| `")]
    return {row[0].strip("`"): row[1:] for row in rows}


def test_models_have_kernels_lines_registers_and_evidence() -> None:
    builds = [_build(), _build(registers=168), _build(kernel="noise", registers=40, variant="noise")]
    page = summary.summary(MANIFEST, {"m": 1234, "n": 99}, checked=CHECKED, compiled={"kernels": builds, "errors": []})
    assert "All 9 files are as the specs and templates say." in page
    assert _table(page) == {
        "m": ["chain, noise", "1234", "chain 168, noise 40", "2 stale, 1 verified"],
        "n": ["fused", "99", summary.NONE, summary.NONE],
    }
    assert "3 builds, 0 at fault" in page


def test_a_stale_tree_names_files_causes_and_the_patch() -> None:
    changes = [{"path": "dspark_kernels/m/chain.py", "kind": "changed", "causes": ["x was 1, is 2"]}]
    page = summary.summary(MANIFEST, {}, checked=CHECKED | {"changes": changes, "faults": ["a seal"]}, patch="g.patch")
    assert "**1 of 9 files are not as the specs and templates say.**" in page
    assert "- `dspark_kernels/m/chain.py`: changed (x was 1, is 2)" in page
    assert "`git apply --directory=generated g.patch`" in page
    assert "\n- a seal\n" in page


def test_constants_are_compared_with_the_base() -> None:
    base = {
        "models": {"m": {"draft.num_steps": 4, "parallel.tp": [1]}, "gone": {}},
        "devices": {"h200": {"sms": 132, "l2_bytes": 1}},
    }
    page = summary.summary(MANIFEST, {}, base=base)
    assert "- `n` is new\n- `gone` is gone\n" in page
    assert "- `m`: `draft.num_steps` was `4`, is `5`" in page
    assert "- `m`: `parallel.tp` was `[1]`, is `[1, 2]`" in page
    assert "- `h200`: `l2_bytes` was `1`, is absent" in page
    assert "None." in summary.summary(MANIFEST, {}, base=MANIFEST)


def test_spills_and_failures_are_named() -> None:
    compiled = {"kernels": [_build(spill_bytes=16, local_bytes=8)], "errors": [_build(error="no", tp=8)]}
    page = summary.summary(MANIFEST, {}, compiled=compiled)
    assert "## Compiled: 1 builds, 2 at fault" in page
    assert "- m chain sm_90a h200 tp 1 rows 8: 16 bytes of spills, 8 of local memory a thread" in page
    assert "- m chain sm_90a h200 tp 8 rows 8: no" in page


def test_long_lists_are_cut() -> None:
    changes = [{"path": str(n), "kind": "missing", "causes": []} for n in range(summary.MOST_LINES + 3)]
    page = summary.summary(MANIFEST, {}, checked=CHECKED | {"changes": changes})
    assert f"- `{summary.MOST_LINES - 1}`: missing\n- and 3 more" in page


def test_it_reads_the_repository_and_what_the_verbs_wrote(
    sandbox: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    sandbox.generate()
    monkeypatch.chdir(sandbox.root)
    checked = tmp_path / "check.json"
    checked.write_text(json.dumps(CHECKED))
    summary.main(["--check", str(checked), "--compile", "never_written.json"])
    page = capsys.readouterr().out
    kernels, lines, registers, _ = _table(page)["deepseek_v41"]
    assert "chain" in kernels and registers == summary.NONE and "Compiled" not in page
    files = list((sandbox.package / "deepseek_v41").glob("*.py"))
    assert int(lines) == sum(len(path.read_text().splitlines()) for path in files) > 500
    checked.write_text("[]")
    with pytest.raises(ValueError, match="expected a JSON object, got list"):
        summary.main(["--check", str(checked)])
