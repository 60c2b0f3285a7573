#!/usr/bin/env bash
# Every measurement and test that needs a GPU, in one call of ten minutes at most:
#
#     benchmarks/cuda.sh OUTDIR
#
# writes {op,append,decode}-cuda.json and a log of each part to OUTDIR, and prints a table last. It
# runs on the source tree: kvkeep need not be installed. Each part has its own limit, so one that
# hangs or fails costs the others nothing. PYTHON chooses the interpreter; PARTS="op decode" leaves
# out others, LIMIT_TESTS=300 gives a part other seconds; DEVICE=cpu TINY=1 try the script itself.
set -u
out=${1:?usage: benchmarks/cuda.sh OUTDIR}
mkdir -p "$out" && out=$(cd "$out" && pwd) && cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
python=${PYTHON:-$(command -v python3 || command -v python)}
device=${DEVICE:-cuda}
parts=" ${PARTS:-tests op append decode memcheck} "
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
failed=0

# seconds NAME SECONDS: what was asked for, or these.
seconds() {
  local asked="LIMIT_${1^^}"
  echo "${!asked:-$2}"
}

# part NAME SECONDS COMMAND...: its output goes to a log; interrupted first, so that it can tell.
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

# bench NAME SECONDS: stops beginning things in time to write down what there is.
bench() {
  part "$1" "$2" "$python" benchmarks/cuda.py "$1" --out "$out/$1-cuda.json" --device "$device" \
    --seconds $(($(seconds "$1" "$2") * 8 / 10)) ${TINY:+--tiny}
}

# Without the conftest.py above tests/, which tests the documents and needs packages for that.
pytest=(-m pytest --confcutdir=tests -p no:cacheprovider -q --tb=short)
tests=(tests/{attention/test_triton,test_conformance,test_append,hf/test_graphed}.py
  tests/storage/test_{host,growth}.py)
if [[ -n ${TINY:-} ]]; then
  tests=(tests/bench/test_device.py -k limits)
elif "$python" -c "import xdist" 2>/dev/null; then
  tests+=(-n $(($(nproc) > 16 ? 8 : ($(nproc) + 1) / 2)))  # kernels are compiled side by side
fi

part tests 240 "$python" "${pytest[@]}" "${tests[@]}"
bench op 100
bench append 60
bench decode 170
if command -v compute-sanitizer >/dev/null; then
  # Without torch's own pools, in which a stray access would find memory all the same.
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 part memcheck 50 \
    compute-sanitizer --tool memcheck --error-exitcode 9 \
    "$python" "${pytest[@]}" -x -k "codes and 80" tests/attention/test_triton.py
elif [[ $parts == *" memcheck "* ]]; then
  echo "== memcheck: there is no compute-sanitizer"
fi

for name in op append decode; do
  [[ $parts == *" $name "* ]] && "$python" benchmarks/cuda.py table "$out/$name-cuda.json"
done
exit "$failed"
