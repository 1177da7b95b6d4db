#!/usr/bin/env bash
# The tests, in one process: what `make test` runs. `--full` adds those marked slow; the rest goes to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
options=()
if [[ ${1:-} == --full ]]; then
    shift
    options=(-m "")
fi
exec "${PY:-.venv/bin/python}" -m pytest --durations=10 ${options[@]+"${options[@]}"} "$@"
