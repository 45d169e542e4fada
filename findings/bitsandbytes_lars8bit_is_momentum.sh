#!/usr/bin/env bash
# Guess: LARS8bit is LARS with 8-bit states: the step of each layer is bounded by max_unorm times the norm of its weights,
# and learning rates of LARS, far above those of SGD, are right for it.
# What happens: weights of 4,096 values and more get 8-bit states, whose kernel does not take max_unorm: their step is
# that of SGD with momentum, bit for bit the one of SGD8bit. Smaller ones have 32-bit states and are bounded. So one
# model is trained by two algorithms, and no value of max_unorm changes what its large layers do. Nothing is said;
# LAMB8bit, which has the same kernel, refuses values of max_unorm. LARS and LARS32bit are LARS.
# Seen with bitsandbytes 0.50.2, torch 2.15.0 on the CPU (Linux, Python 3.11) on 2026-11-30. Downloads 3 GB.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install --quiet torch==2.15.0 bitsandbytes==0.50.2 numpy==2.4.6
cat >lars.py <<'PY'
from importlib.metadata import version

import torch
from bitsandbytes.optim import LARS, LARS8bit, SGD8bit

print("bitsandbytes", version("bitsandbytes"), "torch", torch.__version__)
torch.set_num_threads(1)


def train(optimizer_class, size, **options):
    """Returns a weight of size x size after 10 steps, and the largest step relative to the weight's norm."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(size, size))
    optimizer = optimizer_class([weight], lr=1.0, momentum=0.9, **options)
    largest = 0.0
    for _ in range(10):
        before = weight.detach().clone()
        weight.grad = torch.randn(size, size)
        optimizer.step()
        largest = max(largest, ((weight.detach() - before).norm() / before.norm()).item())
    return weight.detach(), largest


for size in (32, 128):
    momentum = train(SGD8bit, size)[0]
    for optimizer_class in (LARS, LARS8bit):
        for bound in (0.02, 0.001):
            weight, largest = train(optimizer_class, size, max_unorm=bound)
            same = "the same" if torch.equal(weight, momentum) else "other"
            print(
                f"{optimizer_class.__name__}, {size} x {size}, max_unorm {bound}: steps of up to {largest:.4f} of the norm, "
                f"{same} weights as of SGD8bit"
            )
PY
env/bin/python lars.py 2>errors.txt | tee out.txt || { cat errors.txt; exit 1; }
for bound in 0.02 0.001; do
    for kind in "LARS, 32" "LARS8bit, 32" "LARS, 128"; do
        grep -qE "^$kind x [0-9]+, max_unorm $bound: steps of up to $bound[0]* of the norm, other weights as of SGD8bit$" out.txt
    done
    grep -qE "^LARS8bit, 128 x 128, max_unorm $bound: steps of up to 0.[1-9][0-9]+ of the norm, the same weights as of SGD8bit$" out.txt
done
