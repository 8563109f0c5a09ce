"""Time from importing the kernels to the first draw, and what a launch costs the host: one process, one way to come by kernels.

    python -m benchmarks.startup MODEL [--rows 1]

Which way it is follows from the environment: an installed pack, else the disk cache (DSPARK_KERNELS_CACHE), else the compiler; the
line printed says which. Run it three times: with a pack and without CuTe DSL, with an empty cache, and again.
"""

import argparse
import json
import statistics
import time
from typing import Any

LAUNCHES = 200
MAX_REQS = 8


def measure(model: str, rows: int) -> dict[str, Any]:
    """Seconds to the first draw and to a warm sampler, microseconds of the host for a launch and for a whole call."""
    import torch

    device = torch.device("cuda", torch.cuda.current_device())
    torch.zeros(1, device=device)
    started = time.perf_counter()
    from importlib import import_module

    from dspark_kernels import load

    config = import_module(f"dspark_kernels.{model}.config")
    sampler_type = load(model).ChainSampler
    imported = time.perf_counter()
    from tests.harness.cases import exact_case

    case = exact_case(
        config.VOCAB_SIZE, config.RANK_DIM, config.NUM_STEPS, rows, seed=1, device=device, max_reqs=MAX_REQS
    )
    torch.cuda.synchronize()
    prepared = time.perf_counter()
    sampler = sampler_type(case.embed_weight, case.head_weight, max_reqs=MAX_REQS, cache_dtype=case.logits_cache.dtype)
    sampler.sample(*case.call_arguments, query_per_row=case.query_per_row)
    torch.cuda.synchronize()
    drawn = time.perf_counter()
    sampler.warmup()
    warm = time.perf_counter()
    variant, arguments = sampler.prepare(rows, *case.call_arguments, case.query_per_row)
    return {
        "model": model,
        "rows": rows,
        "origin": variant.kernel.origin,
        "first draw s": round(imported - started + drawn - prepared, 3),
        "warm s": round(imported - started + warm - prepared, 3),
        "launch us": _host_us(lambda: sampler.launch(variant, arguments)),
        "call us": _host_us(lambda: sampler.sample(*case.call_arguments, query_per_row=case.query_per_row)),
    }


def _host_us(call: Any) -> float:
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
    parser.add_argument("--rows", type=int, default=1)
    asked = parser.parse_args()
    print(json.dumps(measure(asked.model, asked.rows)))


if __name__ == "__main__":
    main()
