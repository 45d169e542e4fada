#!/usr/bin/env bash
# Guess: a model under accelerate.cpu_offload trains, slowly, or its backward or step raises.
# What happens: forward and backward run and nothing is trained. The hooks give modules other Parameters for the time of
# a forward, and those get the gradients. The model's own have none, on the meta device, and step() passes over them.
# The same loss comes at every step.
# Seen with accelerate 1.15.0, torch 2.15.0 (Linux, Python 3.11) on 2026-11-30. Downloads 3 GB.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install --quiet torch==2.15.0 accelerate==1.15.0 numpy==2.4.6
cat >trains.py <<'PY'
import warnings

import accelerate
import torch
from torch import nn


def losses(offload):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if offload:
        accelerate.cpu_offload(model, execution_device="cpu")
    losses = []
    for _ in range(3):
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        losses.append(round(loss.item(), 6))
        print("gradients:", [param.grad is not None for param in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    return losses


print("accelerate", accelerate.__version__, "torch", torch.__version__)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    plain, offloaded = losses(False), losses(True)
print("losses, plain:", plain)
print("losses, cpu_offload:", offloaded)
print("plain learns:", len(set(plain)) == 3, "- cpu_offload learns:", len(set(offloaded)) > 1, "- warnings:", len(caught))
PY
env/bin/python trains.py 2>errors.txt | tee out.txt || { cat errors.txt; exit 1; }
test "$(grep -c "^gradients: \[True, True, True, True\]$" out.txt)" = 3
test "$(grep -c "^gradients: \[False, False, False, False\]$" out.txt)" = 3
grep -qx "plain learns: True - cpu_offload learns: False - warnings: 0" out.txt
