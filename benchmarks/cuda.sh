#!/usr/bin/env bash
# Runs every measurement and test that needs a GPU, in one call of at most ten minutes:
#
#     benchmarks/cuda.sh OUTDIR
#
# writes {op,append,decode}-cuda.json and a log of each part to OUTDIR, and prints a table last. It
# uses the source tree: kvkeep need not be installed. Each part has its own time limit, so that one
# that hangs or fails does not affect the others. PYTHON selects the interpreter; PARTS="op decode"
# selects parts; LIMIT_TESTS=300 sets a part's limit in seconds; DEVICE=cpu TINY=1 test the script.
set -u
out=${1:?usage: benchmarks/cuda.sh OUTDIR}
mkdir -p "$out" && out=$(cd "$out" && pwd) && cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
python=${PYTHON:-$(command -v python3 || command -v python)}
device=${DEVICE:-cuda}
parts=" ${PARTS:-tests op append decode memcheck} "
export PYTHONPATH="$PWD/src:$PWD/lab/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
failed=0

# seconds NAME SECONDS: prints the limit of a part from its LIMIT_ variable, or else SECONDS.
seconds() {
  local asked="LIMIT_${1^^}"
  echo "${!asked:-$2}"
}

# part NAME SECONDS COMMAND...: runs a command with a time limit and logs its output. At the limit
# it gets SIGINT first, so that it can report.
part() {
  local name=$1 limit begun=$SECONDS status
  limit=$(seconds "$1" "$2")
  shift 2
  [[ $parts == *" $name "* ]] || return 0
  timeout --signal=INT --kill-after=5 "$limit" "$@" >"$out/$name.log" 2>&1
  status=$?
  echo "== $name: exit $status after $((SECONDS - begun)) s; $(tail -n 1 "$out/$name.log" | cut -c -150)"
  ((status == 0)) || failed=1
  grep -h -m 20 -E "^(FAILED|ERROR) " "$out/$name.log" | cut -c -200
}

# bench NAME SECONDS: runs a benchmark that starts no case after 80 % of the limit, to have time to
# write its results.
bench() {
  part "$1" "$2" "$python" benchmarks/cuda.py "$1" --out "$out/$1-cuda.json" --device "$device" \
    --seconds $(($(seconds "$1" "$2") * 8 / 10)) ${TINY:+--tiny}
}

# The conftest.py above tests/ tests the documents and needs more packages, so it is left out.
pytest=(-m pytest --confcutdir=tests -p no:cacheprovider -q --tb=short)
tests=(tests/{attention/test_triton,attention/test_triton_packed,test_conformance,layer/test_append,hf/test_graphed}.py
  tests/storage/test_{host,growth}.py)
if [[ -n ${TINY:-} ]]; then
  tests=(tests/bench/test_device.py -k limits)
elif "$python" -c "import xdist" 2>/dev/null; then
  tests+=(-n $(($(nproc) > 16 ? 8 : ($(nproc) + 1) / 2)))  # compile kernels in parallel
fi

part tests 240 "$python" "${pytest[@]}" "${tests[@]}"
bench op 100
bench append 60
bench decode 170
if command -v compute-sanitizer >/dev/null; then
  # Without torch's memory pools, where an access out of bounds would still hit allocated memory.
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 part memcheck 50 \
    compute-sanitizer --tool memcheck --error-exitcode 9 \
    "$python" "${pytest[@]}" -x -k "codes and 80" tests/attention/test_triton.py
elif [[ $parts == *" memcheck "* ]]; then
  echo "== memcheck: compute-sanitizer is not installed"
fi

for name in op append decode; do
  [[ $parts == *" $name "* ]] && "$python" benchmarks/cuda.py table "$out/$name-cuda.json"
done
exit "$failed"
