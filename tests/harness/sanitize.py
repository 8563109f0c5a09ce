"""What scripts/sanitize.sh runs under compute-sanitizer: the noise, chain and fused kernels on a small shape.

    python -m tests.harness.sanitize

The chain's plan line is forced to use every tier at once: a register tile a warp with one chunk in shared memory, a resident
tile, a ring of 2 that is refilled. It runs twice, with tensors that allow vector accesses and with misaligned ones. Inputs are
made on the CPU and copied, and outputs are compared there, so that hardly any kernel but ours runs under the tool. Waits are
unbounded: the tool slows the kernel so much that a bound would trap.
"""

import sys
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from . import residency
from .cases import Case, exact_case
from .oracle import same_bits

# residency puts the tool on the path where it is not installed.
from dsparkgen import plan  # isort: skip
from dsparkgen.device import DeviceSpec, load_devices  # isort: skip
from dsparkgen.spec import ModelSpec, read_spec  # isort: skip

SPEC = residency.ROOT / "tests" / "specs" / "sanitize.toml"
ROWS, PADDING_ROWS = 3, 1
SLOTS = 4
UNDRAFTED = 7000  # more target ids than draft ids, where the vocabulary is reduced
PLACED = {"register_tiles": 1, "register_chunks": 7, "resident": 1, "ring": 2, "ahead": 2, "keep": 1}


def on_gpu(case: Case) -> Case:
    """The case's tensors on the GPU, with the same strides and alignment, by copies alone."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        flat = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).cuda()
        return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    tensors = {field.name: getattr(case, field.name) for field in fields(case)}
    return case.replace(**{name: moved(x) for name, x in tensors.items() if isinstance(x, torch.Tensor)})


def reduced(spec: ModelSpec) -> ModelSpec:
    """The spec with as many ids more that nothing drafts."""
    values = spec.model_dump()
    values["vocabulary"] = {"target": spec.vocabulary.target + UNDRAFTED, "draft": spec.vocabulary.target, "d2t": True}
    return ModelSpec.model_validate(values)


def agree(spec: ModelSpec, device: DeviceSpec, slots: int, padding_rows: int) -> bool:
    """Launch the kernels of a spec; whether chain and fused loop agree to the bit."""
    line = plan.plan_model(spec, {device.name: device}).line(device.name, 1, slots)
    assert line is not None
    line = line._replace(bf16=line.bf16._replace(**PLACED))
    line = line._replace(shared_bytes=plan.shared_bytes(line, spec, "bf16"))
    rows = min(ROWS, slots)
    shape = spec.vocabulary.target, spec.markov.rank_dim, spec.draft.num_steps, rows
    mapped: dict[str, Any] = {"draft_vocab_size": spec.vocabulary.draft} if spec.vocabulary.d2t else {}
    good = True
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        found = residency.render_model(spec, device, Path(folder) / "sanitize")
        found.config.PLANS[line.device, line.tp, line.row_slots] = residency.product_line(found, line)
        cases = [
            on_gpu(exact_case(*shape, seed=1, padding_rows=padding_rows, layout=layout, **mapped))
            for layout in ("plain", "odd")
        ]
        weights, max_reqs = (cases[0].embed_weight, cases[0].head_weight), cases[0].max_reqs
        options: dict[str, Any] = {"d2t": cases[0].d2t} if mapped else {}
        sampler = found.module("launch").ChainSampler(
            *weights, max_reqs=max_reqs, cache_dtype=torch.bfloat16, timeout_ms=0, **options
        )
        for case in cases:
            sampler.sample(*case.call_arguments, query_per_row=case.query_per_row)
        torch.cuda.synchronize()
        print("chain: done", flush=True)
        other = on_gpu(exact_case(*shape, seed=1, padding_rows=padding_rows, **mapped))
        loop = found.module("fused").FusedLoop(*weights, max_reqs=max_reqs, **options)
        loop.sample(*other.call_arguments, query_per_row=other.query_per_row)
        torch.cuda.synchronize()
        print("fused: done", flush=True)
        want_tokens, want_cache = other.draft_tokens.cpu(), other.logits_cache.cpu()
        for case in cases:
            cache = case.logits_cache.cpu()[:, :, : want_cache.shape[2]]
            good &= torch.equal(case.draft_tokens.cpu(), want_tokens) and same_bits(cache.contiguous(), want_cache)
    print(f"chain and fused loop {'agree to the bit' if good else 'DIFFER'}", flush=True)
    return good


def main() -> int:
    """All kernels, then the two ways to write the cache rows of a reduced vocabulary; 0 when chain and fused loop agree each time, else 1."""
    devices, spec = load_devices(residency.ROOT), read_spec(SPEC)
    device = devices[residency.local_device(devices)]
    good = agree(spec, device, SLOTS, PADDING_ROWS)
    good &= agree(reduced(spec), device, SLOTS, PADDING_ROWS)
    good &= agree(reduced(spec), device, 1, 0)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
