#!/bin/bash
# One call of a visit to a GPU that is lent for fifteen minutes: bash benchmarks/gpu_visit.sh 1|2|3
#
#   1  what the device can do, the tests, what each fast piece brings, and decoding
#   2  kernels, log-probabilities, a step, adapters, the same bits
#   3  a profile and a run by its own plan, two layouts of one model, every path once, conversations
#
# On an H200 with 16 cores `penstock plan` took 15 s, nearly all of it imports, and a run of three steps
# beside eleven others 22 to 31 s; two kills are six such runs, one after another.
#
# Each step has its limit, none that fails stops the next, and all of a call end after $CALL_S seconds.
# Figures are in gpu.json as soon as they are found, and $OUT has everything after each step: at most
# eight files, with the log. State is kept in $VISIT from call to call. `TINY=1` runs the same on a
# CPU, on models that mean nothing, with ten times the limits.
set -u
call=${1:?usage: bash benchmarks/gpu_visit.sh 1|2|3}
cd "$(dirname "$0")/.." || exit 2
PYTHON=${PYTHON:-python3}
VISIT=${VISIT:-/tmp/visit}
OUT=${OUT:-$VISIT/out}
CALL_S=${CALL_S:-390}
tiny=${TINY:+--tiny}
times=${TINY:+10}
times=${times:-1}
mkdir -p "$VISIT" "$OUT"
export PENSTOCK_CACHE=$VISIT/cache PYTHONUNBUFFERED=1
SECONDS=0

within() { # within LIMIT: seconds that a step of this call may take, 0 if it is not worth beginning
    local limit=$(($1 * times)) left=$((CALL_S * times - SECONDS))
    [ "$limit" -gt "$left" ] && limit=$left
    [ "$limit" -lt 15 ] && limit=0
    echo "$limit"
}

run() { # run NAME LIMIT COMMAND...: its last lines are shown, more of them if it fails
    local name=$1 limit=$2 began=$SECONDS log=$VISIT/${1// /_}.log code
    shift 2
    [ "$limit" -gt 0 ] || { echo "== $name: not begun at $SECONDS s"; return 0; }
    timeout -k 5 "$limit" "$@" >"$log" 2>&1
    code=$?
    echo "== $name: exit $code after $((SECONDS - began)) s, at $SECONDS s"
    tail -n $((code ? 25 : 1)) "$log" | cut -c1-400
    { echo "== $name"; cat "$log"; } >>"$VISIT/call$call.txt"
    cp -f "$VISIT"/*.json "$VISIT"/*.xml "$VISIT/call$call.txt" "$OUT"/ 2>/dev/null
    return 0
}

figures() { # figures [STAGE...]: what gpu.json has of these, or of all
    "$PYTHON" - "$VISIT/gpu.json" "$@" <<'END'
import json, pathlib, sys
file = pathlib.Path(sys.argv[1])
found = json.loads(file.read_text())["stages"] if file.exists() else {}
for name in sys.argv[2:] or found:
    stage = found.get(name, {"figures": []})
    state = "complete" if stage.get("is_complete") else stage.get("failed", "not at its end")
    print("  ", name, state, f"{stage.get('seconds', 0):.1f} s")
    for one in stage["figures"]:
        print("     ", one["name"], one["value"], one["unit"], one["open"][-300:])
END
}

stages() { # stages LIMIT NAME...: those that gpu.json lacks, in one process, for imports take seconds
    local limit
    limit=$(within "$1")
    shift
    run "$*" "$limit" "$PYTHON" benchmarks/gpu.py $tiny --here --json "$VISIT/gpu.json" \
        --limit-s "$limit" --runs "$VISIT/runs" --stage "$@"
    figures "$@"
}

tests() { # tests LIMIT: of their files alone, as to collect all takes long, and some need Ray
    local files
    files=$(grep -rlE '^\s*(@pytest\.mark\.gpu\b|pytestmark = .*mark\.gpu\b)' tests --include='test_*.py')
    run tests "$(within "$1")" "$PYTHON" -m pytest -v -p no:cacheprovider -p no:xdist --timeout 60 \
        --junit-xml "$VISIT/tests.xml" -m gpu $files
}

case $call in
1)
    stages 60 inventory
    stages 180 ablation
    stages 110 decode
    tests 150
    ;;
2)
    stages 130 decode kernels logprobs
    stages 60 step
    stages 80 adapters
    stages 60 determinism
    tests 130
    ;;
3)
    stages 180 plan
    stages 60 step
    stages 150 in_place
    OMP_NUM_THREADS=2 stages 220 paths
    stages 110 runs
    stages 150 agents
    stages 90 engines
    ;;
*) echo "usage: bash benchmarks/gpu_visit.sh 1|2|3" >&2; exit 2 ;;
esac
figures
