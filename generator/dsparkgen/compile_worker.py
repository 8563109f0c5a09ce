"""The process that imports generated code and a GPU compiler; compile.py starts it, one process for one arch.

    python -m dsparkgen.compile_worker list|build  < request.json  > one JSON object a line

CuTe DSL reads CUTE_DSL_ARCH when it is imported, so an arch needs a process of its own. Compilers may print to standard output:
answers go to a private copy of it, all else to standard error.
"""

import importlib
import json
import os
import sys
import tempfile
import time
from typing import Any

from dsparkgen.cubin import read_resources

Answer = dict[str, Any]


def list_model(model: str, kernels: list[str]) -> Answer:
    """The builds a generated model offers.

    Returns {"plans": [[device, tp, row slots], ...], "devices": {name: [major, minor]}, "base_dtypes", "cache_dtypes",
    "draft_vocab_size", "named": {kernel: [build name, ...]}}, the last for all kernels but the chain.
    """
    config = importlib.import_module(f"dspark_kernels.{model}.config")
    named = {}
    for kernel in kernels:
        if kernel != "chain":
            module = importlib.import_module(f"dspark_kernels.{model}.{kernel}")
            named[kernel] = sorted(module.compile_builds())
    return {
        "plans": [list(key) for key in config.PLANS],
        "devices": {name: list(values[0]) for name, values in config.DEVICES.items()},
        "base_dtypes": list(config.BASE_DTYPES),
        "cache_dtypes": list(config.CACHE_DTYPES),
        "draft_vocab_size": config.DRAFT_VOCAB_SIZE,
        "named": named,
    }


def build_chain(build: Answer) -> tuple[bytes, int]:
    """Compiles one variant of a chain kernel. Returns its cubin and its dynamic shared memory in bytes."""
    chain = importlib.import_module(f"dspark_kernels.{build['model']}.chain")
    config = importlib.import_module(f"dspark_kernels.{build['model']}.config")
    layout = importlib.import_module("dspark_kernels._device.plan_line").shared_layout
    line = config.PLANS[build["device"], build["tp"], build["row_slots"]]
    base_bytes = config.DTYPE_BYTES[build["base_dtype"]]
    shared_bytes = layout(line, config.RANK_DIM, config.NUM_STEPS, base_bytes).total
    *_, limit = config.DEVICES[build["device"]]
    if shared_bytes > limit:
        raise ValueError(
            f"expected at most {limit} bytes of shared memory on {build['device']}, the plan takes {shared_bytes}"
        )
    compiled = chain.compile_chain(
        line, build["base_dtype"], build["cache_dtype"], world=line.tp, arch=build["arch"], options="--keep-cubin"
    )
    return compiled.artifacts.CUBIN, shared_bytes


def build_triton(build: Answer) -> tuple[bytes, int]:
    """Compiles one variant of a Triton kernel. Returns its cubin and its shared memory in bytes."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module = importlib.import_module(f"dspark_kernels.{build['model']}.{build['kernel']}")
    function, signature, constants, options = module.compile_builds()[build["variant"]]
    capability = int(build["arch"].removeprefix("sm_").rstrip("af"))
    compiled = triton.compile(
        ASTSource(function, signature, constants), target=GPUTarget("cuda", capability, 32), options=options
    )
    return compiled.asm["cubin"], compiled.metadata.shared


def build_step(build: Answer) -> tuple[bytes, int]:
    """Compiles one of the step kernels' builds. Returns its cubin and its dynamic shared memory in bytes."""
    module = importlib.import_module(f"dspark_kernels.{build['model']}.step")
    compile_kernel, shared_bytes = module.compile_builds()[build["variant"]]
    return compile_kernel(build["arch"], "--keep-cubin").artifacts.CUBIN, shared_bytes


BUILDERS = {"chain": build_chain, "step": build_step, "noise": build_triton, "fused": build_triton}


def answer_build(build: Answer) -> Answer:
    """Compiles one build and reads its figures; a failure is an answer too: {"error": text}."""
    start = time.perf_counter()
    try:
        cubin, shared_bytes = BUILDERS[build["kernel"]](build)
        seconds = time.perf_counter() - start
        resources = read_resources(cubin)
    except Exception as error:  # a compiler may raise anything; the other builds of this process must still run
        return {"error": f"{type(error).__name__}: {error}"}
    return {
        "registers": resources.registers,
        "spill_bytes": resources.spill_bytes,
        "local_bytes": resources.local_bytes,
        "shared_bytes": shared_bytes,
        "spill_source": resources.spill_source,
        "seconds": round(seconds, 3),
    }


def main(verb: str) -> None:
    """Answers the request on standard input: {"out", "models"} for list, {"out", "builds"} for build; `out` is the source root."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    request = json.load(sys.stdin)
    sys.path.insert(0, request["out"])
    if verb == "list":
        for model, kernels in request["models"].items():
            print(json.dumps({"model": model, **list_model(model, kernels)}), file=answers, flush=True)
        return
    with tempfile.TemporaryDirectory() as folder:  # CuTe DSL leaves the PTX and cubin it keeps in the working directory
        os.chdir(folder)
        for build in request["builds"]:
            print(json.dumps({"id": build["id"], **answer_build(build)}), file=answers, flush=True)
        os.chdir("/")


if __name__ == "__main__":
    main(sys.argv[1])
