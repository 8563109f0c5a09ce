#!/usr/bin/env bash
# Records what one GPU can show of every model: verify, then bench, into benchmarks/results/<gpu>. Needs a GPU and, as PYTHON, a Python with
# the GPU build of PyTorch, Triton and CuTe DSL; about five minutes on an H200 with 16 cores. `make bench-tp TP=n` does the same over n GPUs.
#
#     scripts/evidence.sh [MODEL...]      default: every spec; the first one is checked in full depth
#
# deepseek_v41 comes first by default: 200 random batches a pair of data types, 10,000 graph replays, single-GPU shards, other shapes and the
# sweep over vocabularies. The others get a few batches at four row counts, a process each. Each model is recorded as soon as it is done, so
# that a run cut short keeps what it has. Ends with 1 when a part failed. `make docs` then draws the rows' pictures and writes the pages.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
export PYTHONPATH=".:generator:generated${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1

if [ "$#" -eq 0 ]; then
  mapfile -t names < <(basename -s .toml -a specs/*.toml)
  set -- deepseek_v41
  for name in "${names[@]}"; do [ "$name" = deepseek_v41 ] || set -- "$@" "$name"; done
fi
first=$1
shift
status=0
run() { "$python" -m dsparkgen "$@" --record || status=1; }

run verify "$first" --batches 200 --replays 10000
[ "$#" -eq 0 ] || run verify "$@" --rows 1,8,16,64 --batches 6 --replays 20 --dtypes bf16/bf16,fp32/fp32
run bench "$first" --rows 1,4,8,16,64 --shapes 151936x7,262144x7 --shards --sweep --pdl
[ "$#" -eq 0 ] || run bench "$@" --rows 1,8,16,64
exit "$status"
