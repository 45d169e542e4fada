#!/usr/bin/env bash
# Guess: a parameter that is taken out of optimizer.param_groups (layers that are frozen step by step) is forgotten:
# state_dict() writes what the groups hold.
# What happens: the moments of the parameter stay in optimizer.state, step() goes on, and the next state_dict(), often the
# next checkpoint, hours later, raises KeyError with a number, the id() of the parameter. Behind add_param_group with the
# same parameter it works again; state.pop(parameter) beside the removal avoids it.
# Seen with torch 2.11.0 (Linux, Python 3.11) on 2026-11-29. Downloads 3 GB.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install --quiet torch==2.11.0 numpy==2.4.6
cat >freezes.py <<'PY'
import torch


def saved(optimizer, by_id):
    try:
        return sorted(optimizer.state_dict()["state"])
    except KeyError as error:
        return f"KeyError: the id of {by_id[error.args[0]]}"


def step():
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


model = torch.nn.Linear(4, 4)
by_id = {id(param): name for name, param in model.named_parameters()}
optimizer = torch.optim.AdamW(model.parameters())
print("torch", torch.__version__)
step()
print("all:", saved(optimizer, by_id))
optimizer.param_groups[0]["params"].pop()
model.bias.requires_grad_(False)
step()
print("bias removed:", saved(optimizer, by_id))
entry = optimizer.state.pop(model.bias)
print("and its state:", saved(optimizer, by_id))
optimizer.state[model.bias] = entry
optimizer.add_param_group({"params": [model.bias]})
print("added again:", saved(optimizer, by_id))
PY
env/bin/python freezes.py | tee out.txt
grep -qx "all: \[0, 1\]" out.txt
grep -qx "bias removed: KeyError: the id of bias" out.txt
grep -qx "and its state: \[0\]" out.txt
grep -qx "added again: \[0, 1\]" out.txt
