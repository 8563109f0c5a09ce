"""`dsparkgen new`: a config.json of a DSpark draft becomes a commented spec. The configs are made up."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from dsparkgen import hf
from dsparkgen.cli import app
from dsparkgen.locate import InvalidFile, parse_document
from dsparkgen.spec import ModelSpec, parse_spec, read_spec

ROOT = Path(__file__).parents[2]
NATIVE = {
    "architectures": ["Qwen3DSparkModel"],
    "model_type": "qwen3",
    "vocab_size": 1024,
    "markov_rank": 128,
    "markov_head_type": "vanilla",
    "block_size": 7,
    "dtype": "bfloat16",
}
TRANSFORMED = {
    "architectures": ["Gemma4DSparkModel"],
    "text_config": {"vocab_size": 2048, "final_logit_softcapping": 30, "torch_dtype": "bfloat16"},
    "markov_rank": 64,
    "block_size": 7,
}
SPECULATORS = {
    "architectures": ["DSparkDraftModel"],
    "speculators_model_type": "dspark",
    "draft_vocab_size": 512,
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "block_size": 8,
    "torch_dtype": "bfloat16",
    "transformer_layer_config": {"model_type": "qwen3", "vocab_size": 4096},
    "speculators_config": {
        "algorithm": "dspark",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 7}],
        "verifier": {"name_or_path": "some-org/Some-Target"},
    },
}
BUILT_IN = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 1024,
    "dspark_markov_rank": 512,
    "dspark_block_size": 5,
    "torch_dtype": "bfloat16",
}
MUSE = {
    "architectures": ["MuseSparkDSparkModel"],
    "vocab_size": 2048,
    "draft_vocab_size": 2048,
    "hidden_size": 2600,
    "markov_rank": 256,
    "block_size": 16,
    "sample_from_anchor": False,
    "dtype": "bfloat16",
    "metap": {"use_metap": True, "router_has_one_inf_dim": True, "base_width": 100, "metap_mode": "sp"},
    "output_soft_cap_temp": 20.0,
}
UNKNOWN_CLASS = {"architectures": ["NewDSparkModel"], "vocab_size": 1024, "markov_rank": 64, "block_size": 4}
CONFIGS = {
    "native": NATIVE,
    "nested": TRANSFORMED,
    "speculators": SPECULATORS,
    "built in": BUILT_IN,
    "muse": MUSE,
    "class unknown": UNKNOWN_CLASS,
    "cap of an unknown class": UNKNOWN_CLASS | {"final_logit_softcapping": 30.0, "output_multiplier": 1.0},
    "factor of an unknown class": UNKNOWN_CLASS | {"logit_scale": 0.5},
    "almost nothing": {"markov_rank": 64},
    "no rank": {"architectures": ["Qwen3DSparkModel"]},
    "no rank, built in": {"model_type": "deepseek_v4", "text_config": {"dspark_block_size": 5}},
    "fp32": NATIVE | {"dtype": "float32"},
    "fp32 head": NATIVE | {"head_dtype": "float32"},
    "gated": NATIVE | {"markov_head_type": "gated"},
    "top k": NATIVE | {"dspark_draft_topk": 20},
    "draft without target": {"markov_rank": 64, "draft_vocab_size": 100},
    "strange text": NATIVE | {"markov_head_type": 'x"\\\u007f\n\ud800', "dtype": "\u001b[31m"},
    "large": NATIVE | {"vocab_size": 10**200, "block_size": 10**9},
    "negative": NATIVE | {"vocab_size": -1, "block_size": 0},
}
REFUSED = {  # beside what is marked as unknown: where today's kernels, or the format's ranges, end
    "cap of an unknown class": {"logits.transform.soft_cap"},
    "factor of an unknown class": {"logits.transform.multiplier"},
    "fp32": {"markov.embed_dtype", "markov.head_dtype"},
    "fp32 head": {"markov.bias_rounding"},
    "gated": {"markov.head_type"},
    "top k": {"draft.top_k"},
    "strange text": {"markov.embed_dtype", "markov.head_dtype", "markov.head_type"},
    "large": {"vocabulary.target", "draft.num_steps"},
    "negative": {"vocabulary.target", "draft.num_steps"},
}


@pytest.fixture
def write(tmp_path: Path) -> Callable[[Any], Path]:
    """Write a config; text as it is."""

    def call(config: Any) -> Path:
        path = tmp_path / "config.json"
        path.write_text(config if isinstance(config, str) else json.dumps(config, indent=2))
        return path

    return call


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


@pytest.fixture
def like(sandbox) -> ModelSpec:
    """deepseek_v41."""
    return read_spec(sandbox.root / "specs" / "deepseek_v41.toml")


def problems(text: str) -> list[str]:
    """The keys at which a spec is refused."""
    try:
        parse_spec(parse_document(text.encode(), "x.toml"), stem="x")
    except InvalidFile as error:
        return [problem.key for problem in error.problems]
    return []


def values(text: str) -> dict[str, Any]:
    return parse_document(text.encode(), "x.toml").data


def refusal(path: Path) -> str:
    with pytest.raises(InvalidFile) as caught:
        hf.spec_text("x", hf.read_config(path))
    (problem,) = caught.value.problems
    return str(problem).removeprefix(f"{path}:")


def test_vllm_native(write) -> None:
    text = hf.spec_text("x", hf.read_config(write(NATIVE)))
    spec = parse_spec(parse_document(text.encode(), "x.toml"), stem="x")
    assert (spec.vocabulary.target, spec.vocabulary.draft, spec.vocabulary.d2t) == (1024, 1024, False)
    assert (spec.markov.rank_dim, spec.draft.num_steps, spec.draft.sample_from_anchor) == (128, 7, True)
    assert spec.logits.transform.placement == "none"
    assert spec.provenance.unknown == () and spec.provenance.unverified == ()
    assert "target = 1024  # config.json: vocab_size\n" in text
    assert "rank_dim = 128  # config.json: markov_rank\n" in text
    assert 'head_dtype = "bf16"  # config.json: dtype\n' in text
    assert "# draft: draft_vocab_size is not in config.json" in text


def test_nested_text_config_and_a_soft_cap(write) -> None:
    text = hf.spec_text("x", hf.read_config(write(TRANSFORMED)))
    assert "target = 2048  # config.json: text_config.vocab_size\n" in text
    assert "soft_cap = 30.0  # config.json: text_config.final_logit_softcapping\n" in text
    transform = values(text)["logits"]["transform"]
    assert transform == {"placement": "both", "soft_cap": 30.0, "base_capped": True}  # or the kernel would cap twice
    assert problems(text) == []


def test_speculators_with_a_reduced_vocabulary(write) -> None:
    text = hf.spec_text("x", hf.read_config(write(SPECULATORS)))
    found = values(text)
    assert found["vocabulary"] == {"target": 4096, "draft": 512, "d2t": True}
    assert found["draft"] == {"num_steps": 7, "sample_from_anchor": False, "max_rows": 8}
    assert "# config.json: transformer_layer_config.vocab_size\n" in text
    assert "config.json: speculators_config.proposal_methods[0].speculative_tokens; a block is 8" in text
    assert found["model"]["description"] == "DSpark draft for some-org/Some-Target."
    assert "unknown" not in found["provenance"]
    assert problems(text) == []


def test_speculators_without_an_anchor_key_that_drafts_the_whole_block(write) -> None:
    config = json.loads(json.dumps(SPECULATORS))
    config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = 8
    text = hf.spec_text("x", hf.read_config(write(config)))
    assert values(text)["provenance"]["unknown"] == ("draft.sample_from_anchor",)
    text = hf.spec_text("x", hf.read_config(write(config | {"sample_from_anchor": True})))
    assert values(text)["draft"]["sample_from_anchor"] is True
    assert "unknown" not in values(text)["provenance"]


def test_the_anchors_row_is_no_draft(write) -> None:
    for config in (NATIVE | {"sample_from_anchor": False}, NATIVE | {"dspark_bonus_anchor": True}):
        found = values(hf.spec_text("x", hf.read_config(write(config))))
        assert (found["draft"]["num_steps"], found["draft"]["sample_from_anchor"]) == (6, False)


def test_a_draft_inside_its_targets_checkpoint(write) -> None:
    text = hf.spec_text("x", hf.read_config(write(BUILT_IN)))
    assert problems(text) == []
    assert "rank_dim = 512  # config.json: dspark_markov_rank\n" in text
    assert "num_steps = 5  # config.json: dspark_block_size\n" in text


def test_a_multiplier_from_widths_and_a_cap_on_the_sum(write) -> None:
    found = values(hf.spec_text("x", hf.read_config(write(MUSE))))
    assert found["logits"]["transform"] == {"placement": "sum", "multiplier": 26.0**-0.5, "soft_cap": 20.0}
    assert found["vocabulary"]["d2t"] is True
    assert found["draft"]["num_steps"] == 15
    assert "metap" in refusal(write(MUSE | {"metap": MUSE["metap"] | {"metap_mode": "other"}}))  # type: ignore[operator]


def test_a_cap_that_the_class_does_not_read_is_marked(write) -> None:
    text = hf.spec_text("x", hf.read_config(write(NATIVE | {"final_logit_softcapping": 30.0})))
    assert "it does not read final_logit_softcapping, 30.0" in " ".join(text.split()).replace("# ", "")
    assert values(text)["provenance"]["unknown"] == ("logits.transform.placement",)


def test_a_cap_of_an_unknown_class_waits_for_its_placement(write, like: ModelSpec) -> None:
    config = hf.read_config(write(UNKNOWN_CLASS | {"final_logit_softcapping": 30.0}))
    for related in (None, like):
        text = hf.spec_text("x", config, related)
        assert "\n# placement = ?\nsoft_cap = 30.0  # config.json: final_logit_softcapping; refused until" in text
        assert "logits.transform.placement" in values(text)["provenance"]["unknown"]


def test_values_that_disagree_are_both_named(write) -> None:
    text = hf.spec_text("x", hf.read_config(write(NATIVE | {"text_config": {"vocab_size": 999}})))
    assert "target = 1024  # config.json: vocab_size; but text_config.vocab_size is 999\n" in text


def test_missing_keys_are_marked_and_the_only_errors() -> None:
    text = hf.spec_text("x")
    assert problems(text) == ["vocabulary.target", "markov.rank_dim", "draft.num_steps", "provenance.source"]
    unknown = values(text)["provenance"]["unknown"]
    assert {*problems(text)} - {*unknown} == {"provenance.source"}  # no number, so no assumption
    assert "# unknown: not stated; expected: Inner dimension of embedding and head.\n# rank_dim = ?\n" in text


@pytest.mark.parametrize("related", [False, True], ids=["alone", "like"])
@pytest.mark.parametrize("name", CONFIGS)
def test_errors_stand_only_at_marked_keys(name: str, related: bool, write, like: ModelSpec) -> None:
    text = hf.spec_text("x", hf.read_config(write(CONFIGS[name])), like if related else None)
    marked = set(values(text)["provenance"].get("unknown", ()))
    assert set(problems(text)) - marked == REFUSED.get(name, set())
    assert name == "large" or all(len(line) <= hf.WIDTH for line in text.splitlines())
    assert "\x1b" not in text


def test_like_fills_the_gaps_and_says_so(write, like: ModelSpec) -> None:
    text = hf.spec_text("x", hf.read_config(write({"markov_rank": 64, "vocab_size": 1024})), like)
    spec = parse_spec(parse_document(text.encode(), "x.toml"), stem="x")
    assert (spec.vocabulary.target, spec.markov.rank_dim, spec.draft.num_steps) == (1024, 64, 5)
    assert "num_steps = 5  # as deepseek_v41; not in config.json\n" in text
    assert "draft.num_steps" in spec.provenance.unverified and "vocabulary.target" not in spec.provenance.unverified
    assert spec.provenance.unknown == ()
    assert spec.noise == like.noise and spec.emit == like.emit and spec.parallel == like.parallel
    assert "deepseek_v41" in spec.provenance.notes


def test_like_alone(like: ModelSpec) -> None:
    text = hf.spec_text("x", None, like)
    assert problems(text) == ["provenance.source"]
    assert values(text)["vocabulary"]["target"] == like.vocabulary.target


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ('{"markov_rank": 256,\n  "vocab_size": }', "2:17: not valid JSON: expecting value"),
        ("", "1:1: not valid JSON: expecting value"),
        ("[" * 100000, "1:1: not valid JSON: nested too deeply"),
        ('{"markov_rank": NaN}', "1:1: not usable: expected a finite number (got NaN)"),
        ('{"markov_rank": ' + "9" * 5000 + "}", "1:1: not usable: "),
        ([1, 2], "1:1: expected a JSON object, the config of a DSpark draft (got [1, 2])"),
        ("null", "1:1: expected a JSON object, the config of a DSpark draft (got null)"),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "1:1: expected the config of a DSpark draft"),
        ({"architectures": None}, "1:1: expected the config of a DSpark draft"),
        ({"speculators_model_type": "eagle3"}, '2:3: speculators_model_type: expected "dspark" (got "eagle3")'),
        (NATIVE | {"markov_rank": 0}, "7:3: markov_rank: expected a rank above 0 (got 0)"),
        (NATIVE | {"markov_rank": "256"}, '7:3: markov_rank: expected an integer (got "256")'),
        (NATIVE | {"vocab_size": True}, "6:3: vocab_size: expected an integer (got true)"),
        (NATIVE | {"block_size": 7.5}, "9:3: block_size: expected an integer (got 7.5)"),
        (NATIVE | {"dtype": {"a": 1}}, "10:3: dtype: expected a string (got a table with a)"),
        (NATIVE | {"logit_scale": "1"}, '11:3: logit_scale: expected a number (got "1")'),
        (NATIVE | {"sample_from_anchor": 1}, "11:3: sample_from_anchor: expected true or false (got 1)"),
    ],
)
def test_what_is_no_draft_config_is_refused(config: Any, message: str, write) -> None:
    assert refusal(write(config)).startswith(message)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert "cannot be read: " in refusal(tmp_path / "none.json")
    assert "cannot be read: " in refusal(tmp_path)
    (tmp_path / "config.json").write_bytes(b"{\n\xff}")
    assert refusal(tmp_path / "config.json") == "2:1: expected UTF-8 text (got byte 0xff at offset 2)"
    (tmp_path / "config.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(NATIVE).encode())
    assert problems(hf.spec_text("x", hf.read_config(tmp_path / "config.json"))) == []


def test_the_verb(sandbox, run, write) -> None:
    out = run(0, "new", "toy", "--from-config", str(write(NATIVE))).stdout
    assert out.startswith("wrote    specs/toy.toml\n")
    assert out.rstrip().endswith("then run: dsparkgen generate toy")
    run(0, "generate", "toy")
    assert all((sandbox.package / "toy" / f"{name}.py").exists() for name in ("config", "chain", "fused", "step"))


def test_the_verb_names_what_is_open(run, write) -> None:
    out = run(0, "new", "toy", "--from-config", str(write(NATIVE | {"dspark_draft_topk": 20}))).stdout
    heading = "what today's kernels and this format do not take:"
    assert (
        f"\n{heading}\nspecs/toy.toml:" in out
        and "draft.top_k: must be 0 for the chain, fused and step kernels (got 20)" in out
    )
    out = run(0, "new", "other").stdout
    assert "\nto fill in:\nspecs/other.toml:6:1: model.title: the name for people" in out
    assert "vocabulary.target: required key is missing" in out
    assert "\nunknown: vocabulary.target, markov.rank_dim," in out


def test_a_confidence_head_is_noted(write, like: ModelSpec) -> None:
    config = hf.read_config(write({"markov_rank": 64, "text_config": {"enable_confidence_head": True}}))
    note = values(hf.spec_text("x", config, like))["provenance"]["notes"]
    assert "confidence head (text_config.enable_confidence_head); these kernels do not compute it." in note
    assert note.startswith("What is unverified was taken from deepseek_v41.")
    config = hf.read_config(write(NATIVE | {"enable_confidence_head": False}))
    assert "notes" not in values(hf.spec_text("x", config))["provenance"]


def test_the_documentation_lists_the_keys_that_are_read(write, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs" / "add-a-model.md").read_text().split("## What `--from-config` reads")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    listed = {key for row in rows for key in re.findall(r"`([\w.]+)`", row)}
    read: set[str] = set()
    find = hf.Config.find

    def recorded(self: hf.Config, kind: type, *keys: str, **options: Any) -> hf.Found | None:
        read.update(keys)
        return find(self, kind, *keys, **options)

    monkeypatch.setattr(hf.Config, "find", recorded)
    for config in CONFIGS.values():
        hf.spec_text("x", hf.read_config(write(config)))
    apart = {"architectures", "model_type", "speculators_model_type", "metap", "_name_or_path"}
    apart |= {"speculators_config.proposal_methods", "speculators_config.verifier"}
    assert read <= listed and listed - read == apart
    source = Path(hf.__file__).read_text()
    assert all(key.split(".")[-1] in source for key in apart)


def test_an_existing_spec_is_left_alone(sandbox, run) -> None:
    path = sandbox.root / "specs" / "deepseek_v41.toml"
    before = path.read_bytes()
    assert "specs/deepseek_v41.toml: exists already" in run(2, "new", "deepseek_v41").stderr
    assert path.read_bytes() == before
    (sandbox.root / "specs" / "toy.toml").symlink_to(sandbox.root / "elsewhere.toml")
    assert "exists already" in run(2, "new", "toy").stderr
    assert not (sandbox.root / "elsewhere.toml").exists()


@pytest.mark.parametrize(
    "name",
    [
        "../toy",
        "/tmp/toy",
        "a/b",
        "toy.toml",
        "Toy",
        "1toy",
        "",
        "toy\n",
        "to\ud800y",
        "töy",
        "class",
        "engines",
        "a" * 49,
    ],
)
def test_names_are_the_spec_formats(name: str, sandbox, run) -> None:
    before = sorted(sandbox.root.rglob("*"))
    assert "NAME: must " in run(2, "new", name).stderr
    assert sorted(sandbox.root.rglob("*")) == before


def test_usage(sandbox, run, write, tmp_path: Path) -> None:
    config = write("{")
    assert ":1:2: not valid JSON" in run(2, "new", "toy", "--from-config", str(config)).stderr
    assert "did you mean deepseek_v41?" in run(2, "new", "toy", "--like", "deepseek").stderr
    assert "no such spec" in run(2, "new", "toy", "--like", "../specs/deepseek_v41").stderr
    assert not (sandbox.root / "specs" / "toy.toml").exists()
    run(2, "new")


def test_private_specs(sandbox, run, write) -> None:
    (sandbox.root / "mine").mkdir()
    arguments = ("--from-config", str(write(NATIVE)), "--like", "deepseek_v41", "--specs", "mine")
    assert "wrote    mine/toy.toml" in run(0, "new", "toy", *arguments).stdout
    assert read_spec(sandbox.root / "mine" / "toy.toml").vocabulary.target == 1024
