#!/usr/bin/env bash
# Serves a model from a pack on a machine with a GPU as if CuTe DSL were not installed: the bitwise tests, `dsparkgen verify`, and the time to
# the first draw beside the compiler's. Needs a GPU and, as PYTHON, a Python with the GPU build of PyTorch, Triton, pytest, and CuTe DSL to
# compare with; about two minutes on an H200 with 16 cores. benchmarks/serve_from_pack.py says what it does, and lists its options.
#
#     dsparkgen build deepseek_v41 --arch sm_90a --device h200 --tp 1 --pdl --out build     (needs no GPU; the same sources as here)
#     scripts/serve_from_pack.sh build/dspark_kernels_pack-*.whl --json pack.json
#
# DSPARK_ENGINE_FILES names a folder with the vLLM wheel's files where pip cannot fetch it; without them the hook's tests are left out.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH=".:generator:generated${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" -m benchmarks.serve_from_pack "$@"
