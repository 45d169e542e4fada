#!/usr/bin/env bash
# On a machine with a GPU: builds castor with its GPU parts, runs every test that needs one (no GPU is a
# failure), benchmarks/gpu.py, and last a GPT of 18B parameters under 24 GiB. Results, with the machine's
# description, go to the folder given. What each line proves stands in docs/status.md.
# Usage: gpu_check.sh [FOLDER]     (build/gpu without one)
# PYTHON names an interpreter with the torch to use, and with pytest and scikit-build-core.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

results=${1:-build/gpu}
python=${PYTHON:-python3}
mkdir -p "$results"
results=$(cd "$results" && pwd)
export CASTOR_REQUIRE_CUDA=1

{
  date -u +%FT%TZ
  git rev-parse HEAD 2>/dev/null || echo "no commit"
  nvidia-smi
  nvcc --version
  uname -a
  "$python" -c 'import torch; print("torch", torch.__version__, "CUDA", torch.version.cuda)'
} 2>&1 | tee "$results/machine.txt"

# Kernels for the GPUs that are here, so that ptxas's report is theirs.
architectures=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | tr -d . | sort -u |
  sed 's/$/-real/' | paste -s -d';')
cmake -S . -B build/gpu-cpp -DCASTOR_CUDA=ON -DCASTOR_BUILD_PYTHON=ON -DCASTOR_BUILD_TESTS=ON \
  -DCASTOR_WERROR=ON -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE="$(command -v "$python")" \
  -DCMAKE_CUDA_ARCHITECTURES="$architectures" -DCMAKE_CUDA_FLAGS=-Xptxas=-v
cmake --build build/gpu-cpp -j "$(nproc)" 2>&1 | tee "$results/build.txt"

status=0
ctest --test-dir build/gpu-cpp --output-on-failure --no-tests=error -R 'Gpu' \
  --output-junit "$results/ctest.xml" || status=1

# What Python tests is the sources with the modules just built.
package=build/gpu-cpp/package
rm -rf "$package" && mkdir -p "$package" && cp -r python/castor "$package/"
cp build/gpu-cpp/csrc/python/_C.*.so build/gpu-cpp/csrc/python/_build_info.json \
  build/gpu-cpp/csrc/python/cuda/_cuda.*.so "$package/castor/"
export PYTHONPATH="$PWD/$package${PYTHONPATH:+:$PYTHONPATH}"
"$python" -m pytest tests/python -m "cuda and not slow" --junit-xml="$results/pytest.xml" || status=1
"$python" benchmarks/gpu.py --output "$results/gpu.json" || status=1
"$python" -m pytest tests/python -m "cuda and slow" -s --junit-xml="$results/pytest-slow.xml" || status=1
echo "gpu_check: results in $results, $([[ $status -eq 0 ]] && echo "all passed" || echo FAILED)"
exit "$status"
