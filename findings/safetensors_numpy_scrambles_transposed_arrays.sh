#!/usr/bin/env bash
# Guess: safetensors.numpy writes the values of an array, whatever its layout in memory, or refuses one that is not in C
# order, as safetensors.torch does.
# What happens: up to 0.7.0 it wrote the values. 0.8.0 takes the memory as it lies under the shape of the array: a
# transposed weight, the usual thing where weights of Keras or JAX are converted, is read back with all values in other
# places. Shape, type, sum and norm are right. Nothing is said, and an array of Fortran order is as "contiguous and
# dense" as the documentation wants it. np.ascontiguousarray before saving avoids it.
# Seen with safetensors 0.8.0 and 0.7.0, numpy 2.4.6 (Linux, Python 3.11) on 2026-11-30. Downloads 20 MB.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
cat >transposed.py <<'PY'
import numpy as np
import safetensors
from safetensors.numpy import load, load_file, save, save_file

weight = np.arange(12, dtype=np.float32).reshape(3, 4)
print("safetensors", safetensors.__version__, "numpy", np.__version__)
for name, array in (("C order", weight), ("transposed", weight.T), ("transposed, copied", np.ascontiguousarray(weight.T))):
    save_file({"weight": array}, "weight.safetensors")
    for how, read in (("a file", load_file("weight.safetensors")["weight"]), ("bytes", load(save({"weight": array}))["weight"])):
        assert (read.shape, read.dtype, read.sum()) == (array.shape, array.dtype, array.sum())
        print(f"{name}, through {how}: {int((read == array).sum())} of 12 values are in their places")
PY
for version in 0.7.0 0.8.0; do
    python3 -m venv "$version"
    "$version/bin/pip" install --quiet safetensors==$version numpy==2.4.6
    "$version/bin/python" transposed.py 2>errors.txt | tee $version.txt || { cat errors.txt; exit 1; }
    test "$(grep -c "^C order, .*: 12 of 12 values are in their places$" $version.txt)" = 2
    test "$(grep -c "^transposed, copied, .*: 12 of 12 values are in their places$" $version.txt)" = 2
done
test "$(grep -c "^transposed, through .*: 12 of 12 values are in their places$" 0.7.0.txt)" = 2
test "$(grep -c "^transposed, through .*: 2 of 12 values are in their places$" 0.8.0.txt)" = 2
