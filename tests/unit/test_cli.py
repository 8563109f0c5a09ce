"""Verbs and exit codes."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from dsparkgen import evidence, tree
from dsparkgen.cli import app

ROOT = Path(__file__).parents[2]
VERIFIED = {"kernel": "chain", "arch": "sm_90a", "inputs": "0" * 12}
CONFIG = "generated/dspark_kernels/deepseek_v41/config.py"


@pytest.fixture
def run(sandbox, monkeypatch: pytest.MonkeyPatch):
    """Run a verb in the sandbox's folder and hold it to an exit code."""
    monkeypatch.chdir(sandbox.root)

    def call(code: int, *arguments: str) -> Result:
        result = CliRunner().invoke(app, list(arguments))
        assert result.exit_code == code, (result.output, result.exception)
        assert result.exception is None or isinstance(result.exception, SystemExit)
        return result

    return call


def test_generate_then_check(sandbox, run) -> None:
    assert "generated/MANIFEST.json: missing" in run(1, "check").stdout
    assert f"wrote    {CONFIG}" in run(0, "generate").stdout
    assert run(0, "generate").stdout.startswith("0 of ")
    (sandbox.package / "deepseek_v41" / "gone.py").write_text("x = 1\n")
    out = run(0, "generate").stdout
    assert (
        "deleted  generated/dspark_kernels/deepseek_v41/gone.py\n0 of " in out and " changed, 1 deleted, 1 model" in out
    )
    out = run(0, "check").stdout
    assert "as the specs and templates say, 1 model" in out
    assert out.count("compiled only") == 16


def test_check_names_the_spec_line_and_the_command(sandbox, run) -> None:
    run(0, "generate")
    sandbox.edit("specs/deepseek_v41.toml", ("num_steps = 5", "num_steps = 6"))
    out = run(1, "check").stdout
    assert f"{CONFIG}: changed\n    specs/deepseek_v41.toml:" in out
    assert "draft.num_steps was 5, is 6" in out
    assert out.rstrip().endswith("run: dsparkgen generate")


def test_check_warns_of_edits_by_hand(sandbox, run) -> None:
    run(0, "generate")
    sandbox.edit(CONFIG, ("129280", "129281"))
    assert "(it discards the edits by hand)" in run(1, "check").stdout


def test_check_json(sandbox, run) -> None:
    run(0, "generate")
    (sandbox.root / CONFIG).unlink()
    document = json.loads(run(1, "check", "--json", "-").stdout)
    assert document["ok"] is False
    assert document["changes"] == [{"path": CONFIG.removeprefix("generated/"), "kind": "missing", "causes": []}]
    run(0, "generate")
    run(0, "check", "--json", "report/check.json")
    document = json.loads((sandbox.root / "report" / "check.json").read_text())
    assert document["ok"] is True and document["models"] == ["deepseek_v41"]
    assert {line["state"] for line in document["evidence"]} == {"compiled only"}


def test_check_of_one_model(sandbox, run) -> None:
    sandbox.add_spec("other_model")
    run(0, "generate")
    sandbox.edit("specs/other_model.toml", ("num_steps = 5", "num_steps = 6"))
    out = run(0, "check", "deepseek_v41").stdout
    assert "other_model" not in out and "as the specs and templates say, 1 model" in out
    assert "draft.num_steps was 5, is 6" in run(1, "check", "other_model").stdout
    assert "did you mean other_model?" in run(2, "check", "other").stderr


def test_check_ends_with_the_results_of_a_model_that_is_gone(sandbox, run) -> None:
    run(0, "generate")
    path = evidence.record(sandbox.root / "benchmarks" / "results", "h200", "gone", "x", verified=[VERIFIED])
    last = run(1, "check").stdout.splitlines()[-1]
    assert last == f"{path}: no spec describes gone any more; delete this file or bring back specs/gone.toml"
    assert "gone" not in run(0, "check", "deepseek_v41").stdout


def test_an_unfinished_spec_stops_other_models_and_says_so(sandbox, run) -> None:
    sandbox.add_spec("other_model", ("rank_dim = 256\n", "\n"))
    remark = "(every verb reads all specs; move an unfinished one out of specs/)"
    assert run(2, "generate", "deepseek_v41").stderr.splitlines()[-1] == remark
    assert remark in run(2, "check").stderr
    assert remark not in run(2, "generate", "other_model").stderr


def test_a_tiny_vocabulary_is_remarked_on(sandbox, run) -> None:
    sandbox.edit("specs/deepseek_v41.toml", ("target = 129280", "target = 129"))
    remark = "specs/deepseek_v41.toml: vocabulary.target: 129 tokens; in thousands?"
    assert remark in run(0, "generate").stderr.splitlines()


@pytest.mark.parametrize("verb", ["verify", "bench"])
def test_stale_code_is_not_recorded(sandbox, run, verb: str) -> None:
    run(0, "generate")
    sandbox.edit("specs/deepseek_v41.toml", ("num_steps = 5", "num_steps = 6"))
    error = run(1, verb, "--record").stderr
    assert "is not what specs/deepseek_v41.toml and the templates give; run: dsparkgen generate deepseek_v41" in error


def test_check_annotates(sandbox, run) -> None:
    run(0, "generate")
    (sandbox.root / CONFIG).unlink()
    assert f"::error file={CONFIG}::missing\n" in run(1, "check", "--format", "github").stdout
    sandbox.edit("specs/deepseek_v41.toml", ("rank_dim = 256", "rank_dim = 250"))
    out = run(2, "check", "--format", "github").stdout
    assert out.startswith("::error file=specs/deepseek_v41.toml,line=") and "col=1::" in out


def test_check_demands_evidence(run) -> None:
    run(0, "generate")
    out = run(1, "check", "--evidence", "h200").stdout
    assert "deepseek_v41/chain: expected a recorded run on sm_90a with this code (got compiled only)" in out
    assert "--evidence: expected one of b200" in run(2, "check", "--evidence", "h2000").stderr


def test_check_refuses_an_edited_result(sandbox, run) -> None:
    run(0, "generate")
    path = sandbox.root / "benchmarks" / "results" / "h200" / "deepseek_v41.json"
    path.parent.mkdir(parents=True)
    entry = {"kernel": "chain", "arch": "sm_90a", "inputs": "0" * 12}
    document = {"device": "h200", "date": "2026-01-01", "command": "x", "rows": [], "verified": [entry], "seal": "0"}
    path.write_text(json.dumps(document))
    assert "edited by hand" in run(1, "check").stdout


def test_an_invalid_spec_reads_like_a_compiler_error(sandbox, run) -> None:
    sandbox.edit("specs/deepseek_v41.toml", ("rank_dim = 256", "rank_dim = 250"), ("num_steps = 5", "num_step = 5"))
    for verb in ("generate", "check", "diff", "list", "doctor"):
        result = run(2, verb)
        lines = result.stderr.splitlines()
        assert lines[0].endswith("1: markov.rank_dim: must be a multiple of 16 (got 250)")
        assert lines[0].startswith("specs/deepseek_v41.toml:")
        assert lines[1].endswith("draft.num_step: unknown key; did you mean num_steps?")
        assert result.stdout == ""


def test_wrong_ruff(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "formatter_version", lambda: "0.0.1")
    assert f"expected ruff {tree.RUFF_VERSION}, whose output is checked in (got 0.0.1)" in run(2, "check").stderr


def test_diff(sandbox, run) -> None:
    run(0, "generate")
    assert run(0, "diff").stdout == ""
    sandbox.edit("specs/deepseek_v41.toml", ("draft_salt = 0x4000_0000", "draft_salt = 7"))
    out = run(1, "diff", "deepseek_v41").stdout
    assert out.startswith("--- a/dspark_kernels/deepseek_v41/config.py\n+++ b/dspark_kernels/deepseek_v41/config.py\n")
    assert "MANIFEST.json" not in out and "\n+DRAFT_SALT" in out
    assert "MANIFEST.json" in run(1, "diff").stdout
    assert "did you mean deepseek_v41?" in run(2, "diff", "deepseek").stderr


def test_diff_against_another_model(sandbox, run) -> None:
    sandbox.add_spec("other_model", ("num_steps = 5", "num_steps = 7"))
    run(0, "generate")
    out = run(1, "diff", "other_model", "--against", "deepseek_v41").stdout
    assert "--- dspark_kernels/deepseek_v41/config.py\n+++ dspark_kernels/other_model/config.py\n" in out
    assert "\n-NUM_STEPS = 5" in out and "\n+NUM_STEPS = 7" in out
    last = out.splitlines()[-1]
    # Three constants: the name, the steps, the query rows of a request.
    assert re.fullmatch(r"chain, fused, launch, noise, step: same code; config: 3 constants, \d+ plan lines", last)
    assert run(0, "diff", "other_model", "--against", "other_model").stdout == ""
    assert "needs a MODEL" in run(2, "diff", "--against", "other_model").stderr
    assert "did you mean other_model?" in run(2, "diff", "deepseek_v41", "--against", "other_mode").stderr


def test_diff_of_a_private_model_against_a_public_one(sandbox, run) -> None:
    """Private specs need --out only where something on disk is compared."""
    sandbox.add_spec("other_model", ("num_steps = 5", "num_steps = 7"))
    (sandbox.root / "private").mkdir()
    (sandbox.root / "specs" / "other_model.toml").rename(sandbox.root / "private" / "other_model.toml")
    out = run(1, "diff", "other_model", "--against", "deepseek_v41", "--specs", "private").stdout
    assert "\n-NUM_STEPS = 5" in out and "\n+NUM_STEPS = 7" in out
    assert "need --out" in run(2, "diff", "other_model", "--specs", "private").stderr
    assert (
        "did you mean other_model?" in run(2, "diff", "other", "--against", "deepseek_v41", "--specs", "private").stderr
    )


def test_plan(run, tmp_path: Path) -> None:
    text = run(0, "plan", "deepseek_v41", "--device", "h200", "--tp", "1,8", "--rows", "1").stdout
    assert "on NVIDIA H200" in text
    json.loads(run(0, "plan", "deepseek_v41", "--json", "-").stdout)
    run(0, "plan", "deepseek_v41", "--svg", str(tmp_path / "plan.svg"))
    assert (tmp_path / "plan.svg").read_text().lstrip().startswith("<svg")
    assert "--device: expected one of b200" in run(2, "plan", "deepseek_v41", "--device", "h2").stderr
    assert "--tp: expected numbers out of 1,2,4,8 (got 3)" in run(2, "plan", "deepseek_v41", "--tp", "3").stderr
    assert "--tp: expected positive numbers" in run(2, "plan", "deepseek_v41", "--tp", "x").stderr


def test_list_and_doctor(run) -> None:
    run(0, "generate")
    out = run(0, "list").stdout
    assert "deepseek_v41" in out and "…" not in out
    assert tree.RUFF_VERSION in run(0, "doctor").stdout


def test_vendor(sandbox, run) -> None:
    out = run(0, "vendor", "deepseek_v41", "--to", "engine/drafts").stdout
    assert "engine/drafts/deepseek_v41/chain.py" in out.splitlines()
    assert (sandbox.root / "engine" / "drafts" / "_device" / "ptx.py").exists()
    assert (sandbox.root / "engine" / "drafts" / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    assert "no such spec" in run(2, "vendor", "nothing", "--to", "engine").stderr


@pytest.mark.parametrize("folder", ["engine/my-kernels", "engine/2nd", "engine/class", "engine/a b", "a.b"])
def test_vendor_refuses_a_folder_that_python_cannot_import(sandbox, run, folder: str) -> None:
    error = run(2, "vendor", "deepseek_v41", "--to", folder).stderr
    assert f'expected a folder whose name Python can import (got "{folder.split("/")[-1]}")' in error
    assert not (sandbox.root / folder).exists()


def test_vendor_leaves_a_package_of_others_alone(sandbox, run) -> None:
    (sandbox.root / "engine").mkdir()
    (sandbox.root / "engine" / "__init__.py").write_text("import this\n")
    error = run(2, "vendor", "deepseek_v41", "--to", "engine").stderr
    assert "engine/__init__.py" in error and "would be replaced" in error
    assert [path.name for path in (sandbox.root / "engine").iterdir()] == ["__init__.py"]
    run(0, "vendor", "deepseek_v41", "--to", "engine/drafts")
    run(0, "vendor", "deepseek_v41", "--to", "engine/drafts")


@pytest.mark.parametrize(
    "arguments",
    [
        ("schema", "--out", "absent/schema.json"),
        ("plan", "deepseek_v41", "--svg", "absent/plan.svg"),
        ("plan", "deepseek_v41", "--json", "specs/deepseek_v41.toml/plan.json"),
        ("generate", "--out", "specs/deepseek_v41.toml"),
        ("vendor", "deepseek_v41", "--to", "specs/deepseek_v41.toml/drafts"),
        ("take", "absent/deepseek_v41.json"),
    ],
)
def test_a_file_that_cannot_be_read_or_written_is_bad_input(sandbox, run, arguments: tuple[str, ...]) -> None:
    error = run(2, *arguments).stderr
    assert f"{arguments[-1].split('/')[0]}" in error and "cannot be read or written: " in error


def test_compile_takes_private_specs(sandbox, run) -> None:
    pytest.importorskip("triton")
    private = sandbox.root / "private"
    private.mkdir()
    sandbox.edit("specs/deepseek_v41.toml", ('["noise", "chain", "fused", "step"]', '["noise"]'))
    (sandbox.root / "specs" / "deepseek_v41.toml").rename(private / "deepseek_v41.toml")
    places = ("--specs", "private", "--out", "product")
    run(0, "generate", *places)
    out = run(0, "compile", *places, "--arch", "sm_90a", "--json", "report.json").stdout
    assert "deepseek_v41: registers" in out
    (kernel,) = json.loads((sandbox.root / "report.json").read_text())["kernels"]
    assert (kernel["kernel"], kernel["arch"], kernel["spill_bytes"]) == ("noise", "sm_90a", 0)
    sandbox.edit("private/deepseek_v41.toml", ("num_steps = 5", "num_steps = 6"))
    error = run(1, "compile", *places, "--arch", "sm_90a").stderr
    assert "product/dspark_kernels/deepseek_v41 is not what private/deepseek_v41.toml and the templates give" in error
    assert "need --out" in run(2, "compile", "--specs", "private").stderr
    assert "private/nothing.toml: no such spec" in run(2, "compile", "nothing", *places).stderr
    assert not (sandbox.root / "docs").exists()


def test_schema(sandbox, run) -> None:
    assert json.loads(run(0, "schema").stdout)["required"][0] == "format"
    run(0, "schema", "--out", "schema.json")
    assert (sandbox.root / "schema.json").read_text() == (ROOT / "specs" / "spec.schema.json").read_text()


def test_usage_errors(run) -> None:
    assert "--arch: expected a list out of sm_90a" in run(2, "compile", "--arch", "sm_80").stderr
    assert "no such spec" in run(2, "compile", "nothing").stderr
    assert "no such spec" in run(2, "verify", "nothing").stderr
    assert "--shapes: expected positive numbers, such as 1x2" in run(2, "bench", "--shapes", "151936").stderr
    run(2, "nonsense")
    run(2, "generate", "--root", "nowhere")


def test_what_this_machine_cannot_tell(run, monkeypatch: pytest.MonkeyPatch) -> None:
    import dsparkgen.compile

    def without(*_: object) -> int:
        raise ModuleNotFoundError("No module named 'torch.cuda'", name="torch.cuda")

    monkeypatch.setattr(dsparkgen.compile, "run_compile", without)
    assert "torch.cuda is not installed here; run: pip install 'dsparkgen[cuda]'" in run(3, "compile").stderr


@pytest.mark.parametrize("command", [["-m", "generator"], ["-m", "dsparkgen"]])
def test_entry_points(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "generator"))
    ran = subprocess.run([sys.executable, *command, "--help"], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    for verb in (
        "new",
        "generate",
        "check",
        "diff",
        "plan",
        "compile",
        "verify",
        "bench",
        "list",
        "vendor",
        "schema",
        "doctor",
    ):
        assert f" {verb} " in ran.stdout
