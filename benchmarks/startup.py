"""Time from importing the kernels to the first draw and to a warm sampler, and what a call costs the host outside graphs.

    python -m benchmarks.startup MODEL [--max-reqs 64] [--rows 1,16]

One process, one way to come by kernels, which follows from the environment: an installed pack, else the disk cache
(DSPARK_KERNELS_CACHE), else the compiler. Prints one JSON object, which says which it was. serve_from_pack.py compares them.

Importing torch and making its CUDA context come before all that is timed: they are the same in every way.
"""

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

LAUNCHES = 200


def measure(model: str, max_reqs: int, rows: Sequence[int]) -> dict[str, Any]:
    """Start a model's DraftSampler as an engine does, for batches of up to `max_reqs` requests.

    Returns:
        first_draw_s: from importing the package to the end of the first draw, of the first row count.
        warm_s: to a sampler that compiles and loads nothing any more, for all row counts.
        origins: how many of the kernels of chain and step came from where.
        calls: by row count, the kernel that draws it and the host's microseconds for one call on an idle GPU, the noise
            kernel's launch included.
        launch_us: of those, the chain kernel's launch alone; without a chain None.
    """
    import torch

    device = torch.device("cuda", torch.cuda.current_device())
    torch.zeros(1, device=device)
    started = time.perf_counter()
    from importlib import import_module

    from dspark_kernels import load

    config = import_module(f"dspark_kernels.{model}.config")
    sampler_type = load(model).DraftSampler
    imported = time.perf_counter()
    from tests.harness.cases import exact_case, exact_weights

    weights = exact_weights(config.VOCAB_SIZE, config.RANK_DIM, seed=1, device=device)
    shape = (config.VOCAB_SIZE, config.RANK_DIM, config.NUM_STEPS)
    cases = [exact_case(*shape, n, seed=n, device=device, weights=weights, max_reqs=max_reqs) for n in rows]
    torch.cuda.synchronize()
    prepared = time.perf_counter()
    sampler = sampler_type(*weights, max_reqs=max_reqs, cache_dtype=torch.bfloat16)
    sampler.sample(*cases[0].call_arguments, query_per_row=cases[0].query_per_row)
    torch.cuda.synchronize()
    drawn = time.perf_counter()
    sampler.warmup()
    warm = time.perf_counter()
    calls = {
        str(case.rows): {
            "kernel": sampler.path(case.rows, case.base_logits)[0],
            "us": _host_us(partial(sampler.sample, *case.call_arguments, query_per_row=case.query_per_row)),
        }
        for case in cases
    }
    return {
        "model": model,
        "max_reqs": max_reqs,
        "gpu": torch.cuda.get_device_name(device),
        "origins": dict(sorted(Counter(kernel.origin for kernel in _kernels(sampler)).items())),
        "first_draw_s": round(imported - started + drawn - prepared, 3),
        "warm_s": round(imported - started + warm - prepared, 3),
        "calls": calls,
        "launch_us": _launch_us(sampler.chain, cases[0]),
    }


def _kernels(sampler: Any) -> list[Any]:
    """The loaded chain and step kernels of a DraftSampler."""
    chain = [] if sampler.chain is None else [variant.kernel for variant in sampler.chain._variants.values()]
    return chain + ([] if sampler.step is None else list(sampler.step._kernels.values()))


def _launch_us(chain: Any, case: Any) -> float | None:
    if chain is None or chain.why_not_call(case.rows, case.base_logits) is not None:
        return None
    variant, arguments = chain.prepare(case.rows, *case.call_arguments, case.query_per_row)
    return _host_us(lambda: chain.launch(variant, arguments))


def _host_us(call: Callable[[], None]) -> float:
    """Median of the host's time for one call on an idle GPU, in microseconds."""
    import torch

    taken = []
    for _ in range(LAUNCHES):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begun)
    torch.cuda.synchronize()
    return round(statistics.median(taken) * 1e6, 1)


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--max-reqs", type=int, default=64)
    parser.add_argument("--rows", default="1,16", help="row counts, by commas; each at most --max-reqs")
    asked = parser.parse_args()
    print(json.dumps(measure(asked.model, asked.max_reqs, [int(rows) for rows in asked.rows.split(",")])))


if __name__ == "__main__":
    main()
