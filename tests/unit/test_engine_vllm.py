"""The vLLM hook on a CPU: the released engine's own loop with and without it, through the fused kernel in Triton's interpreter.

The loop is the released wheel's (tests/harness/engine_wheel.py); these tests are skipped, saying so, where it could not be fetched.
"""

import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from tests.harness import engine_stub, engine_wheel  # noqa: E402
from tests.harness.cases import POISON_LOGIT, POISON_TOKEN, Case, exact_case  # noqa: E402
from tests.harness.engine_stub import Draft  # noqa: E402
from tests.harness.oracle import same_bits  # noqa: E402

interpreted = pytest.mark.skipif(
    not triton.knobs.runtime.interpret, reason="kernels are compiled here, not interpreted"
)

VOCAB, RANK, STEPS = 203, 64, 3
KERNELS, FUSED = ("noise", "chain", "fused"), ("noise", "fused")
CAP = 30.0
Models = Callable[..., ModuleType]


@pytest.fixture(scope="module")
def files() -> Path:
    """The engine's files."""
    try:
        return engine_wheel.engine_files()
    except engine_wheel.CannotFetchError as error:
        pytest.skip(f"needs files of the vLLM {engine_wheel.RELEASE} wheel, which could not be fetched: {error}")


@pytest.fixture
def engine(files: Path) -> Iterator[engine_wheel.Engine]:
    """The engine's speculator and Gumbel kernel."""
    with engine_wheel.loaded_engine(files) as loaded:
        yield loaded


@pytest.fixture
def hook(toy_models: Models) -> ModuleType:
    """The hook of a package with one small model, plain, that any draft of `small_case` matches."""
    return hook_of(toy_models(VOCAB, kernels=KERNELS))


def hook_of(model: ModuleType) -> ModuleType:
    return importlib.import_module(f"{model.__name__.split('.')[0]}.engines.vllm")


def small_case(rows: int = 3, **options: Any) -> Case:
    return exact_case(VOCAB, RANK, STEPS, rows, seed=rows, padding_rows=min(1, rows - 1), **options)


def assert_same(hook: ModuleType, make: Callable[[], Draft]) -> None:
    """The engine's step gives the same tokens and cache with and without the hook, and with it takes the kernels."""
    plain, hooked = make(), make()
    want = plain.run()
    hooked.give_hook(hook)
    got = hooked.run()
    served = hook._serving[hooked.model]
    assert isinstance(served, hook.Serving), served
    assert served.sampler.served == {"fused": 1}
    assert torch.equal(got[0], want[0])  # padding rows too, and those beyond the batch stay as they were
    assert same_bits(got[1], want[1])


# The loop against the kernels


@interpreted
@pytest.mark.parametrize("rows", [1, 9, 64])
def test_draws_what_the_loop_draws(hook: ModuleType, engine: engine_wheel.Engine, rows: int) -> None:
    assert_same(hook, lambda: Draft(engine, small_case(rows)))


@interpreted
@pytest.mark.parametrize("name", sorted(engine_stub.CLASSES))
def test_serves_every_draft_class(hook: ModuleType, engine: engine_wheel.Engine, name: str) -> None:
    options: dict[str, Any] = {}
    if name.startswith("Muse"):  # its draft has a map over the whole vocabulary, which maps nothing
        options = {"base": engine_stub.TransformedDraft, "d2t": torch.zeros(VOCAB, dtype=torch.int64)}
    assert_same(hook, lambda: Draft(engine, small_case(2), name=name, **options))


@interpreted
def test_draws_fp32_logits(hook: ModuleType, engine: engine_wheel.Engine) -> None:
    case = small_case(3, base_dtype=torch.float32, cache_dtype=torch.float32)
    assert_same(hook, lambda: Draft(engine, case))


@interpreted
def test_reads_the_anchor_of_a_longer_query(hook: ModuleType, engine: engine_wheel.Engine) -> None:
    """The layout whose anchor is not sampled from has one query more than steps."""
    assert_same(hook, lambda: Draft(engine, small_case(3), query_per_row=STEPS + 1))


@interpreted
def test_rows_beyond_the_batch_are_padding(hook: ModuleType, engine: engine_wheel.Engine) -> None:
    assert_same(hook, lambda: Draft(engine, small_case(3, max_reqs=12), max_rows=8))


@interpreted
def test_draws_under_a_cap_on_logits_and_bias(toy_models: Models, engine: engine_wheel.Engine) -> None:
    """Gemma's draft: one processor caps base logits, which are given here as they arrive, and bias."""
    transform = {"placement": "both", "soft_cap": CAP, "base_capped": True}
    capped = hook_of(toy_models(VOCAB, kernels=KERNELS, logits={"transform": transform}))
    assert_same(capped, lambda: Draft(engine, small_case(3), name="Gemma4DSparkForCausalLM", soft_cap=CAP))


@interpreted
def test_draws_under_a_scale(toy_models: Models, engine: engine_wheel.Engine) -> None:
    """Qwen's processor can scale: base logits arrive scaled, the bias is left to do."""
    transform = {"placement": "both", "multiplier": 0.375, "base_capped": True}
    scaled = hook_of(toy_models(VOCAB, kernels=FUSED, logits={"transform": transform}))
    assert_same(scaled, lambda: Draft(engine, small_case(3), scale=0.375))


@interpreted
def test_draws_under_a_transform_of_the_sum(toy_models: Models, engine: engine_wheel.Engine) -> None:
    """Muse Spark's draft: multiplier, then cap, on the sum of base logits and bias."""
    transform = {"placement": "sum", "multiplier": 0.5, "soft_cap": 4.0}
    muse = hook_of(toy_models(VOCAB, kernels=FUSED, logits={"transform": transform}))
    transformed = type(
        "Transformed", (engine_stub.TransformedDraft,), {"output_multiplier": 0.5, "output_soft_cap_temp": 4.0}
    )
    d2t = torch.zeros(VOCAB, dtype=torch.int64)
    options: dict[str, Any] = {"name": "MuseSparkDSparkForCausalLM", "base": transformed, "d2t": d2t}
    assert_same(muse, lambda: Draft(engine, small_case(3), **options))


@interpreted
def test_draws_from_a_reduced_vocabulary(toy_models: Models, engine: engine_wheel.Engine) -> None:
    reduced = hook_of(toy_models(VOCAB, kernels=FUSED, vocabulary={"draft": 64, "d2t": True}))
    d2t = torch.arange(64) * 2 + 1  # target ids 1, 4, 7, ...
    case = small_case(3)
    case = case.replace(
        base_logits=case.base_logits[:, :, :64].contiguous(), head_weight=case.head_weight[:64].contiguous()
    )
    assert_same(reduced, lambda: Draft(engine, case, d2t=d2t))


@interpreted
def test_draws_fp64_noise_with_a_kernel_for_it(toy_models: Models, engine: engine_wheel.Engine) -> None:
    wide = hook_of(toy_models(VOCAB, kernels=("fused",), noise={"scheme": "murmur3_64"}))

    def make() -> Draft:
        draft = Draft(engine, small_case(3))
        draft.speculator.use_fp64_gumbel = True
        return draft

    assert_same(wide, make)


@interpreted
def test_draws_greedy_drafts(toy_models: Models, engine: engine_wheel.Engine) -> None:
    """Without a logits cache the engine takes the argmax."""
    greedy = hook_of(toy_models(VOCAB, kernels=("fused",), logits={"cache_dtypes": ()}))
    plain, hooked = Draft(engine, small_case(3)), Draft(engine, small_case(3))
    for draft in (plain, hooked):
        draft.speculator.draft_logits = None
    hooked.give_hook(greedy)
    want, got = plain.run()[0], hooked.run()[0]
    assert isinstance(greedy._serving[hooked.model], greedy.Serving)
    assert torch.equal(got, want)


def test_declines_greedy_drafts_without_a_kernel(hook: ModuleType, engine: engine_wheel.Engine) -> None:
    draft = Draft(engine, small_case())
    draft.speculator.draft_logits = None
    expect_decline(hook, draft, "the draft's none", "cache_dtypes = []")


@interpreted
def test_builds_once(hook: ModuleType, engine: engine_wheel.Engine) -> None:
    draft = Draft(engine, small_case(2))
    draft.give_hook(hook)
    assert draft.asked() and draft.asked()
    assert hook._serving[draft.model].sampler.served == {"fused": 2}


@interpreted
def test_reloaded_weights_are_read(hook: ModuleType, engine: engine_wheel.Engine) -> None:
    """In the same storage by the same sampler, in another by a new one."""
    case = small_case(2)
    other = exact_case(VOCAB, RANK, STEPS, 1, seed=99)
    hooked = Draft(engine, case.replace(embed_weight=case.embed_weight.clone(), head_weight=case.head_weight.clone()))
    hooked.give_hook(hook)
    hooked.run()
    sampler = hook._serving[hooked.model].sampler
    head = hooked.model.model.markov_head
    want = Draft(engine, case.replace(embed_weight=other.embed_weight, head_weight=other.head_weight)).run()[0]
    head.markov_w1.weight.copy_(other.embed_weight)
    head.markov_w2.weight.copy_(other.head_weight)
    assert torch.equal(hooked.run()[0], want)
    assert hook._serving[hooked.model].sampler is sampler
    head.markov_w1.weight, head.markov_w2.weight = case.embed_weight.clone(), case.head_weight.clone()
    assert torch.equal(hooked.run()[0], Draft(engine, case).run()[0])
    assert hook._serving[hooked.model].sampler is not sampler


# Where the hook stands aside


def expect_decline(hook: ModuleType, draft: Draft, *words: str) -> None:
    """The hook does nothing, says why, and the engine's loop draws."""
    draft.give_hook(hook)
    assert draft.asked() is False
    reason = hook._serving[draft.model]
    assert isinstance(reason, hook.Declined)
    for word in words:
        assert word in reason
    assert draft.model.lm_head_calls == 0
    assert bool((draft.speculator.draft_tokens == POISON_TOKEN).all())
    assert draft.speculator.draft_logits is None or bool((draft.speculator.draft_logits == POISON_LOGIT).all())


def test_declines_the_confidence_head(hook: ModuleType, engine: engine_wheel.Engine) -> None:
    draft = Draft(engine, small_case())
    draft.speculator.use_confidence_head = True
    expect_decline(hook, draft, "confidence head")


@pytest.mark.parametrize("attribute", ["use_acceptance_estimator", "acceptance_estimator"])
def test_declines_an_acceptance_estimator(hook: ModuleType, engine: engine_wheel.Engine, attribute: str) -> None:
    draft = Draft(engine, small_case())
    setattr(draft.speculator, attribute, True)
    expect_decline(hook, draft, "acceptance estimator")


def test_declines_a_watermarker(hook: ModuleType, engine: engine_wheel.Engine) -> None:
    draft = Draft(engine, small_case())
    draft.speculator.draft_watermarker = object()
    expect_decline(hook, draft, "watermark")


def test_declines_fp64_noise_without_a_kernel(hook: ModuleType, engine: engine_wheel.Engine) -> None:
    draft = Draft(engine, small_case())
    draft.speculator.use_fp64_gumbel = True
    expect_decline(hook, draft, "noise.scheme is 'murmur3_32', the draft's 'murmur3_64'", 'scheme = "murmur3_64"')


def test_declines_an_fp32_head(hook: ModuleType, engine: engine_wheel.Engine) -> None:
    draft = Draft(engine, small_case())
    draft.model.logits_processor.head_dtype = torch.float32
    expect_decline(hook, draft, "torch.float32", "does not round the bias")


def test_declines_draft_logits_with_a_row_mapping(hook: ModuleType, engine: engine_wheel.Engine) -> None:
    draft = Draft(engine, small_case())
    draft.speculator.draft_logits = SimpleNamespace(values=draft.speculator.draft_logits, rows=None)
    draft.give_hook(hook)
    assert draft.asked() is False
    assert "row mapping" in hook._serving[draft.model]


def test_declines_a_scale_after_the_cap(hook: ModuleType, engine: engine_wheel.Engine) -> None:
    draft = Draft(engine, small_case(), soft_cap=CAP)
    draft.model.logits_processor.scale = 0.5
    expect_decline(hook, draft, "scales after its soft cap")


def test_declines_two_transforms(hook: ModuleType, engine: engine_wheel.Engine) -> None:
    draft = Draft(engine, small_case(), soft_cap=CAP, base=engine_stub.TransformedDraft)
    expect_decline(hook, draft, "once more")


def test_declines_another_logits_processor(hook: ModuleType, engine: engine_wheel.Engine) -> None:
    draft = Draft(engine, small_case())
    draft.model.logits_processor.__class__ = type("FasterLogits", (engine_stub.LogitsProcessor,), {})
    expect_decline(hook, draft, "FasterLogits")


def test_declines_a_quantised_markov_head(hook: ModuleType, engine: engine_wheel.Engine) -> None:
    draft = Draft(engine, small_case())
    draft.model.model.markov_head.markov_w2.quant_method = SimpleNamespace()
    expect_decline(hook, draft, "unquantised")


def test_declines_other_weights(hook: ModuleType, engine: engine_wheel.Engine) -> None:
    draft = Draft(engine, small_case())
    draft.model.model.markov_head.markov_w2.weight = draft.case.head_weight.half()
    expect_decline(hook, draft, "torch.float16")


def test_declines_batch_invariance(hook: ModuleType, files: Path) -> None:
    with engine_wheel.loaded_engine(files, batch_invariant=True) as engine:
        expect_decline(hook, Draft(engine, small_case()), "batch-invariant")


def test_declines_a_class_it_does_not_know(hook: ModuleType, engine: engine_wheel.Engine) -> None:
    draft = Draft(engine, small_case())
    type(draft.model).__module__ = "vllm.model_executor.models.new_dspark"
    expect_decline(hook, draft, "new_dspark", "no draft model that the hook knows")


def test_declines_a_missing_attribute(hook: ModuleType, engine: engine_wheel.Engine) -> None:
    draft = Draft(engine, small_case())
    del draft.speculator.sample_idx_mapping
    expect_decline(hook, draft, "expected an attribute sample_idx_mapping of the speculator")


def test_declines_a_sampler_that_cannot_be_built(
    hook: ModuleType, engine: engine_wheel.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(hook, "make_sampler", fail)
    expect_decline(hook, Draft(engine, small_case()), "RuntimeError: out of memory")


@interpreted
def test_declines_base_logits_of_another_dtype(hook: ModuleType, engine: engine_wheel.Engine) -> None:
    """Known once the LM head ran only: the loop runs it again."""
    draft = Draft(engine, small_case())
    draft.model.logits = draft.model.logits.float()
    draft.give_hook(hook)
    assert draft.asked() is False
    assert bool((draft.speculator.draft_tokens == POISON_TOKEN).all())


def test_declines_under_capture_before_the_first_step(
    hook: ModuleType, engine: engine_wheel.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = Draft(engine, small_case())
    draft.give_hook(hook)
    monkeypatch.setattr(hook, "_capturing", lambda: True)
    assert draft.asked() is False
    assert draft.model not in hook._serving


@interpreted
def test_the_loop_draws_after_a_decline(hook: ModuleType, engine: engine_wheel.Engine) -> None:
    plain, hooked = Draft(engine, small_case()), Draft(engine, small_case())
    hooked.speculator.num_query_per_req = plain.speculator.num_query_per_req
    hooked.model.model.markov_head.markov_w2.quant_method = SimpleNamespace()
    hooked.give_hook(hook)
    want, got = plain.run(), hooked.run()
    assert isinstance(hook._serving[hooked.model], hook.Declined)
    assert torch.equal(got[0], want[0]) and same_bits(got[1], want[1])


def test_names_the_model_in_one_line(
    hook: ModuleType, engine: engine_wheel.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    draft = Draft(engine, small_case(2))
    with caplog.at_level(logging.INFO, "vllm.dspark_kernels"):
        served = hook.serve(draft.model, draft.speculator)
    assert isinstance(served, hook.Serving)
    (record,) = [record for record in caplog.records if record.name == "vllm.dspark_kernels"]
    assert record.getMessage().startswith(
        f"DSpark drafts of Qwen3DSparkForCausalLM: toy draws them (1 to {draft.case.max_reqs} requests: fused, "
    )


# The contract


def test_the_loop_is_the_one_the_kernels_stand_in_for(engine: engine_wheel.Engine) -> None:
    contract = importlib.import_module("dspark_kernels.engines.vllm_contract")
    assert contract.why_loop_differs(engine.package) is None
    for path, classes in contract.DRAFTS.items():
        for name in classes:
            assert contract.why_draft_differs(engine.package, path, name) is None


def test_every_attribute_is_set_by_the_engine(engine: engine_wheel.Engine) -> None:
    """By an assignment to self, or in the class's body."""
    import ast

    contract = importlib.import_module("dspark_kernels.engines.vllm_contract")
    missing = []
    for (path, name), attributes in contract.ATTRIBUTES.items():
        classes = [node for node in ast.parse(engine.source(path)).body if isinstance(node, ast.ClassDef)]
        (found,) = [node for node in classes if node.name == name]
        body = {
            target.id
            for node in found.body
            for target in [*getattr(node, "targets", []), getattr(node, "target", None)]
            if isinstance(target, ast.Name)
        } | {node.name for node in found.body if isinstance(node, ast.FunctionDef)}
        stores = (
            node for node in ast.walk(found) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        )
        stored = {node.attr for node in stores if isinstance(node.value, ast.Name) and node.value.id == "self"}
        missing += [f"{path}: {name}.{attribute}" for attribute in attributes if attribute not in body | stored]
    assert not missing


OWNERS = {  # names in the hook's code: the engine's classes that they stand for
    "speculator": ("DraftModelSpeculator", "DFlashSpeculator", "DSparkSpeculator"),
    "input_buffers": ("InputBuffers",),
    "model": ("Qwen3DSparkForCausalLM", "MuseSparkDSparkForCausalLM", "Qwen3DSparkModel"),
    "processor": ("LogitsProcessor",),
    "logits_processor": ("LogitsProcessor",),
    "head": ("DSparkMarkovHead",),
    "markov_head": ("DSparkMarkovHead",),
    "lm_head": ("VocabParallelEmbedding",),
    "markov_w2": ("VocabParallelEmbedding",),
    "indices": ("VocabParallelEmbeddingShardIndices",),
    "group": ("GroupCoordinator",),
}
OF_TORCH = {"weight", "norm", "data_ptr", "shape", "dtype"}


def test_the_hook_reads_no_other_attribute() -> None:
    """What is not in the contract's list is not checked against the wheel."""
    import ast

    contract = importlib.import_module("dspark_kernels.engines.vllm_contract")
    listed = {
        name: {attribute for (_, owner), found in contract.ATTRIBUTES.items() if owner in owners for attribute in found}
        for name, owners in OWNERS.items()
    }
    read = set()
    for file in ("vllm.py", "vllm_draft.py"):
        for node in ast.walk(ast.parse(Path(contract.__file__).with_name(file).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                owner = node.value
                name = owner.id if isinstance(owner, ast.Name) else getattr(owner, "attr", None)
                if name in OWNERS:
                    read.add((name, node.attr))
    methods = set(contract.METHODS)
    unlisted = {(name, attribute) for name, attribute in read if attribute not in listed[name] | methods | OF_TORCH}
    assert unlisted == set()
    # Every attribute of the list is one that the hook reads.
    assert {name for name in contract.SPECULATOR} <= {attribute for name, attribute in read if name == "speculator"}


@pytest.mark.parametrize(
    "path, before, after, name",
    [
        ("v1/worker/gpu/sample/gumbel.py", "1 << 30", "1 << 31", "_DRAFT_NOISE_SALT"),
        ("v1/worker/gpu/sample/gumbel.py", "h * 5 + 0xE6546B64", "h * 5 + 0xE6546B65", "_murmur3_mix"),
        ("v1/worker/gpu/spec_decode/dspark/speculator.py", "sample_pos - 1,", "sample_pos,", "_sample_logits"),
        ("model_executor/layers/logits_processor.py", "logits * self.soft_cap", "logits", "LogitsProcessor.forward"),
    ],
)
def test_another_loop_is_named(files: Path, tmp_path: Path, path: str, before: str, after: str, name: str) -> None:
    contract = importlib.import_module("dspark_kernels.engines.vllm_contract")
    for known in contract.LOOP:
        text = (files / "vllm" / known).read_text(encoding="utf-8")
        if known == path:
            assert before in text
            text = text.replace(before, after)
        (tmp_path / known).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / known).write_text(text)
    assert name in contract.why_loop_differs(tmp_path)


def test_comments_do_not_make_another_loop(files: Path, tmp_path: Path) -> None:
    contract = importlib.import_module("dspark_kernels.engines.vllm_contract")
    for known in contract.LOOP:
        (tmp_path / known).parent.mkdir(parents=True, exist_ok=True)
        text = (files / "vllm" / known).read_text(encoding="utf-8")
        (tmp_path / known).write_text(text.replace("\n@triton.jit", "\n# compiled\n@triton.jit"))
    assert contract.why_loop_differs(tmp_path) is None


def test_a_new_override_is_named(files: Path, tmp_path: Path) -> None:
    """A class that defines what it inherited before is another one."""
    contract = importlib.import_module("dspark_kernels.engines.vllm_contract")
    path = "model_executor/models/gemma4_dspark.py"
    text = (files / "vllm" / path).read_text(encoding="utf-8")
    line = "class Gemma4DSparkForCausalLM(Qwen3DSparkForCausalLM):\n"
    assert line in text
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text(text.replace(line, f"{line}    def markov_bias(self, e):\n        return e\n\n"))
    assert "Gemma4DSparkForCausalLM.markov_bias" in contract.why_draft_differs(
        tmp_path, path, "Gemma4DSparkForCausalLM"
    )


# Registration


@pytest.fixture
def new_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package `vllm` whose draft modules can be imported: classes with nothing in them, one with a method of its own."""
    contract = importlib.import_module("dspark_kernels.engines.vllm_contract")
    for path, classes in contract.DRAFTS.items():
        file = tmp_path / "vllm" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        own = "    def sample_sequential(self): return 'own'\n" if "kimi" in path else "    pass\n"
        file.write_text("".join(f"class {name}:\n{own}" for name in classes))
    monkeypatch.syspath_prepend(tmp_path)
    before, finders = set(sys.modules), list(sys.meta_path)
    yield
    sys.meta_path[:] = finders
    for name in set(sys.modules) - before:
        if name.split(".")[0] == "vllm":
            del sys.modules[name]


def test_register_waits_for_the_draft_classes(hook: ModuleType, new_package: None) -> None:
    first = importlib.import_module("vllm.model_executor.models.qwen3_dspark")
    hook.register()
    hook.register()
    assert sum(isinstance(finder, hook.DraftFinder) for finder in sys.meta_path) == 1
    assert first.Qwen3DSparkForCausalLM.sample_sequential is hook.sample_sequential
    later = importlib.import_module("vllm.models.deepseek_v41.nvidia.dspark")
    assert later.DSparkDeepseekV4ForCausalLM.sample_sequential is hook.sample_sequential
    hook.register()
    assert later.DSparkDeepseekV4ForCausalLM.sample_sequential is hook.sample_sequential


def test_register_leaves_an_engines_own_method(hook: ModuleType, new_package: None) -> None:
    hook.register()
    kimi = importlib.import_module("vllm.models.kimi_k3.nvidia.dspark_mla")
    assert kimi.K3DSparkForCausalLM().sample_sequential() == "own"


def test_register_can_be_turned_off(
    hook: ModuleType, new_package: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DSPARK_KERNELS_DISABLE", "1")
    with caplog.at_level(logging.INFO, "vllm.dspark_kernels"):
        hook.register()
    assert "DSPARK_KERNELS_DISABLE is set" in caplog.text
    draft = importlib.import_module("vllm.model_executor.models.qwen3_dspark")
    assert not hasattr(draft.Qwen3DSparkForCausalLM, "sample_sequential")


def test_register_imports_neither_engine_nor_torch() -> None:
    """Processes that never draft must not pay for it, nor initialise CUDA before they fork."""
    import subprocess

    code = (
        "import sys; from dspark_kernels.engines.vllm import register; register(); "
        "print([name for name in ('torch', 'triton', 'cutlass', 'vllm') if name in sys.modules])"
    )
    root = Path(__file__).parents[2]
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=root, env={"PYTHONPATH": "generated"}
    )
    assert ran.stdout.strip() == "[]", ran.stderr


def test_the_package_announces_the_plugin() -> None:
    import tomllib

    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    target = project["entry-points"]["vllm.general_plugins"]["dspark_kernels"]
    module, function = target.split(":")
    assert callable(getattr(importlib.import_module(module), function))
