#!/usr/bin/env bash
# Make a virtual environment with what this checkout needs; can be run again.
#
#   scripts/setup_env.sh [FOLDER]        FOLDER defaults to .venv
#
# Variables:
#   PYTHON             the Python that makes the environment (default python3; 3.10 or newer)
#   EAGLE_TRAIN_TORCH  which torch: auto (default), cpu, cuda, npu, or skip = use the one that PYTHON already has
#   EAGLE_TRAIN_EXTRAS extras to install (default quickstart,dev)
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${1:-$root/.venv}
python=${PYTHON:-python3}
kind=${EAGLE_TRAIN_TORCH:-auto}
extras=${EAGLE_TRAIN_EXTRAS:-quickstart,dev}
cpu_index=https://download.pytorch.org/whl/cpu
version=$(sed -n 's/^torch==\([^ ;]*\).*/\1/p' "$root/constraints.txt")
export PIP_DISABLE_PIP_VERSION_CHECK=1

say() { printf 'setup: %s\n' "$*"; }
die() {
    printf 'setup: %s\n' "$@" >&2
    exit 2
}

detect() {
    if [[ -n ${ASCEND_HOME_PATH:-} ]] || command -v npu-smi >/dev/null; then
        echo npu
    elif command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
        echo cuda
    else
        echo cpu
    fi
}

make_venv() {
    command -v "$python" >/dev/null || die "no $python here: install Python 3.10 or newer, or name one with PYTHON=…"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        die "$("$python" --version) is too old: 3.10 or newer is needed; name one with PYTHON=/path/to/python3.11"
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        die "$python cannot make virtual environments: its venv module is not installed." \
            "On Debian and Ubuntu: apt-get install python3-venv (or name another Python with PYTHON=…)"
    if [[ -e $venv && ! -e $venv/pyvenv.cfg && -n $(ls -A "$venv") ]]; then
        die "$venv is there and is no virtual environment: give another folder"
    fi
    say "making $venv with $("$python" --version)"
    local options=()
    [[ $kind != skip ]] || options=(--system-site-packages)
    "$python" -m venv ${options[@]+"${options[@]}"} "$venv"
}

# Does the CPU index answer within seconds, with the pinned version for this Python? Indexes from pip's own settings
# are asked along with it, so the log decides, not the exit status.
cpu_index_answers() {
    local log
    log=$("$venv/bin/python" -m pip -vvv index versions torch --no-input --timeout 5 --retries 0 \
        --index-url "$cpu_index" 2>&1) || return 1
    ! grep -q "Could not fetch URL $cpu_index" <<<"$log" &&
        grep -Eq "Available versions:.*[ ,]${version//./\\.}(\+[a-z0-9.]+)?(,|$)" <<<"$log"
}

torch_version() {
    "$venv/bin/python" -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null || true
}

install_torch() {
    local have
    have=$(torch_version)
    if [[ $kind == skip ]]; then
        [[ -n $have ]] || die "EAGLE_TRAIN_TORCH=skip, but $venv sees no torch" \
            "delete $venv and run again with PYTHON=… naming the Python that has it"
        say "torch $have, as found"
    elif [[ ${have%%+*} == "$version" ]]; then
        say "torch $have is there already (delete $venv to choose another build)"
    elif [[ $kind == cuda || $(uname -s) != Linux ]]; then
        say "torch $version from pip's default index"
        "$venv/bin/python" -m pip install -qq "torch==$version"
    elif cpu_index_answers; then
        say "torch $version, CPU build, from $cpu_index"
        # Its dependencies follow from the default index, with the project.
        "$venv/bin/python" -m pip install -qq --no-deps --index-url "$cpu_index" "torch==$version"
    else
        say "$cpu_index does not answer: torch $version from pip's default index (may be a CUDA build of several GB)"
        "$venv/bin/python" -m pip install -qq "torch==$version"
    fi
}

install_project() {
    local constraints=$root/constraints.txt
    if [[ $kind == skip ]]; then
        constraints=$(mktemp)
        # shellcheck disable=SC2064
        trap "rm -f '$constraints'" EXIT
        grep -Ev '^torch(-npu)?==' "$root/constraints.txt" >"$constraints"
    fi
    say "eagle-train[$extras], editable, with $root/constraints.txt"
    "$venv/bin/python" -m pip install -qq --constraint "$constraints" --editable "$root[$extras]"
}

[[ $kind != auto ]] || kind=$(detect)
case $kind in
cpu | cuda | npu | skip) say "torch for: $kind" ;;
*) die "EAGLE_TRAIN_TORCH=$kind: expected auto, cpu, cuda, npu or skip" ;;
esac
[[ -x $venv/bin/python ]] && "$venv/bin/python" -m pip --version >/dev/null 2>&1 || make_venv
install_torch
if [[ $kind == npu ]]; then
    extras=$extras,npu
    [[ -n ${ASCEND_HOME_PATH:-} ]] ||
        say "CANN is not loaded in this shell: source its set_env.sh before you train (torch_npu needs it to import)"
fi
install_project
# Without CANN in the shell a torch with torch_npu beside it fails to import unless this is 0.
TORCH_DEVICE_BACKEND_AUTOLOAD=0 "$venv/bin/python" -c '
import sys, torch, transformers
built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
py = sys.version.split()[0]
print(f"setup: ready: Python {py}, torch {torch.__version__} ({built}), transformers {transformers.__version__}")'
