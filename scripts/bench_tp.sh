#!/usr/bin/env bash
# The vocabulary-parallel chain over the GPUs of this host: tests/multi_gpu, 1,000 random batches and 10,000 graph replays with delayed
# ranks, then verification and timings, recorded below benchmarks/results (h200 for two GPUs, h200-x<n> for more). Needs TP GPUs with peer access and, as PYTHON, a Python with the
# GPU build of PyTorch.
#
#     scripts/bench_tp.sh 4 [MODEL ...]      default: those of the models below that have a spec
#
# Ends with 0 when all of it holds, else with the exit code of the first part that failed; the later parts run all the same.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
tp=${1:?expected the number of GPUs}
shift
if [ "$#" -eq 0 ]; then
  for model in deepseek_v41 qwen3_8b kimi_k3; do
    [ ! -e "specs/$model.toml" ] || set -- "$@" "$model"
  done
fi
export PYTHONPATH=".:generator:generated${PYTHONPATH:+:$PYTHONPATH}"

status=0
part() {
  echo "== $*"
  "$@"
  local code=$?
  [ "$status" -ne 0 ] || status=$code
}
part "$python" -m pytest -q -p no:cacheprovider tests/multi_gpu --tp "$tp"
part "$python" -m tests.harness.ranks --world "$tp" --phases bitwise,graph ${RANKS_ARGS:-}
part "$python" -m dsparkgen verify "$@" --tp "$tp" --record ${VERIFY_ARGS:-}
part "$python" -m dsparkgen bench "$@" --tp "$tp" --emulated "$tp" --rows 1,8 --record ${BENCH_ARGS:-}
exit "$status"
