"""Rendering is pure and local, templates keep their rules, and the product stands alone."""

import ast
import hashlib
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from jinja2 import meta, nodes

from dsparkgen import tree
from dsparkgen.device import load_devices
from dsparkgen.render import TemplateError, environment, inputs_digest, mentioned, render
from dsparkgen.spec import read_spec

ROOT = Path(__file__).parents[2]
TEMPLATES = ROOT / "templates"
MODEL_TEMPLATES = sorted([*TEMPLATES.glob("model/*.tpl.py"), *TEMPLATES.glob("package/*.tpl.py")])
DEVICE_FILES = sorted(TEMPLATES.glob("device/*.py"))
GENERATED = sorted((ROOT / "generated" / "dspark_kernels").rglob("*.py"))
MODEL = "dspark_kernels/deepseek_v41"
LOGIC_LINES = 12  # a template that decides more belongs in plan.py
KERNEL_LINES = 400
MODEL_LINES = 1500  # what is the same for all models belongs in templates/device
ARITHMETIC = (nodes.Add, nodes.Sub, nodes.Mul, nodes.Div, nodes.FloorDiv, nodes.Mod, nodes.Pow, nodes.Neg)
RESIDUE = re.compile(r"\{\{ *(spec|plan|models)\b|^\s*# (% |##)", re.MULTILINE)
EXTERNAL = {"torch", "triton", "cutlass", "cuda"}


def names(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# Templates


@pytest.mark.parametrize("path", [*MODEL_TEMPLATES, *DEVICE_FILES], ids=names)
def test_template_is_python(path: Path) -> None:
    ast.parse(path.read_text())


@pytest.mark.parametrize("path", MODEL_TEMPLATES, ids=names)
def test_template_rules(path: Path) -> None:
    text = path.read_text()
    logic = re.findall(r"^\s*# % *(\w+)", text, re.MULTILINE)
    assert len(logic) <= LOGIC_LINES
    depth = 0
    for word in logic:
        assert word in ("if", "elif", "else", "endif", "for", "endfor"), word
        depth += (word in ("if", "for")) - (word in ("endif", "endfor"))
        assert depth <= 1, "nested template logic"
    assert "{%" not in text and "{#" not in text
    parsed = environment(TEMPLATES).parse(text)
    for output in parsed.find_all(nodes.Output):
        assert not list(output.find_all(ARITHMETIC)), "arithmetic belongs in plan.py"
    known = {"models"} if path.parent.name == "package" else {"spec", "plan"}
    assert meta.find_undeclared_variables(parsed) <= known


@pytest.mark.parametrize("path", DEVICE_FILES, ids=names)
def test_device_file_has_no_templating(path: Path) -> None:
    assert not RESIDUE.search(path.read_text())


def test_device_files_are_formatted() -> None:
    """They are emitted byte for byte, so they are written as the formatter leaves them."""
    files = {names(path): path.read_text() for path in DEVICE_FILES}
    assert tree.format_files(files) == files


# Rendering


def _digests(seed: str) -> str:
    script = """
        import hashlib, json
        from pathlib import Path
        from dsparkgen import tree
        built = tree.build_tree(tree.find_roots(Path.cwd()))
        print(json.dumps({name: hashlib.sha256(text.encode()).hexdigest() for name, text in built.files.items()}))
    """
    environ = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT / "generator"), "TZ": f"UTC+{seed}"}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    return subprocess.run(command, cwd=ROOT, env=environ, check=True, capture_output=True, text=True).stdout


def test_rendering_does_not_depend_on_the_hash_seed() -> None:
    first, second = _digests("1"), _digests("2")
    assert json.loads(first) == json.loads(second)
    assert f"{MODEL}/chain.py" in first


def test_render_is_pure_and_writes_nothing(sandbox) -> None:
    spec, devices = read_spec(sandbox.root / "specs" / "deepseek_v41.toml"), load_devices(sandbox.root)
    before = sorted(sandbox.root.rglob("*"))
    assert render(spec, devices, templates=sandbox.roots.templates) == render(spec, devices, templates=TEMPLATES)
    assert sorted(sandbox.root.rglob("*")) == before


def _change(sandbox, lines, *changes: tuple[str, str]) -> tuple[dict[str, list[str]], set[str]]:
    """Edit the spec: changed lines by module, and the modules whose inputs digest moved."""
    before = tree.build_tree(sandbox.roots).files
    sandbox.edit("specs/deepseek_v41.toml", *changes)
    after = tree.build_tree(sandbox.roots).files
    assert set(before) == set(after)
    moved = {
        name for name in before if name.endswith(".py") and inputs_digest(before[name]) != inputs_digest(after[name])
    }
    changed = {
        name: lines(before[name], after[name])
        for name in before
        if name.endswith(".py") and before[name] != after[name]
    }
    return {name.removeprefix(f"{MODEL}/"): found for name, found in changed.items()}, {
        name.removeprefix(f"{MODEL}/") for name in moved
    }


def test_a_constant_moves_one_line(sandbox, changed_lines) -> None:
    changed, moved = _change(sandbox, changed_lines, ("draft_salt = 0x4000_0000", "draft_salt = 12345"))
    assert set(changed) == moved == {"config.py"}
    removed, added = changed["config.py"]
    assert removed.startswith("- DRAFT_SALT") and "12345" in added


def test_provenance_moves_nothing(sandbox, changed_lines) -> None:
    assert _change(sandbox, changed_lines, ("No output transform", "More. No output transform")) == ({}, set())


def test_a_title_moves_only_the_lines_that_print_it(sandbox, changed_lines) -> None:
    changed, moved = _change(sandbox, changed_lines, ('title = "DeepSeek-V4.1"', 'title = "Another-V5"'))
    assert set(changed) == moved
    for found in changed.values():
        assert all("DeepSeek-V4.1" in line for line in found if line[0] == "-")


def test_the_vocabulary_moves_constants_and_plan_lines(sandbox, changed_lines) -> None:
    changed, _ = _change(sandbox, changed_lines, ("target = 129280", "target = 129296"))
    for name, found in changed.items():
        kept = [line for line in found if line[0] == "-" and "129280" not in line and "PlanLine(" not in line]
        assert not kept or name == "config.py", (name, kept)


def test_two_models_have_the_same_functions_in_the_same_order(sandbox) -> None:
    sandbox.add_spec("other_model", ("target = 129280", "target = 151936"), ("num_steps = 5", "num_steps = 7"))
    files = tree.build_tree(sandbox.roots).files
    for name in (name for name in files if name.startswith(f"{MODEL}/")):
        other = files[name.replace("deepseek_v41", "other_model")]
        kinds = (ast.FunctionDef, ast.ClassDef)
        first, second = [
            [n.name for n in ast.walk(ast.parse(text)) if isinstance(n, kinds)] for text in (files[name], other)
        ]
        assert first == second


def test_template_comments_do_not_reach_the_digest(sandbox) -> None:
    before = tree.build_tree(sandbox.roots).files[f"{MODEL}/fused.py"]
    sandbox.edit(
        "templates/model/fused.tpl.py",
        ("\nimport triton\n", "\n# ## only for readers of the template\nimport triton\n"),
    )
    assert tree.build_tree(sandbox.roots).files[f"{MODEL}/fused.py"] == before


def test_mentioned_attributes() -> None:
    text = 'A = {{ spec.a.b }}\n# % for line in plan.lines\nB = {{ line.c }}\n# % endfor\n# % if "x" in spec.d.items()\n# % endif\n'
    assert mentioned(text, TEMPLATES) == (
        ("line",),
        ("line", "c"),
        ("plan", "lines"),
        ("spec", "a", "b"),
        ("spec", "d"),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("A = {{ spec.markov.rang }}", r"templates/model/noise\.tpl\.py:1: spec\.markov\.rang does not exist"),
        ("A = 1\n# % if spec.noise\nB = 1\n", r"templates/model/noise\.tpl\.py:3: Unexpected end of template"),
        ("A = 1\n# % iff spec.noise\nB = 1\n", r"templates/model/noise\.tpl\.py:2: Encountered unknown tag 'iff'"),
        ("A = 1\nB = {{ spec.model. }}\n", r"templates/model/noise\.tpl\.py:2: "),
        ("A = 1\nB = {{ nothing }}\n", r"templates/model/noise\.tpl\.py:2: 'nothing' is undefined"),
    ],
)
def test_template_errors_name_the_line(sandbox, text: str, message: str) -> None:
    (sandbox.root / "templates" / "model" / "noise.tpl.py").write_text(text)
    with pytest.raises(TemplateError, match=message):
        tree.build_tree(sandbox.roots)


def test_a_missing_template_is_an_error(sandbox) -> None:
    (sandbox.root / "templates" / "model" / "noise.tpl.py").unlink()
    with pytest.raises(TemplateError, match=r"templates/model/noise\.tpl\.py:1: cannot be read: No such file"):
        tree.build_tree(sandbox.roots)


# The product


@pytest.mark.parametrize("path", GENERATED, ids=names)
def test_generated_file_stands_alone(path: Path) -> None:
    """No residue of templates; imports are relative, of the standard library, or of the CUDA stack."""
    text = path.read_text()
    assert not RESIDUE.search(text)
    assert len(text.splitlines()) <= KERNEL_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            modules = [node.module or ""]
        else:
            continue
        for module in modules:
            top = module.split(".")[0]
            assert top in EXTERNAL or top in sys.stdlib_module_names, module


def test_a_model_stays_small() -> None:
    assert (
        sum(len(path.read_text().splitlines()) for path in GENERATED if path.parent.name == "deepseek_v41")
        <= MODEL_LINES
    )


def test_generated_modules_are_all_there() -> None:
    assert {path.name for path in GENERATED if path.parent.name == "deepseek_v41"} == {
        "__init__.py", "chain.py", "config.py", "fused.py", "launch.py", "noise.py", "step.py"
    }  # fmt: skip


BLOCKED = """
    import importlib.abc, sys
    class Blocker(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] in {blocked!r}:
                raise ImportError(name + " is blocked")
    sys.meta_path.insert(0, Blocker())
"""


def _run(folder: Path, blocked: tuple[str, ...], body: str) -> str:
    script = textwrap.dedent(BLOCKED.format(blocked=blocked)) + textwrap.dedent(body)
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    ran = subprocess.run([sys.executable, "-c", script], cwd=folder, env=environ, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_importing_the_package_needs_no_cuda_library() -> None:
    body = """
        import dspark_kernels, sys
        model = dspark_kernels.load("deepseek_v41")
        assert model is dspark_kernels.deepseek_v41
        import dspark_kernels.deepseek_v41.config as config
        assert "DraftSampler" in dir(model) and "deepseek_v41" in dir(dspark_kernels)
        try:
            dspark_kernels.load("deepseek")
        except ValueError as error:
            assert "expected one of the models " in str(error) and "deepseek_v41" in str(error)
        print(config.VOCAB_SIZE, config.NUM_STEPS)
    """
    out = _run(
        ROOT / "generated", ("torch", "triton", "cutlass", "cuda", "numpy", "dsparkgen", "pydantic", "jinja2"), body
    )
    assert out.split() == ["129280", "5"]


def test_a_vendored_copy_runs_without_this_project(generated, tmp_path_factory: pytest.TempPathFactory) -> None:
    pytest.importorskip("triton")
    generated.add_spec("other_model")
    engine = tmp_path_factory.mktemp("engine")
    built = tree.build_tree(generated.roots)
    written = tree.vendor(built, "deepseek_v41", generated.roots.templates, engine / "third_party" / "drafts")
    assert not any("other_model" in name for name in written)
    body = """
        from third_party import drafts
        assert drafts.MODELS == ("deepseek_v41",)
        model = drafts.load("deepseek_v41")
        print(model.DraftSampler.__module__, model.FusedLoop.__module__, callable(model.draw_noise))
    """
    out = _run(engine, ("dsparkgen", "pydantic", "jinja2", "typer", "dspark_kernels"), body)
    assert out.split() == ["third_party.drafts.deepseek_v41.launch", "third_party.drafts.deepseek_v41.fused", "True"]


def test_checked_in_headers_hold_no_path_and_no_version() -> None:
    for path in GENERATED:
        head = path.read_text().split('"""')[0]
        assert str(ROOT) not in path.read_text()
        assert not re.search(r"\d+\.\d+\.\d+|\d{4}-\d\d-\d\d", head)
    assert hashlib.sha256(b"").hexdigest()[:12] == inputs_digest("")
