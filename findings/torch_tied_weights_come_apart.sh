#!/usr/bin/env bash
# Guess: tied weights stay tied: when a model of the meta device gets memory by to_empty(), and when it reads its own
# state dict by load_state_dict(assign=True).
# What happens: each module gets a Parameter of its own. After to_empty the two lie apart and learn apart. After assign
# they are two Parameters over one memory: an optimizer makes two updates of it, each from a part of the gradient, and
# the loss goes another way. Only parameters() counted before and after tells it.
# Seen with torch 2.15.0 (Linux, Python 3.11) on 2026-11-30. Downloads 3 GB.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install --quiet torch==2.15.0 numpy==2.4.6
cat >tied.py <<'PY'
import torch
from torch import nn


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return nn.functional.cross_entropy(self.head(self.embed(tokens)), tokens)


def describe(name, model):
    memory = {param.data_ptr() for param in model.parameters()}
    print(f"{name}: {len(list(model.parameters()))} parameters in {len(memory)} places")


def trained(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(5):
        loss = model(torch.arange(8))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return round(loss.item(), 4)


print("torch", torch.__version__)
torch.manual_seed(0)
model = Tied()
torch.save(model.state_dict(), "tied.pt")
with torch.device("meta"):
    emptied = Tied()
describe("built", model)
describe("after to_empty", emptied.to_empty(device="cpu"))
assigned, copied = Tied(), Tied()
assigned.load_state_dict(torch.load("tied.pt"), assign=True)
copied.load_state_dict(torch.load("tied.pt"))
describe("after assign=True", assigned)
describe("after assign=False", copied)
print("same loss before training:", assigned(torch.arange(8)).item() == copied(torch.arange(8)).item())
print("same loss after five steps:", trained(assigned) == trained(copied))
PY
env/bin/python tied.py 2>errors.txt | tee out.txt || { cat errors.txt; exit 1; }
grep -qx "built: 1 parameters in 1 places" out.txt
grep -qx "after to_empty: 2 parameters in 2 places" out.txt
grep -qx "after assign=True: 2 parameters in 1 places" out.txt
grep -qx "after assign=False: 1 parameters in 1 places" out.txt
grep -qx "same loss before training: True" out.txt
grep -qx "same loss after five steps: False" out.txt
