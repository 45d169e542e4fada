#!/usr/bin/env bash
# Guess: get_state_dict(model, optimizer) of torch.distributed.checkpoint only reads. A checkpoint before the first step,
# or a state to load into when there is one to resume from, leaves training as it is.
# What happens: an optimizer without states gets them by a step with gradients of zero and a learning rate of zero, which
# counts. Adam's bias correction then takes the first real step for the second, and it is a quarter shorter. With the
# weight decay of Adam and SGD, which goes through the gradient, averages and momentum begin at the decay of the weights
# and not at zero. So whether a run wrote a checkpoint at step 0 changes all of its weights. Nothing is said.
# Seen with torch 2.15.0 (Linux, Python 3.11) on 2026-11-30. Downloads 3 GB.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install --quiet torch==2.15.0 numpy==2.4.6
cat >reads.py <<'PY'
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

torch.set_num_threads(1)
print("torch", torch.__version__)


def train(make, reads):
    """Returns the length of the first step, and the weights after 20."""
    torch.manual_seed(0)
    model = nn.Linear(32, 32, bias=False)
    optimizer = make(model.parameters())
    if reads:
        _, states = get_state_dict(model, optimizer)
        state = states["state"]["weight"]
        found = {name: float(value.abs().max()) for name, value in state.items() if value is not None}
        print("    states that were read before the first step:", {name: f"{most:.1e}" for name, most in found.items()})
    first = model.weight.detach().clone()
    length = None
    for _ in range(20):
        inputs = torch.randn(8, 32)
        (model(inputs) - inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        length = length or (model.weight.detach() - first).norm().item()
    return length, model.weight.detach()


for name, make in (
    ("SGD", lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)),
    ("SGD with decay", lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1)),
    ("AdamW", lambda params: torch.optim.AdamW(params, lr=1e-3)),
    ("Adam with decay", lambda params: torch.optim.Adam(params, lr=1e-3, weight_decay=0.1)),
):
    print(name)
    (one, plain), (other, read) = train(make, reads=False), train(make, reads=True)
    same = "the same" if torch.equal(plain, read) else "other"
    print(f"{name}: the first step is {other / one:.3f} of its length, {same} weights after 20 steps")
PY
env/bin/python reads.py 2>errors.txt | tee out.txt || { cat errors.txt; exit 1; }
grep -qx "SGD: the first step is 1.000 of its length, the same weights after 20 steps" out.txt
grep -qx "SGD with decay: the first step is 1.140 of its length, other weights after 20 steps" out.txt
grep -qx "AdamW: the first step is 0.744 of its length, other weights after 20 steps" out.txt
grep -qx "Adam with decay: the first step is 0.784 of its length, other weights after 20 steps" out.txt
