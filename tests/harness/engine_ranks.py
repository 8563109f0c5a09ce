"""The vLLM hook on several tensor-parallel ranks: a process each, with a GPU each or all on the CPU.

Every rank runs the engine's own loop with and without the hook on the same inputs, whole base logits and, with the hook, its LM
head's shard of them where the chain takes that; on GPUs also in a captured graph that is replayed with other inputs.
"""

from __future__ import annotations

import importlib
import os
import queue
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.multiprocessing

ROWS = (1, 3, 8, 12)
GRAPH_ROWS = (3, 8, 12)
REPLAYS = 10
MAX_REQS = 15
SECONDS = 200  # without an answer


class Task(NamedTuple):
    """What every rank runs."""

    world: int
    cuda: bool
    package: str  # of the generated code, importable from `path`
    model: str
    path: str
    files: str  # the engine's
    meeting: str  # a file that does not exist yet, on which the ranks meet
    scenario: str  # "draw"; what the last rank cannot do: "decline": a confidence head, "build" or "warm up" a sampler
    rows: tuple[int, ...] = ROWS


def run_ranks(task: Task) -> list[dict[str, Any]]:
    """What every rank found, by rank. Raises RuntimeError when one ends without an answer or in time."""
    context = torch.multiprocessing.get_context("spawn")
    answers: Any = context.Queue()
    workers = [context.Process(target=_rank, args=(task, rank, answers), daemon=True) for rank in range(task.world)]
    for worker in workers:
        worker.start()
    found: dict[int, dict[str, Any]] = {}
    try:
        while len(found) < task.world:
            rank, answer = answers.get(timeout=SECONDS)
            if "error" in answer:
                raise RuntimeError(f"rank {rank}: {answer['error']}")
            found[rank] = answer
    except queue.Empty:
        raise RuntimeError(
            f"expected answers of {task.world} ranks in {SECONDS} s, got those of {sorted(found)}"
        ) from None
    finally:
        for worker in workers:
            worker.join(10 if len(found) == task.world else 0)
            worker.kill()
    return [found[rank] for rank in range(task.world)]


def _rank(task: Task, rank: int, answers: Any) -> None:
    try:
        answers.put((rank, _run(task, rank)))
    except BaseException as error:
        answers.put((rank, {"error": f"{type(error).__name__}: {error}"}))
        raise


def _run(task: Task, rank: int) -> dict[str, Any]:
    import torch.distributed as dist

    from tests.harness.engine_wheel import loaded_engine

    sys.path.insert(0, task.path)
    device = torch.device("cuda", rank) if task.cuda else torch.device("cpu")
    if task.cuda:
        torch.cuda.set_device(device)
        os.environ.setdefault(
            "TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"
        )  # nothing here uses it, and torch binds it where it can
    dist.init_process_group("gloo", init_method=f"file://{task.meeting}", rank=rank, world_size=task.world)
    group = SimpleNamespace(world_size=task.world, rank_in_group=rank, cpu_group=dist.group.WORLD)
    with loaded_engine(Path(task.files), group=group) as engine, torch.inference_mode():
        answer = _compare(task, rank, device, engine)
    dist.barrier()
    dist.destroy_process_group()
    return answer


def _compare(task: Task, rank: int, device: torch.device, engine: Any) -> dict[str, Any]:
    from tests.harness.cases import exact_case, exact_weights
    from tests.harness.engine_stub import Draft, LmHead

    hook = importlib.import_module(f"{task.package}.engines.vllm")
    config = importlib.import_module(f"{task.package}.{task.model}.config")
    weights = exact_weights(config.VOCAB_SIZE, config.RANK_DIM, seed=7, device=device)
    serving: Any = None
    last = rank == task.world - 1
    loop = importlib.import_module(f"{task.package}.{task.model}").FusedLoop
    if last and task.scenario in ("build", "warm up"):
        setattr(loop, {"build": "__init__", "warm up": "warmup"}[task.scenario], _fail)
    equal: dict[int, bool] = {}
    replayed: dict[int, list[bool]] = {}
    shards = 0

    def case_of(rows: int, seed: int) -> Any:
        return exact_case(
            config.VOCAB_SIZE, config.RANK_DIM, config.NUM_STEPS, rows, seed=seed, device=device, weights=weights,
            max_reqs=MAX_REQS, padding_rows=rows // 3,
        )  # fmt: skip

    for rows in task.rows:
        case = case_of(rows, rows)
        want = Draft(engine, case).run()
        draft = Draft(engine, case, name="DSparkDeepseekV4ForCausalLM")
        draft.model.lm_head = LmHead(draft.model, rank, task.world)
        if task.scenario == "decline" and last:
            draft.speculator.use_confidence_head = True
        draft.give_hook(hook)
        if serving is None:
            serving = hook.serve(draft.model, draft.speculator)
        hook._serving[draft.model] = serving
        if isinstance(serving, hook.Declined):
            return {"reason": str(serving), "asked": draft.asked()}
        equal[rows] = _same(draft.run(), want)
        shards += draft.model.shard_calls
        if task.cuda and rows in GRAPH_ROWS:
            replayed[rows] = _replay(draft, [Draft(engine, case_of(rows, 100 + turn)) for turn in range(REPLAYS)])
    return {
        "equal": equal,
        "replayed": replayed,
        "served": dict(serving.sampler.served),
        "shards": shards,
        "declined": serving.sampler.declined,
    }


def _same(got: tuple[torch.Tensor, torch.Tensor], want: tuple[torch.Tensor, torch.Tensor]) -> bool:
    """Whether draft tokens and logits caches are equal to the bit."""
    from tests.harness.oracle import same_bits

    return torch.equal(got[0], want[0]) and same_bits(got[1], want[1])


def _replay(draft: Any, loops: list[Any]) -> list[bool]:
    """Capture a hooked draft's step; whether each replay, with another draft's inputs, draws what that one's loop draws."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        draft.run()
    found = []
    for loop in loops:
        draft.take_inputs(loop)
        graph.replay()
        found.append(_same((draft.speculator.draft_tokens, draft.speculator.draft_logits), loop.run()))
    return found


def _fail(*arguments: Any, **options: Any) -> None:
    raise RuntimeError("provoked")
