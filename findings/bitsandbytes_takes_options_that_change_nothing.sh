#!/usr/bin/env bash
# Guess: bitsandbytes' 32-bit optimizers take the place of torch's of the same name: an option that they document is
# honoured or refused, as RMSprop refuses centered=True and Adam8bit amsgrad=True.
# What happens: SGD takes nesterov=True and dampening, Adam takes amsgrad=True, and the weights are those without them, bit
# for bit. weight_decay of Adam is not torch's either: it shrinks the weights as AdamW does, instead of being added
# to the gradient, so that Adam is AdamW with another default. SGD's decay is torch's. Nothing is said.
# Seen with bitsandbytes 0.50.2, torch 2.15.0 on the CPU (Linux, Python 3.11) on 2026-11-30. Downloads 3 GB.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install --quiet torch==2.15.0 bitsandbytes==0.50.2 numpy==2.4.6
cat >options.py <<'PY'
from importlib.metadata import version

import bitsandbytes.optim
import torch

print("bitsandbytes", version("bitsandbytes"), "torch", torch.__version__)
torch.set_num_threads(1)


def train(module, name, options):
    """Returns a weight after 100 steps along gradients that get smaller."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.ones(64, 64))
    optimizer = getattr(module, name)([weight], lr=1e-2, **options)
    for step in range(100):
        weight.grad = torch.randn(64, 64) / (step + 1)
        optimizer.step()
    return weight.detach()


for name, common, options in (
    ("SGD", {"momentum": 0.9}, {"nesterov": True}),
    ("SGD", {"momentum": 0.9}, {"dampening": 0.5}),
    ("Adam", {}, {"amsgrad": True}),
):
    changes = [
        not torch.equal(train(module, name, common), train(module, name, common | options))
        for module in (torch.optim, bitsandbytes.optim)
    ]
    print(f"{name}, {options}: changes torch's weights: {changes[0]}, bitsandbytes': {changes[1]}")
for name, options in (("SGD", {"momentum": 0.9}), ("Adam", {}), ("AdamW", {})):
    found = train(bitsandbytes.optim, name, options | {"weight_decay": 0.1})
    same = [
        other
        for other in ("SGD", "Adam", "AdamW")
        if torch.allclose(
            found,
            train(torch.optim, other, ({"momentum": 0.9} if other == "SGD" else {}) | {"weight_decay": 0.1}),
            rtol=1e-4,
        )
    ]
    print(f"weight_decay 0.1: bitsandbytes' {name} gives the weights of torch's {same}")
for name, options in (("RMSprop", {"centered": True}), ("Adam8bit", {"amsgrad": True}), ("Adagrad", {"lr_decay": 0.1})):
    try:
        train(bitsandbytes.optim, name, options)
        print(f"{name}, {options}: taken")
    except (NotImplementedError, ValueError) as error:
        print(f"{name}, {options}: refused with a {type(error).__name__}")
PY
env/bin/python options.py 2>errors.txt | tee out.txt || { cat errors.txt; exit 1; }
test "$(grep -c "changes torch's weights: True, bitsandbytes': False$" out.txt)" = 3
grep -qxF "weight_decay 0.1: bitsandbytes' SGD gives the weights of torch's ['SGD']" out.txt
grep -qxF "weight_decay 0.1: bitsandbytes' Adam gives the weights of torch's ['AdamW']" out.txt
grep -qxF "weight_decay 0.1: bitsandbytes' AdamW gives the weights of torch's ['AdamW']" out.txt
test "$(grep -c ": refused with a " out.txt)" = 3
