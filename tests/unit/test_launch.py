"""The launcher's logic without a GPU: checks, reasons, choice of plan and kernel, order of launches.

CUDA is replaced by a recorder: what is tested is which kernel would be launched with which arguments, and that every
argument that does not fit is refused with what was expected and given, before anything is launched.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from tests.harness import fake_gpu, fake_kernels  # noqa: E402
from tests.harness.fake_gpu import (  # noqa: E402
    DEVICES,
    H200,
    MAX_REQS,
    STREAM,
    N,
    R,
    Recorder,
    V,
    batch,
    make_chain,
    make_config,
    real_lines,
    weights,
)

from dspark_kernels._device import (  # noqa: E402
    chain_call,
    chain_launcher,
    chain_setup,
    chain_share,
    draft_launcher,
    host,
    kernel_store,
    plan_line,
)

DTYPE_BYTES = fake_gpu.DTYPE_BYTES


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    fake_gpu.install(recorder, monkeypatch.setattr)
    return recorder


@pytest.fixture
def sampler(gpu: Recorder, monkeypatch: pytest.MonkeyPatch) -> chain_launcher.ChainLauncher:
    kind = make_chain(gpu)
    monkeypatch.setattr(kind, "why_not", classmethod(lambda cls, *a, **k: None))
    return kind(**weights())


STATE = ("idx_mapping", "sample_pos", "temperature", "seeds")


# --- choice of the plan ---


def test_parts_of_equal_shape_are_told_apart_by_name() -> None:
    assert host.match_device(DEVICES, H200) == "h200"
    assert host.match_device(DEVICES, H200._replace(name="NVIDIA H100 80GB HBM3")) == "h100"
    assert host.match_device(DEVICES, H200._replace(name="NVIDIA H800")) == "h100"
    assert host.match_device(DEVICES, H200._replace(smem_per_block=101376)) is None


def test_no_plan_names_the_file_to_add() -> None:
    plans = real_lines(8)
    reason = host.why_no_plan(plans, DEVICES, H200._replace(sms=78), 1)
    assert reason is not None and "78 SMs" in reason and "specs/devices/" in reason
    assert "parallel.tp" in (host.why_no_plan(plans, DEVICES, H200, 2) or "")
    assert "b200, h100, h200, got 'h300'" in (host.why_no_plan(plans, DEVICES, H200, 1, "h300") or "")
    assert host.why_no_plan(plans, DEVICES, H200, 1) is None


def test_a_plan_larger_than_the_device_is_refused() -> None:
    plans = real_lines(8)
    assert "does not fit" in (host.why_no_plan(plans, DEVICES, H200._replace(sms=131), 1, "h200") or "")
    assert "does not fit" in (host.why_no_plan(plans, DEVICES, H200._replace(smem_per_block=232447), 1, "h200") or "")
    assert host.why_no_plan(plans, DEVICES, H200._replace(sms=144), 1, "h200") is None


def test_row_slots() -> None:
    assert [host.row_slots_for([8, 1, 4], rows) for rows in (1, 2, 4, 5, 8, 9)] == [1, 4, 4, 8, 8, None]


def test_vector_access_needs_every_row_start_aligned() -> None:
    storage = torch.zeros(4 * 64, dtype=torch.bfloat16)
    assert host.vector_ok(storage.as_strided((2, 2, 5), (128, 64, 1))) == 1
    assert host.vector_ok(storage.as_strided((2, 2, 5), (128, 60, 1))) == 0
    assert host.vector_ok(storage[1:].as_strided((2, 2, 5), (64, 64, 1))) == 0
    assert host.vector_ok(storage.as_strided((1, 2, 5), (3, 64, 1))) == 1  # a stride that is never taken


# --- reasons to decline ---


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"embed_weight": None}, "the Markov embedding is missing"),
        ({"head_weight": None}, "the Markov head is missing"),
        ({}, "expected a tensor on a CUDA device, got bf16 [42, 64]"),
    ],
)
def test_why_not_without_weights_on_a_gpu(gpu: Recorder, changes: dict[str, Any], expected: str) -> None:
    reason = make_chain(gpu).why_not(**(weights() | changes))
    assert reason is not None and expected in reason


@pytest.mark.parametrize(
    ("changes", "constants", "expected"),
    [
        ({"embed_weight": torch.zeros((V - 1, R), dtype=torch.bfloat16)}, {}, "bf16 [>= 40, 64]"),
        ({"head_weight": torch.zeros((V, R))}, {}, "head_weight: expected bf16 [>= 40, 64]"),
        ({"head_weight": torch.zeros((V, 2 * R), dtype=torch.bfloat16)[:, ::2]}, {}, "contiguous"),
        ({"max_reqs": 0}, {}, "max_reqs: expected an int of at least 1, got 0"),
        ({"cache_dtype": torch.float16}, {}, "cache_dtype: expected bf16 or fp32, got torch.float16"),
        ({}, {"CACHE_DTYPES": ("fp32",)}, "cache_dtype: expected fp32"),
        ({}, {"PLANS": {}}, "no plan for h200 at tensor-parallel size 1"),
        ({"device_name": "b200"}, {}, "does not fit NVIDIA H200"),
        ({}, {}, None),
    ],
)
def test_why_not(
    gpu: Recorder,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    constants: dict[str, Any],
    expected: str | None,
) -> None:
    monkeypatch.setattr(chain_setup, "device_type", lambda tensor: "cuda")
    reason = make_chain(gpu, **constants).why_not(**(weights() | changes))
    assert reason is expected if expected is None else reason is not None and expected in reason


def test_why_not_without_the_compiler(gpu: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_setup, "device_type", lambda tensor: "cuda")
    monkeypatch.setattr(kernel_store, "why_none", lambda recipes, device: f"{len(list(recipes))} are missing")
    assert "6 are missing" in (make_chain(gpu).why_not(**weights()) or "")


def test_a_sampler_that_cannot_be_built_raises_the_reason(gpu: Recorder) -> None:
    with pytest.raises(ValueError, match="toy: no chain sampler: the Markov head is missing"):
        make_chain(gpu)(**(weights() | {"head_weight": None}))


def test_batches_are_declined_by_shape_and_dtype_only(sampler: chain_launcher.ChainLauncher) -> None:
    assert sampler.max_rows == MAX_REQS  # of the 8 that the model allows, no more rows than request states
    assert [sampler.supports_batch(rows) for rows in (0, 1, 6, 7)] == [False, True, True, False]
    assert "1 to 6 request rows, got 7" in (sampler.why_not_call(7) or "")
    assert sampler.supports(2, torch.zeros((2, N, V)))
    assert not sampler.supports(2, torch.zeros((3, N, V)))
    assert "bf16 or fp32 [2, 3, >= 40]" in (sampler.why_not_call(2, torch.zeros((2, N, V), dtype=torch.float16)) or "")


def test_no_build_is_larger_than_a_call_can_be(gpu: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_setup, "device_type", lambda tensor: "cuda")
    for most, slots in ((1, [1]), (2, [1, 4]), (4, [1, 4]), (5, [1, 4, 8])):
        sampler = make_chain(gpu)(**(weights() | {"max_reqs": most}))
        gpu.compiled.clear()
        sampler.compile()
        assert [build[0] for build in gpu.compiled if build[1] == "bf16"] == slots and sampler.max_rows == most
    gpu.compiled.clear()
    make_chain(gpu, MAX_ROWS=4)(**weights()).compile()
    assert {build[0] for build in gpu.compiled} == {1, 4}


def test_plans_limit_the_rows(gpu: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = make_chain(gpu, PLANS=real_lines(4) | {("h200", 2, 8): real_lines(8)["h200", 1, 8]})
    monkeypatch.setattr(kind, "why_not", classmethod(lambda cls, *a, **k: None))
    assert kind(**weights()).max_rows == 4


# --- one call ---


def test_arguments_of_a_launch(gpu: Recorder, sampler: chain_launcher.ChainLauncher) -> None:
    call = batch(2, torch.float32)
    call["base_logits"] = torch.zeros((2, N, V + 1))[:, :, :V]
    sampler.sample(**call, query_per_row=2)
    assert [event[0] for event in gpu.events] == ["draw", "chain"]
    assert gpu.events[0] == ("draw", 2 * N, V)
    _, slots, values = gpu.events[1]
    assert slots == 4 and gpu.compiled == [(4, "fp32", "bf16")]
    assert values["base"] == call["base_logits"].data_ptr()
    assert (values["base_row_stride"], values["base_pos_stride"]) == (N * (V + 1), V + 1)
    assert (values["cache_req_stride"], values["cache_pos_stride"]) == (N * (V + 8), V + 8)
    assert (values["base_vector"], values["cache_vector"]) == (0, 1)
    assert (values["rows"], values["query_per_row"], values["token_stride"]) == (2, 2, N)
    assert (values["rank"], values["shard_width"], values["ctas"]) == (0, V, 132)
    assert values["stream"] == STREAM
    assert values["timeout_ns"] == 30_000 * 1_000_000
    for name in ("input_ids", "idx_mapping", "temperature", "draft_tokens"):
        assert values[name] == call[name].data_ptr(), name


def test_two_variants_never_share_their_records(gpu: Recorder, sampler: chain_launcher.ChainLauncher) -> None:
    sampler.sample(**batch(1))
    sampler.sample(**batch(4))
    sampler.sample(**batch(1))
    first, second, third = (event[2] for event in gpu.events if event[0] == "chain")
    assert first["records"] != second["records"] and first["epoch"] != second["epoch"]
    assert (first["records"], first["epoch"]) == (third["records"], third["epoch"])
    assert gpu.compiled == [(1, "bf16", "bf16"), (4, "bf16", "bf16")]


MISFITS = {
    "base_logits dtype": ("base_logits", torch.zeros((2, N, V), dtype=torch.float16), TypeError, "got fp16"),
    "base_logits steps": ("base_logits", torch.zeros((2, N + 1, V)), ValueError, "got fp32 [2, 4, 40]"),
    "base_logits narrow": ("base_logits", torch.zeros((2, N, V - 1)), ValueError, "[2, 3, >= 40]"),
    "base_logits stride": ("base_logits", torch.zeros((2, N, 2 * V))[:, :, ::2], ValueError, "strides [240, 80, 2]"),
    "base_logits rows": ("base_logits", torch.zeros((7, N, V)), ValueError, "from 1 to 6, got 7"),
    "base_logits rank": ("base_logits", torch.zeros((2, V)), ValueError, "got fp32 [2, 40]"),
    "base_logits type": ("base_logits", [0.0], TypeError, "got list"),
    "input_ids dtype": ("input_ids", torch.zeros(6, dtype=torch.int64), TypeError, "expected int32"),
    "input_ids short": ("input_ids", torch.zeros(3, dtype=torch.int32), ValueError, "[>= 4]"),
    "input_ids stride": ("input_ids", torch.zeros(12, dtype=torch.int32)[::2], ValueError, "contiguous"),
    "idx_mapping short": ("idx_mapping", torch.zeros(5, dtype=torch.int64), ValueError, "[>= 6]"),
    "idx_mapping dtype": ("idx_mapping", torch.zeros(6, dtype=torch.int32), TypeError, "got int32"),
    "sample_pos device": ("sample_pos", torch.zeros(6, dtype=torch.int64, device="meta"), ValueError, "on meta"),
    "temperature dtype": ("temperature", torch.zeros(6, dtype=torch.float64), TypeError, "got fp64"),
    "temperature short": ("temperature", torch.zeros(5), ValueError, "[>= 6]"),
    "seeds dtype": ("seeds", torch.zeros(6), TypeError, "expected int64"),
    "cache dtype": ("logits_cache", torch.zeros((6, N, V)), TypeError, "expected bf16"),
    "cache requests": ("logits_cache", torch.zeros((5, N, V), dtype=torch.bfloat16), ValueError, "[>= 6, 3, >= 40]"),
    "draft_tokens rows": ("draft_tokens", torch.zeros((1, N), dtype=torch.int64), ValueError, "[>= 2, 3]"),
    "draft_tokens dtype": ("draft_tokens", torch.zeros((2, N), dtype=torch.int32), TypeError, "expected int64"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_every_argument_is_checked_before_anything_is_launched(
    gpu: Recorder, sampler: chain_launcher.ChainLauncher, case: str
) -> None:
    name, value, error, text = MISFITS[case]
    with pytest.raises(error) as caught:
        sampler.sample(**(batch(2) | {name: value}))
    assert name in str(caught.value) and "expected" in str(caught.value) and text in str(caught.value)
    assert gpu.events == []


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("entries", [2**31 - 1, 2**31])
def test_the_span_of_the_base_logits_is_bounded(
    gpu: Recorder, sampler: chain_launcher.ChainLauncher, rows: int, entries: int
) -> None:
    """The kernel counts their entries in 32 bits: rows of 2, positions of 3, strides that end at `entries`."""
    if rows == 1:
        strides = (2**40, (entries - V) // 2, 1)  # one row: its stride is not used
        entries = 2 * strides[1] + V
    else:
        strides = (entries - V - 2 * V, V, 1)
    base = torch.empty_strided((rows, N, V), strides, dtype=torch.bfloat16, device="meta")
    config = make_config()
    expected = chain_call.Expectations(
        config,
        base.device,
        max_rows=2,
        max_reqs=MAX_REQS,
        cache_dtype=torch.bfloat16,
        share=chain_share.share_of(config, 1, 0),
    )
    found = expected.base_logits_misfit(rows, base)
    if entries < 2**31:
        assert found is None
    else:
        assert found is not None and found.error is ValueError
        assert (
            f"base_logits: expected a span of fewer than 2147483648 entries from the first to the last, got {entries}"
            in found.message
        )
        with pytest.raises(ValueError, match=f"got {entries}"):
            expected.check(rows, base, *[None] * 7, 1)  # type: ignore[arg-type]


def test_torch_has_no_negative_strides() -> None:
    """The kernel's offsets are unsigned."""
    with pytest.raises(RuntimeError, match="Negative strides are not supported"):
        torch.zeros(4).as_strided((2, 2), (-2, 1), 2)


def test_noise_beyond_the_kernels_offsets_is_declined(gpu: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    assert chain_share.why_noise_too_large(2**24 - 1, 127) is None
    assert "expected fewer than 2147483648 entries, got 2147483648" in (
        chain_share.why_noise_too_large(2**24 - 1, 128) or ""  # the pitch is a multiple of 4
    )
    monkeypatch.setattr(chain_setup, "device_type", lambda tensor: "cuda")
    large = {"VOCAB_SIZE": 2**28, "DRAFT_VOCAB_SIZE": 2**28, "DRAWN_COLUMNS": 2**28}
    weight = torch.empty((2**28, R), dtype=torch.bfloat16, device="meta")
    given = weights() | {"embed_weight": weight, "head_weight": weight}
    assert "noise of 18 samples" in (make_chain(gpu, **large).why_not(**given) or "")
    assert make_chain(gpu, **large).why_not(**(given | {"max_reqs": 2})) is None


@pytest.mark.parametrize("rows", [1, 3])
def test_the_place_of_the_last_anchor_is_bounded(
    gpu: Recorder, sampler: chain_launcher.ChainLauncher, rows: int
) -> None:
    most = (2**31 - 1) // max(rows - 1, 1)
    with pytest.raises(ValueError, match=f"query_per_row: expected an int from 1 to {most}, got {most + 1}"):
        sampler.sample(**batch(rows), query_per_row=most + 1)
    assert gpu.events == []


def test_another_current_device_is_refused(
    gpu: Recorder, sampler: chain_launcher.ChainLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chain_setup.torch.cuda, "current_device", lambda: 3)
    with pytest.raises(ValueError, match="current CUDA device: expected None, this sampler's, got 3"):
        sampler.sample(**batch(2))
    assert gpu.events == []


@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (-1, ValueError), (1.0, TypeError), (True, TypeError)])
def test_query_per_row(
    gpu: Recorder, sampler: chain_launcher.ChainLauncher, value: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match="query_per_row: expected an int"):
        sampler.sample(**batch(2), query_per_row=value)
    assert gpu.events == []


@pytest.mark.parametrize("value", [-1, 0.5, True])
def test_timeout_ms(gpu: Recorder, monkeypatch: pytest.MonkeyPatch, value: Any) -> None:
    monkeypatch.setattr(chain_setup, "device_type", lambda tensor: "cuda")
    with pytest.raises(ValueError, match=f"timeout_ms: expected an int of at least 0, got {value}"):
        make_chain(gpu)(**weights(), timeout_ms=value)


def test_an_unbounded_wait_is_logged(
    sampler: chain_launcher.ChainLauncher, caplog: pytest.LogCaptureFixture, gpu: Recorder
) -> None:
    with caplog.at_level(logging.WARNING):
        type(sampler)(**weights(), timeout_ms=0).sample(**batch(1))
    assert len([r for r in caplog.records if "timeout_ms=0" in r.message]) == 1
    assert gpu.events[-1][2]["timeout_ns"] == 0


# --- noise ---


def test_forked_noise_is_joined_once_and_used_once(gpu: Recorder, sampler: chain_launcher.ChainLauncher) -> None:
    call = batch(2)
    state = [call[name] for name in STATE]
    sampler.fork_noise(*state, 2)
    sampler.join_noise()
    sampler.sample(**call)
    sampler.sample(**call)
    assert [event[0] for event in gpu.events] == ["fork", "join", "chain", "draw", "chain"]
    assert gpu.events[0] == ("fork", 2 * N, V)
    sampler.fork_noise(*state, 2)
    sampler.sample(**call)
    assert [event[0] for event in gpu.events[5:]] == ["fork", "join", "chain"]


def test_noise_of_another_batch_is_refused(gpu: Recorder, sampler: chain_launcher.ChainLauncher) -> None:
    call = batch(2)
    sampler.fork_noise(*[call[name] for name in STATE], 1)
    with pytest.raises(RuntimeError, match="expected the 1 request rows that fork_noise drew for, got 2"):
        sampler.sample(**call)
    assert "chain" not in [event[0] for event in gpu.events]
    sampler.sample(**call)
    assert [event[0] for event in gpu.events[-2:]] == ["draw", "chain"]


def test_a_refused_call_leaves_no_stale_noise(gpu: Recorder, sampler: chain_launcher.ChainLauncher) -> None:
    call = batch(2)
    sampler.fork_noise(*[call[name] for name in STATE], 2)
    with pytest.raises(TypeError):
        sampler.sample(**(call | {"seeds": torch.zeros(6)}))
    assert not sampler.noise_pending
    sampler.sample(**call)
    assert [event[0] for event in gpu.events] == ["fork", "join", "draw", "chain"]


def test_joining_without_a_fork_is_refused(sampler: chain_launcher.ChainLauncher) -> None:
    with pytest.raises(RuntimeError, match="expected a fork_noise before it"):
        sampler.join_noise()


@pytest.mark.parametrize("rows", [0, 7])
def test_fork_noise_checks_the_row_count(sampler: chain_launcher.ChainLauncher, rows: int) -> None:
    call = batch(2)
    with pytest.raises(ValueError, match=f"num_reqs: expected an int from 1 to 6, got {rows}"):
        sampler.fork_noise(*[call[name] for name in STATE], rows)


# --- compiling ---


def test_warmup_compiles_everything_a_call_can_need(gpu: Recorder, sampler: chain_launcher.ChainLauncher) -> None:
    sampler.warmup()
    variants = [(slots, base, "bf16") for base in ("bf16", "fp32") for slots in (1, 4, 8)]
    assert sorted(gpu.compiled) == sorted(variants)
    assert sorted(event[1] for event in gpu.events if event[0] == "chain") == [1, 1, 4, 4, 8, 8]
    for rows in range(1, 7):
        for dtype in (torch.bfloat16, torch.float32):
            sampler.sample(**batch(rows, dtype))
    sampler.warmup()
    assert len(gpu.compiled) == len(variants)


def test_nothing_compiles_under_capture(
    gpu: Recorder, sampler: chain_launcher.ChainLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler.sample(**batch(1))
    monkeypatch.setattr(chain_setup.torch.cuda, "is_current_stream_capturing", lambda: True)
    sampler.sample(**batch(1))
    with pytest.raises(RuntimeError, match=r"8 row slots and bf16 base logits is not compiled; call warmup\(\)"):
        sampler.sample(**batch(5))
    assert gpu.compiled == [(1, "bf16", "bf16")]


# --- programmatic dependent launch ---

SM = host.SmFacts(shared=233472, registers=65536, threads=2048)  # of an H200


@pytest.mark.parametrize(
    ("facts", "sm", "shape", "expected"),
    [
        (H200, SM, {}, None),
        (H200._replace(sms=131), SM, {}, "expected at least 132 SMs, one per CTA, got NVIDIA H200"),
        (H200._replace(smem_per_block=232447), SM, {}, "232448 bytes of shared memory, and 1024 that CUDA keeps"),
        (H200, SM._replace(shared=233471), {}, "got 233471 bytes, 232448 per block"),
        (H200, SM._replace(registers=64511), {}, "384 threads of 168 registers on an SM"),
        (H200, SM._replace(registers=64512), {}, None),
        (H200, SM._replace(threads=383), {}, "got 383 threads"),
        (H200, SM, {"threads": 256}, None),
        (H200, SM._replace(registers=65535), {"threads": 256}, "256 threads of 256 registers"),
    ],
)
def test_residency_of_a_grid(
    facts: host.DeviceFacts, sm: host.SmFacts, shape: dict[str, int], expected: str | None
) -> None:
    reason = host.why_not_resident(facts, sm, **({"ctas": 132, "threads": 384, "shared": 232448} | shape))
    assert reason is expected if expected is None else reason is not None and expected in reason


def test_pdl_needs_every_build_to_be_resident(gpu: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_setup, "device_type", lambda tensor: "cuda")
    plans = real_lines(1, 8)
    most = {base: plan_line.shared_layout(plans["h200", 1, 8], R, N, size).total for base, size in DTYPE_BYTES}
    assert most["bf16"] < most["fp32"]
    kind = make_chain(gpu, PLANS=plans)
    room = SM._replace(shared=most["fp32"] + 1024)
    monkeypatch.setattr(host, "read_sm", lambda device: room)
    assert kind.why_not(**weights(), pdl=True) is None
    room = room._replace(shared=room.shared - 1)
    reason = kind.why_not(**weights(), pdl=True)
    assert reason is not None and reason.startswith("pdl: the plan for 8 row slots: expected a CTA's")
    assert str(most["fp32"]) in reason
    assert kind.why_not(**weights()) is None  # a cooperative launch is refused by the driver where it does not fit
    assert make_chain(gpu, PLANS=plans, BASE_DTYPES=("bf16",)).why_not(**weights(), pdl=True) is None
    with pytest.raises(ValueError, match="toy: no chain sampler: pdl: the plan for 8 row slots"):
        kind(**weights(), pdl=True)


@pytest.mark.parametrize("pdl", [1, None, "yes"])
def test_pdl_is_a_bool(gpu: Recorder, monkeypatch: pytest.MonkeyPatch, pdl: Any) -> None:
    monkeypatch.setattr(chain_setup, "device_type", lambda tensor: "cuda")
    assert make_chain(gpu).why_not(**weights(), pdl=pdl) == f"pdl: expected a bool, got {pdl!r}"


@pytest.mark.parametrize("blocks", [0, 1])
def test_the_driver_has_the_last_word_on_a_programmatic_build(
    gpu: Recorder, monkeypatch: pytest.MonkeyPatch, blocks: int
) -> None:
    kind = make_chain(gpu, PLANS=real_lines(1, 8))
    monkeypatch.setattr(kind, "why_not", classmethod(lambda cls, *a, **k: None))
    asked: list[fake_kernels.FakeKernel] = []

    def blocks_per_sm(kernel: fake_kernels.FakeKernel) -> int:
        asked.append(kernel)
        return blocks

    monkeypatch.setattr(fake_kernels.FakeKernel, "blocks_per_sm", blocks_per_sm)
    sampler = kind(**weights(), pdl=True)
    if blocks == 0:
        with pytest.raises(RuntimeError, match="8 row slots and bf16 base logits: expected one CTA on an SM"):
            sampler.sample(**batch(2))
        assert gpu.events == []
    else:
        sampler.sample(**batch(2))
        assert [event[0] for event in gpu.events] == ["draw", "chain"]
    assert len(asked) == 1 and gpu.pdl == [True]
    kind(**weights()).sample(**batch(2))
    assert len(asked) == 1 and gpu.pdl == [True, False]  # off by default, and then nothing is asked


def test_draft_sampler_passes_pdl_on(gpu: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = make_chain(gpu, PLANS=real_lines(1, 8))
    asked: list[Any] = []

    def why_not(cls: Any, *weights: Any, pdl: bool, **options: Any) -> None:
        asked.append(pdl)

    monkeypatch.setattr(kind, "why_not", classmethod(why_not))
    assert make_draft(kind, pdl=True).chain.pdl is True  # type: ignore[union-attr]
    assert make_draft(kind).chain.pdl is False  # type: ignore[union-attr]
    assert asked == [True, False]


# --- bounded waits ---


def set_report(sampler: chain_launcher.ChainLauncher, words: list[int]) -> None:
    (ctypes.c_int32 * len(words)).from_address(sampler._report.address)[:] = words


def test_a_reported_timeout_is_raised_with_its_place(gpu: Recorder, sampler: chain_launcher.ChainLauncher) -> None:
    sampler.sample(**batch(1))
    sampler.raise_if_failed()
    set_report(sampler, [1, 0, 2, 4, 131, 7, 250, 9])
    for call in (sampler.raise_if_failed, sampler.synchronize, lambda: sampler.sample(**batch(1))):
        with pytest.raises(host.ChainTimeoutError) as caught:
            call()
        error = caught.value
        assert (error.rank, error.row, error.position, error.what) == (0, 2, 4, "grid barrier")
        assert (error.peer, error.cta, error.timeout_ms, error.epoch) == (131, 7, 250, 9)
        assert "rank 0, row 2, position 4" in str(error) and "CTA 131" in str(error)
        assert "250 ms" in str(error) and "CUDA context is lost" in str(error)
    assert len([event for event in gpu.events if event[0] == "chain"]) == 1


def test_a_wait_for_filled_rows_counts_the_ctas_that_are_missing(
    gpu: Recorder, sampler: chain_launcher.ChainLauncher
) -> None:
    sampler.sample(**batch(1))
    set_report(sampler, [4, 1, 0, 0, 3, 7, 250, 9])
    with pytest.raises(host.ChainTimeoutError, match="CTA 7 waited at the filled cache rows for 3 CTAs") as caught:
        sampler.synchronize()
    assert (caught.value.rank, caught.value.what, caught.value.peer) == (1, "filled cache rows", 3)


def test_a_rank_whose_logits_do_not_come_is_named(sampler: chain_launcher.ChainLauncher) -> None:
    set_report(sampler, [5, 1, 2, 3, 5, 7, 100, 2])
    with pytest.raises(
        host.ChainTimeoutError, match="row 2, position 3: CTA 7 waited at the logits for rank 5"
    ) as caught:
        sampler.raise_if_failed()
    assert (caught.value.what, caught.value.peer) == ("logits", 5)


def test_a_failing_launch_raises_the_report_if_there_is_one(
    gpu: Recorder, sampler: chain_launcher.ChainLauncher
) -> None:
    sampler.sample(**batch(1))
    gpu.failure = RuntimeError("CUDA_ERROR_LAUNCH_FAILED")
    with pytest.raises(RuntimeError, match="CUDA_ERROR_LAUNCH_FAILED"):
        sampler.sample(**batch(1))
    original = sampler._noise.provide

    def fail_later(*arguments: Any) -> None:
        original(*arguments)
        set_report(sampler, [2, 1, 0, 3, 5, 7, 100, 2])

    sampler._noise.provide = fail_later  # type: ignore[method-assign]  # the report arrives between the first look and the launch
    with pytest.raises(host.ChainTimeoutError, match="peer rank for rank 5"):
        sampler.sample(**batch(1))


@pytest.mark.parametrize(
    ("word", "what"), [(0, "launch count"), (1, "rows"), (2, "batch shape"), (3, "unknown word 3")]
)
def test_ranks_that_differ_are_named(
    gpu: Recorder, sampler: chain_launcher.ChainLauncher, word: int, what: str
) -> None:
    sampler.sample(**batch(1))
    set_report(sampler, [3, 1, word, 0, 5, 0, 250, 9, 4, 3])
    with pytest.raises(host.RanksDifferError, match=f"{what}: expected 4, as on rank 1, got 3 on rank 5") as caught:
        sampler.synchronize()
    error = caught.value
    assert (error.rank, error.peer, error.what, error.expected, error.given, error.epoch) == (1, 5, what, 4, 3, 9)
    assert isinstance(error, host.ChainError) and "CUDA context is lost" in str(error)


class Memory:
    """Stands for memory whose destructor needs the CUDA context."""


@pytest.mark.parametrize("trapped", [True, False])
def test_memory_of_the_ranks_outlives_a_trap(trapped: bool) -> None:
    report = host.TimeoutReport(pinned=False)
    memory = Memory()
    alive = weakref.ref(memory)
    report.keep_after_trap(memory)
    if trapped:
        report._words[0] = 2
        for _ in range(2):
            with pytest.raises(host.ChainTimeoutError):
                report.raise_if_set()
    del memory, report
    gc.collect()
    assert (alive() is not None) == trapped


# --- models that draft greedily, or from a reduced vocabulary ---


def build(gpu: Recorder, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], **config: Any) -> Any:
    monkeypatch.setattr(chain_setup, "device_type", lambda tensor: "cuda")
    return make_chain(gpu, **config)(**(weights() | options))


def test_greedy_drafts_have_no_cache_and_draw_no_noise(gpu: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = build(gpu, monkeypatch, {"cache_dtype": None}, CACHE_DTYPES=())
    call = batch(2) | {"logits_cache": None}
    sampler.fork_noise(*[call[name] for name in STATE], 2)
    sampler.sample(**call)
    sampler.sample(**call)
    assert [event[0] for event in gpu.events] == ["chain", "chain"]
    launch = gpu.events[0][2]
    for name in ("cache", "cache_req_stride", "cache_pos_stride", "cache_vector", "cache_rank_stride"):
        assert launch[name] == 0, name
    assert gpu.compiled == [(4, "bf16", None)]
    with pytest.raises(ValueError, match="logits_cache: expected None for greedy drafts, got bf16"):
        sampler.sample(**batch(2))
    with pytest.raises(ValueError, match=r"cache_dtype: expected None, got torch.bfloat16"):
        build(gpu, monkeypatch, {}, CACHE_DTYPES=())
    sampler.warmup()


def test_a_reduced_vocabulary_hands_its_tables_on(gpu: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    d2t = torch.arange(V)  # target id of draft id v: 2 v
    config = {"VOCAB_SIZE": 2 * V, "SAMPLING_LIMIT": 2 * V, "D2T": True}
    embed = torch.zeros((2 * V, R), dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"d2t: expected int64 \[40\]"):
        build(gpu, monkeypatch, {"embed_weight": embed}, **config)
    sampler = build(gpu, monkeypatch, {"embed_weight": embed, "d2t": d2t}, **config)
    cache = torch.zeros((MAX_REQS, N, 2 * V), dtype=torch.bfloat16)
    sampler.sample(**(batch(2) | {"logits_cache": cache}))
    launch = gpu.events[-1][2]
    for name, length, expected in (("target_ids", V, range(0, 2 * V, 2)), ("draft_ids", 2 * V, None)):
        table = list((ctypes.c_int32 * length).from_address(launch[name]))
        assert table == (
            list(expected) if expected is not None else [t // 2 if t % 2 == 0 else -1 for t in range(2 * V)]
        )
    assert [table.tolist() for table in gpu.tables] == [list(range(0, 2 * V, 2))] * 2  # the side stream, and this draw


def test_noise_can_be_drawn_alone(gpu: Recorder, sampler: chain_launcher.ChainLauncher) -> None:
    call = batch(2)
    state = [call[name] for name in STATE]
    sampler.fork_noise(*state, 1)
    sampler.draw_noise(*state, 2)
    assert [event[:2] for event in gpu.events] == [("fork", N), ("join",), ("draw", 2 * N)]
    assert not sampler.noise_pending
    with pytest.raises(ValueError, match="num_reqs: expected an int from 1 to 6, got 7"):
        sampler.draw_noise(*state, 7)


# --- chain or fused ---


class FakeFused:
    def __init__(self, embed_weight: Any, head_weight: Any, *, max_reqs: int) -> None:
        self.calls: list[int] = []
        self.warm: Any = None

    def warmup(self, *, cache_dtype: Any) -> None:
        self.warm = cache_dtype

    def sample(self, base_logits: Any, *arguments: Any, query_per_row: int) -> None:
        assert len(arguments) == 7
        self.calls.append(query_per_row)


def make_draft(chain: type[chain_launcher.ChainLauncher], **options: Any) -> draft_launcher.DraftLauncher:
    class Toy(draft_launcher.DraftLauncher):
        config = make_config()
        chain_sampler = chain
        fused_loop = FakeFused

    return Toy(**weights(), **options)


def test_draft_sampler_on_the_cpu_takes_the_fused_loop_and_says_why(gpu: Recorder) -> None:
    draft = make_draft(make_chain(gpu))
    assert draft.chain is None
    name, reason = draft.path(2)
    assert name == "fused" and "CUDA device" in reason
    call = batch(2)
    draft.fork_noise(*[call[name] for name in STATE], 2)
    draft.join_noise()
    draft.sample(**call)
    draft.warmup()
    draft.raise_if_failed()
    assert draft.fused.calls == [N] and draft.fused.warm == torch.bfloat16 and gpu.events == []


def test_draft_sampler_takes_the_chain_where_it_fits(
    gpu: Recorder, sampler: chain_launcher.ChainLauncher, caplog: pytest.LogCaptureFixture
) -> None:
    draft = make_draft(type(sampler))
    with caplog.at_level(logging.INFO):
        for rows in (1, 6, 7, 7):
            draft.sample(**batch(rows), query_per_row=1)
    assert [event[1] for event in gpu.events if event[0] == "chain"] == [1, 8]
    assert draft.fused.calls == [1, 1]
    assert draft.path(7)[0] == "fused" and "got 7" in draft.path(7)[1]
    assert len([r for r in caplog.records if "7 rows: fused" in r.message]) == 1


def test_a_batch_that_changes_its_path_drops_its_forked_noise(
    gpu: Recorder, sampler: chain_launcher.ChainLauncher
) -> None:
    draft = make_draft(type(sampler))
    call = batch(2, torch.float16)
    draft.fork_noise(*[call[name] for name in STATE], 2)
    draft.sample(**call)  # fp16 base logits: not the chain's
    assert [event[0] for event in gpu.events] == ["fork", "join"] and draft.fused.calls == [N]
    assert draft.chain is not None and not draft.chain.noise_pending
