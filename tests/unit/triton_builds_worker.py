"""Compiles the Triton kernels without a GPU, as described and as launched; run by test_triton_builds.py in a process of its own.

    python triton_builds_worker.py FOLDER  > JSON: {"described": {module: {build: {capability: {...}}}}, "launched": {module: [hash]},
                                                    "features": {model: {module/build: {...}}}}

Triton must not be in interpreter mode here. Launches are stopped after compilation: a stand-in for the driver names the
target, and the launch options that Triton derives from real arguments decide which binary a launch asks for.
"""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "generator")]

import torch  # noqa: E402
import triton  # noqa: E402
from tests.harness.cases import exact_case  # noqa: E402
from tests.harness.toy import toy_model  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from dsparkgen.cubin import read_resources  # noqa: E402

CAPABILITIES = (90, 100)
VOCAB, RANK, STEPS = 301, 128, 2
DTYPES = (torch.bfloat16, torch.float32)
CAP = {"multiplier": 0.196, "soft_cap": 20.0}
FEATURES = {  # toy models that between them use every feature; one pair of dtypes each
    "reduced vocabulary, fp64 noise, cap on the base": {
        "kernels": ("fused",),
        "vocabulary": {"draft": 200, "d2t": True},
        "noise": {"scheme": "murmur3_64"},
        "logits": {"base_dtypes": ("fp32",), "cache_dtypes": ("fp32",), "transform": {"placement": "base", **CAP}},
    },
    "reduced vocabulary, Philox noise, cap on the sum": {
        "vocabulary": {"draft": 200, "d2t": True},
        "noise": {"scheme": "philox_32"},
        "logits": {"base_dtypes": ("bf16",), "cache_dtypes": ("bf16",), "transform": {"placement": "sum", **CAP}},
    },
    "greedy, cap on both, rank 80": {
        "kernels": ("fused",),
        "rank_dim": 80,
        "logits": {"base_dtypes": ("bf16",), "cache_dtypes": (), "transform": {"placement": "both", **CAP}},
    },
    "rank 512": {
        "kernels": ("fused",),
        "rank_dim": 512,
        "logits": {"base_dtypes": ("bf16",), "cache_dtypes": ("bf16",)},
    },
}


class Driver:
    """What Triton asks a driver before it launches."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", CAPABILITIES[0], 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def describe(module: ModuleType, capabilities: tuple[int, ...] = CAPABILITIES) -> dict[str, Any]:
    """Every described build for every capability: its hash and resources."""
    described: dict[str, Any] = {}
    for name, (function, signature, constants, options) in module.compile_builds().items():
        described[name] = {}
        for capability in capabilities:
            source = ASTSource(function, signature, constants)
            compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
            resources = read_resources(compiled.asm["cubin"])
            described[name][capability] = {
                "hash": compiled.hash,
                "ptx": compiled.asm["ptx"],
                "spill_bytes": resources.spill_bytes,
                "local_bytes": resources.local_bytes,
            }
    return described


def main(folder: Path) -> None:
    model = toy_model(folder, VOCAB, rank_dim=RANK, num_steps=STEPS)
    answer: dict[str, Any] = {"described": {name: describe(getattr(model, name)) for name in ("noise", "fused")}}

    answer["features"] = {}
    for place, (name, options) in enumerate(FEATURES.items()):
        other = toy_model(folder / f"features{place}", VOCAB, num_steps=STEPS, **{"rank_dim": RANK} | options)
        answer["features"][name] = {
            f"{module}/{build}": found[CAPABILITIES[0]]
            for module in ("noise", "fused")
            if hasattr(other, module)
            for build, found in describe(getattr(other, module), CAPABILITIES[:1]).items()
        }

    launched: dict[str, set[str]] = {"noise": set(), "fused": set()}
    launch = triton.JITFunction.run

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled = launch(self, *arguments, grid=grid, warmup=True, **options)
        launched["noise" if self.__name__ == "_noise_kernel" else "fused"].add(compiled.hash)
        return compiled

    triton.runtime.driver.set_active(Driver())
    triton.JITFunction.run = compile_only
    model.fused.FusedLoop.why_not = classmethod(lambda *arguments, **options: None)
    # A CPU tensor stands for a GPU's, so the modules' choices by device are made here.
    model.noise._launcher.interpreter_block = model.noise.noise_launcher.BLOCK
    for rows, layout in ((1, "plain"), (16, "odd"), (17, "steps_first")):
        for base in DTYPES:
            for cache in DTYPES:
                options = {"base_dtype": base, "cache_dtype": cache, "layout": layout, "query_per_row": rows}
                case = exact_case(VOCAB, RANK, STEPS, rows, seed=rows, **options)
                loop = model.fused.FusedLoop(case.embed_weight, case.head_weight, max_reqs=case.max_reqs, block=64)
                loop._on_gpu = True
                # Slices from element 1 on have other alignments than whole tensors.
                shifted = case.replace(
                    idx_mapping=torch.cat([case.idx_mapping[:1], case.idx_mapping])[1:],
                    seeds=torch.cat([case.seeds[:1], case.seeds])[1:],
                    input_ids=torch.cat([case.input_ids[:1], case.input_ids])[1:],
                    temperature=torch.cat([case.temperature[:1], case.temperature])[1:],
                )
                for call in (case, shifted):
                    loop.sample(*call.call_arguments, query_per_row=rows)
                    state = (call.idx_mapping, call.sample_pos, call.temperature, call.seeds)
                    for start, width in ((0, VOCAB), (1, 1), (16, 160)):
                        out = torch.empty(rows * STEPS, 320)
                        model.noise.draw_noise(out, *state, num_samples=rows * STEPS, vocab_start=start, width=width)
    answer["launched"] = {name: sorted(hashes) for name, hashes in launched.items()}
    print(json.dumps(answer))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
