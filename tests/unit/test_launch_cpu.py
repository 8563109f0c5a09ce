"""DraftSampler on CPU tensors: rendered code of a small vocabulary, through the fused loop, against the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from tests.harness import checks  # noqa: E402
from tests.harness.oracle import why_unequal_on_cpu  # noqa: E402

from dsparkgen import bench, gpu  # noqa: E402
from dsparkgen.device import load_devices  # noqa: E402
from dsparkgen.spec import read_specs  # noqa: E402

ROOT = Path(__file__).parents[2]
SHAPE = bench.Shape(4096, 3)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def product(tmp_path_factory: pytest.TempPathFactory) -> gpu.Product:
    if torch.cuda.is_available():
        pytest.skip("CPU tensors need Triton's interpreter, which is off where there is a GPU")
    folder = tmp_path_factory.mktemp("small")
    spec = bench.reshaped(read_specs(ROOT / "specs")["deepseek_v41"], SHAPE)
    bench.write_package([spec], load_devices(ROOT), ROOT / "templates", folder)
    return gpu.load_product(folder, spec.model.name)


@pytest.mark.parametrize(("base", "cache"), [("bf16", "fp32"), ("fp32", "bf16")])
def test_draft_sampler_draws_what_the_oracle_draws(product: gpu.Product, base: str, cache: str) -> None:
    subject = checks.exact_subject(product, base, cache, CPU, seed=1)
    draft = product.module("launch").DraftSampler(
        *subject.weights, max_reqs=checks.MAX_REQS, cache_dtype=checks.DTYPES[cache]
    )
    case = checks.make_case(subject, 3, seed=2, padding_rows=1, layout="odd")
    name, reason = draft.path(case.rows, case.base_logits)
    assert name == "fused" and "CUDA device" in reason
    draft.fork_noise(case.idx_mapping, case.sample_pos, case.temperature, case.seeds, case.rows)
    draft.join_noise()
    draft.sample(*case.call_arguments, query_per_row=case.query_per_row)
    assert why_unequal_on_cpu(case, case.draft_tokens, case.logits_cache) is None


def test_launching_costs_no_compiler_until_a_sampler_is_built(product: gpu.Product) -> None:
    import subprocess
    import sys

    code = (
        f"import sys; sys.path.insert(0, {str(product.package.parent)!r})\n"
        f"import dspark_kernels.{product.model}\n"
        "assert not {'torch', 'triton', 'cutlass'} & set(sys.modules), 'the package imports a toolchain'\n"
        f"import dspark_kernels.{product.model}.launch\n"
        "assert 'cutlass' not in sys.modules, 'the launcher imports the compiler'\n"
        "assert 'torch' in sys.modules"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_the_chain_declines_cpu_weights_with_the_reason(product: gpu.Product) -> None:
    subject: Any = checks.exact_subject(product, "bf16", "bf16", CPU, seed=1)
    launch = product.module("launch")
    reason = launch.ChainSampler.why_not(*subject.weights, max_reqs=4, cache_dtype=torch.bfloat16)
    assert reason is not None and "expected a tensor on a CUDA device" in reason
    with pytest.raises(ValueError, match="no chain sampler: embed_weight"):
        launch.ChainSampler(*subject.weights, max_reqs=4, cache_dtype=torch.bfloat16)
