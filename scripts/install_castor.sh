#!/usr/bin/env bash
# Builds castor from this folder and installs it, with a line for each tenth of what is compiled.
# What pip and the compiler say is shown if they fail.
# Usage: install_castor.sh PYTHON [ARGUMENT OF PIP...]
set -uo pipefail

python=$1
shift
log=$(mktemp)
trap 'rm -f "$log"' EXIT

"$python" -m pip install --verbose --no-build-isolation --no-deps --no-index --force-reinstall "$@" . 2>&1 |
  tee "$log" |
  # Ninja's lines, which pip indents: [done/all] what.
  awk 'match($0, /^ *\[[0-9]+\/[0-9]+\]/) {
         split(substr($0, RSTART, RLENGTH), part, /[^0-9]+/)
         if (int(10 * part[2] / part[3]) > told) {
           told = int(10 * part[2] / part[3])
           printf "compiling: %d of %d files\n", part[2], part[3]
           fflush()
         }
       }'
if [[ ${PIPESTATUS[0]} -ne 0 ]]; then
  cat "$log" >&2
  exit 1
fi
