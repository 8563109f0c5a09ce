#!/usr/bin/env bash
# compute-sanitizer's memcheck and racecheck over the noise, chain and fused kernels on a small shape (tests/harness/sanitize.py).
# Needs a GPU, compute-sanitizer (CUDA toolkit) and a Python with the GPU build of PyTorch: PYTHON=python3.
#
#     scripts/sanitize.sh [memcheck|racecheck|synccheck ...]      default: memcheck racecheck
#
# Prints each tool's reports and summary; ends with 0 when all are clean, 1 when one is not, 3 where the tool is missing.
#
# How a racecheck report on the chain is judged. Its shared memory has these owners and orders; a hazard between two of the named
# accesses is the tool not seeing the order that is named here, any other is a bug:
#   head slots        written by bulk copies (UBLKCP); read (LDS) by one warp after it waited for the tile's mbarrier; refilled by lane 0
#                     of the warp that has read, after a warp barrier. The tool must follow mbarriers to see the first order.
#   staged inputs     written by cp.async (LDGSTS) of the lanes of one warp; read by the same warp after each lane waited for its own
#                     copies (LDGDEPBAR, DEPBAR) and a barrier of the warp or CTA; written again after a warp barrier.
#   keys, row table   written and read in phases between barriers of the whole CTA: never a hazard. So are the embeddings and the
#                     gathering warps' shares of the records.
# A memcheck report is always a bug. Records in global memory are accessed by relaxed 64-bit operations that race by design, between
# CTAs and once a word (templates/device/exchange.py says why that is lawful); racecheck looks at shared memory only.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
seconds=${SANITIZE_SECONDS:-240} # for each tool; a kernel whose waits are unbounded cannot outlast it
sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -n 1)
if [ -z "$sanitizer" ]; then
  echo "sanitize: expected compute-sanitizer on PATH or in /usr/local/cuda*/bin, found neither" >&2
  exit 3
fi

# Every tensor in an allocation of its own, so that memcheck sees an access one entry beyond it.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
export PYTHONPATH=".:generator${PYTHONPATH:+:$PYTHONPATH}"

[ "$#" -gt 0 ] || set -- memcheck racecheck
status=0
for tool in "$@"; do
  echo "== $tool"
  options=(--tool "$tool" --target-processes application-only --print-limit 20 --error-exitcode 1)
  # What PyTorch probes and handles itself is no report.
  [ "$tool" != memcheck ] || options+=(--report-api-errors no)
  timeout --signal=KILL "$seconds" "$sanitizer" "${options[@]}" "$python" -m tests.harness.sanitize
  code=$?
  [ "$code" -ne 137 ] || echo "sanitize: $tool took longer than $seconds seconds"
  [ "$code" -eq 0 ] || status=1
done
exit "$status"
