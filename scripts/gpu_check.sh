#!/usr/bin/env bash
# On a machine with a GPU: runs every test that needs one, benchmarks/gpu.py and a GPT of 18B parameters
# under 24 GiB, with a castor that is built here, or from a wheel: gpu_check.py --help tells.
# PYTHON names an interpreter with the torch to use (and, to build, with pytest and scikit-build-core).
# Usage: gpu_check.sh [--wheel FILE] [--phase NAME]... [--results DIR] [--again] [--list]
set -euo pipefail

# A pyenv shim is on PATH whether or not its version is switched on; it then fails here.
has_torch='import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)'
python=${PYTHON:-}
for candidate in python3.12 python3 python; do
  if [[ -z $python ]] && "$candidate" -c "$has_torch" 2>/dev/null; then
    python=$candidate
  fi
done
if [[ -z $python ]]; then
  echo "gpu_check: neither python3.12 nor python3 nor python has torch; name one that has in PYTHON" >&2
  exit 1
fi
exec "$python" "${BASH_SOURCE[0]%/*}/gpu_check.py" "$@"
