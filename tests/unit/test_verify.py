"""What `verify` asks of its workers, and what becomes evidence when the chain ran over ranks; no GPU needed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsparkgen import evidence, gpu, rank_timings, verify
from dsparkgen.verify import Asked, Finding, Task
from dsparkgen.workers import Ended

ROOT = Path(__file__).parents[2]
ASKED = Asked(batches=3, replays=5, seed=1, rows=(1, 8), tp=None, emulated=())


def over(world: int, *, emulated: bool, failure: str | None = None) -> Finding:
    return Finding("bitwise", ("chain",), {"batches": 3}, failure, world=world, emulated=emulated)


@pytest.fixture
def product() -> gpu.Product:
    return gpu.load_product(ROOT / "generated", "deepseek_v41")


def test_one_gpu_checks_noise_every_pair_of_dtypes_and_the_timeout(product: gpu.Product) -> None:
    tasks = verify._tasks(ROOT, ROOT / "generated", product, ASKED)
    assert {task.part for task in tasks} == {"noise", "timeout", "bf16/bf16", "bf16/fp32", "fp32/bf16", "fp32/fp32"}
    assert {(task.world, task.emulated, task.rows) for task in tasks} == {(1, False, (1, 8))}
    (task,) = verify._tasks(ROOT, ROOT / "generated", product, ASKED, together=True)
    assert task.part == "bf16/bf16+bf16/fp32+fp32/bf16+fp32/fp32+noise+timeout"  # the timeout costs the CUDA context
    assert verify._kernels(task) == ("noise", "chain", "fused", "step")


def test_ranks_are_checked_instead_of_one_gpu(product: gpu.Product) -> None:
    asked = Asked(3, 5, 1, None, tp=2, emulated=(4, 8))
    tasks = verify._tasks(ROOT, ROOT / "generated", product, asked)
    assert {(task.world, task.emulated) for task in tasks} == {(4, True), (8, True), (2, False)}
    assert [task.title for task in tasks if task.world == 8][0] == "bf16/bf16 over 8 emulated ranks"
    assert [verify._takes_all(task) for task in tasks] == [False] * 8 + [True]
    assert tasks[-1].part == "bf16/bf16+bf16/fp32+fp32/bf16+fp32/fp32"
    without = SimpleNamespace(has=lambda kernel: kernel != "chain", model="toy")
    assert verify._tasks(ROOT, ROOT, without, asked) == []  # type: ignore[arg-type]


def test_evidence_says_over_how_many_ranks(tmp_path: Path) -> None:
    product: Any = SimpleNamespace(digest=lambda kernel: "a" * 12, model="toy")
    findings = [
        over(2, emulated=False),
        over(4, emulated=True, failure="rank 3 differs"),
        over(8, emulated=True),
        Finding("bitwise", ("fused",), failure="beside the chain", world=8, emulated=True),
    ]
    entries = verify.verified_entries(findings, product, "sm_90a")
    assert [(e["kernel"], e.get("tp"), e.get("emulated")) for e in entries] == [("chain", 2, None), ("chain", 8, True)]
    verify._record(tmp_path, "h200", "sm_90a", product, "verify toy", [*findings, over(4, emulated=False)])
    places = {path.parent.name: evidence.load(path)["verified"] for path in tmp_path.glob("*/toy.json")}
    assert {place: [entry["tp"] for entry in own] for place, own in places.items()} == {"h200": [2, 8], "h200-x4": [4]}


def test_the_finding_of_the_rank_that_failed_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        [vars(over(2, emulated=False)) | {"kernels": ["chain"]}],
        [vars(over(2, emulated=False, failure="row 3 differs")) | {"kernels": ["chain"]}],
    ]
    monkeypatch.setattr(verify, "start_ranks", lambda module, task, world, seconds: [None] * world)
    monkeypatch.setattr(
        verify,
        "finish_together",
        lambda workers: [Ended(found, code) for found, code in zip(lines, (0, 1), strict=True)],
    )
    (finding,) = verify._run_task(Task("", "", "toy", "bf16/bf16", 1, 1, 1, world=2))
    assert (finding.failure, finding.world) == ("rank 1: row 3 differs", 2)


def test_models_share_the_processes_and_are_recorded_one_by_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = gpu.generated_models(ROOT / "generated", ())[:2]
    ran: list[Task] = []

    def run(task: Task) -> list[Finding]:
        ran.append(task)
        failure = "row 1 differs" if task.model == models[1] else None
        return [Finding("bitwise", (kernel,), {"batches": 3}, failure) for kernel in ("noise", "fused")]

    monkeypatch.setattr(verify, "need_cuda", lambda: None)
    monkeypatch.setattr(verify, "this_device", lambda product: "h200")
    monkeypatch.setattr(verify, "_run_task", run)
    assert verify.run_verify(ROOT, models, results=tmp_path, jobs=2, record=True) == 1
    assert sorted(task.model for task in ran) == sorted(models) and all("+" in task.part for task in ran)
    assert [path.stem for path in tmp_path.glob("h200/*.json")] == [models[0]]
    assert capsys.readouterr().out.count("bitwise") == 4
    ran.clear()
    assert verify.run_verify(ROOT, models[:1], results=tmp_path, jobs=16) == 0
    assert len(ran) > 1 and all("+" not in task.part for task in ran)


def test_a_machine_with_too_few_gpus_cannot_tell(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
    one = SimpleNamespace(cuda=SimpleNamespace(device_count=lambda: 1))
    monkeypatch.setattr(verify, "need_cuda", lambda: one)
    monkeypatch.setattr(rank_timings, "need_cuda", lambda: one)
    assert verify.run_verify(ROOT, ["deepseek_v41"], results=tmp_path, tp=2, record=True) == 3
    assert "--tp 2: expected as many GPUs, got 1; --emulated 2 runs the ranks on one GPU" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_emulated_ranks_have_outputs_of_their_own_laid_out_as_the_case() -> None:
    torch = pytest.importorskip("torch")
    checks = gpu.harness(ROOT, "tests.harness.checks")
    cases = gpu.harness(ROOT, "tests.harness.cases")
    case = cases.exact_case(37, 64, 3, 2, seed=1, layout="odd")
    drawn = checks.stacked(case, 3)
    assert drawn.logits_cache.shape == (3, *case.logits_cache.shape) and drawn.draft_tokens.shape == (
        3,
        *case.draft_tokens.shape,
    )
    assert drawn.logits_cache.stride()[1:] == case.logits_cache.stride()
    assert bool((drawn.logits_cache == cases.POISON_LOGIT).all())
    drawn.logits_cache[1].zero_()
    assert bool(
        (drawn.logits_cache[0] == cases.POISON_LOGIT).all() & (drawn.logits_cache[2] == cases.POISON_LOGIT).all()
    )
    assert torch.equal(drawn.base_logits, case.base_logits)


class FakeChain:
    """Draws token `rank` everywhere on each emulated rank, but for the rank that goes wrong."""

    def __init__(self, wrong: int | None) -> None:
        self.wrong = wrong

    def supports(self, rows: int, base_logits: Any) -> bool:
        return True

    def fork_noise(self, *arguments: Any) -> None: ...

    def sample(self, *arguments: Any, query_per_row: int) -> None:
        cache, tokens = arguments[-2:]
        for rank in range(len(tokens)):
            tokens[rank].fill_(7 if rank != self.wrong else 8)
            cache[rank].zero_()


@pytest.mark.parametrize("wrong", [None, 0, 2])
def test_every_emulated_rank_is_compared(wrong: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    checks = gpu.harness(ROOT, "tests.harness.checks")
    cases = gpu.harness(ROOT, "tests.harness.cases")
    case = cases.exact_case(37, 64, 3, 2, seed=1)
    right = torch.full_like(case.draft_tokens, 7), torch.zeros_like(case.logits_cache)
    monkeypatch.setattr(checks, "oracle", lambda case: right)
    monkeypatch.setattr(checks, "why_unequal", lambda case, tokens, cache: f"token {int(tokens[0, 0])}")
    subject = checks.EmulatedSubject.of(checks.Subject(None, "bf16", "bf16", case.device, ()), 3)
    subject.chain = FakeChain(wrong)
    checks.compare(subject, case, "toy")
    assert subject.failures == ({} if wrong is None else {"chain": "base bf16, cache bf16, 2 rows, toy: token 8"})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["verify", "--dtypes", "bf16,fp32"], "--dtypes: expected a list such as bf16/bf16,fp32/bf16 (got bf16,fp32)"),
        (["verify", "--emulated", "1"], "--emulated: expected numbers of ranks from 2 on, such as 4,8 (got 1)"),
        (["bench", "--emulated", "4,x"], "--emulated: expected positive numbers, such as 1,2 (got 4,x)"),
        (["bench", "--tp", "1"], "Invalid value for '--tp'"),
        (["verify", "--seconds", "0"], "Invalid value for '--seconds'"),
    ],
)
def test_options_over_ranks_are_checked(arguments: list[str], message: str) -> None:
    from typer.testing import CliRunner

    from dsparkgen.cli import app

    result = CliRunner().invoke(app, [*arguments, "--root", str(ROOT)])
    assert result.exit_code == 2 and message in " ".join(result.output.split())
