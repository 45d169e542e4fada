#!/usr/bin/env bash
# Guess: torch.autocast around a whole training loop does what it does around each forward pass, or is slower at most:
# optimizer steps change the weights, and the next forward computes with them.
# What happens: autocast keeps its 16-bit copy of each weight until the outermost context ends, and an optimizer's step
# does not throw it away. Every forward computes with the weights that the loop began with. The loss of step 60 is that of
# step 1 to the last bit, while the optimizer moves the weights further each step along the same gradient: they are
# saved, and are no trained model. Nothing is said. cache_enabled=False, or a context around each forward, trains.
# Seen with torch 2.15.0 (Linux, Python 3.11), on the CPU in bfloat16, on 2026-11-30. Downloads 3 GB.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install --quiet torch==2.15.0 numpy==2.4.6
cat >autocast.py <<'PY'
import contextlib

import torch
from torch import nn

print("torch", torch.__version__)


def train(around_loop, around_forward):
    """Trains a small network for 60 steps under the contexts that are made by the two functions; gives its losses."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    x = torch.randn(64, 16)
    target = 2 * x[:, :1]
    losses = []
    with around_loop():
        for _ in range(60):
            with around_forward():
                output = model(x)
            loss = nn.functional.mse_loss(output.float(), target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def autocast(**options):
    return lambda: torch.autocast("cpu", torch.bfloat16, **options)


for name, contexts in {
    "around the loop": (autocast(), contextlib.nullcontext),
    "around the loop, without cache": (autocast(cache_enabled=False), contextlib.nullcontext),
    "around each forward": (contextlib.nullcontext, autocast()),
}.items():
    losses = train(*contexts)
    print(f"{name}: different losses {len(set(losses))}, last / first {losses[-1] / losses[0]:.3f}")
PY
env/bin/python autocast.py 2>errors.txt | tee out.txt || { cat errors.txt; exit 1; }
grep -qx "around the loop: different losses 1, last / first 1.000" out.txt
grep -qE "^around the loop, without cache: different losses (59|60), last / first 0\.00" out.txt
grep -qE "^around each forward: different losses (59|60), last / first 0\.00" out.txt
