#!/usr/bin/env bash
# On a machine with a GPU: runs every test that needs one, benchmarks/gpu.py and a GPT of 18B parameters
# under 24 GiB, with a castor that is built here, or from a wheel: gpu_check.py --help tells.
# PYTHON names an interpreter with the torch to use (and, to build, with pytest and scikit-build-core).
# Usage: gpu_check.sh [--wheel FILE] [--phase NAME]... [--results DIR] [--again] [--list]
set -euo pipefail

python=${PYTHON:-}
if [[ -z $python ]]; then
  for candidate in python3.12 python3; do
    if command -v "$candidate" >/dev/null; then
      python=$candidate
      break
    fi
  done
fi
if [[ -z $python ]]; then
  echo "gpu_check: no python3 on PATH; name one that has torch in PYTHON" >&2
  exit 1
fi
exec "$python" "${BASH_SOURCE[0]%/*}/gpu_check.py" "$@"
