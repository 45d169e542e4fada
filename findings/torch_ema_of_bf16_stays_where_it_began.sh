#!/usr/bin/env bash
# Guess: AveragedModel with an exponential average (get_ema_multi_avg_fn(0.999)) of a bfloat16 model follows the model, with
# bfloat16's error, or keeps its averages in float32.
# What happens: averages are in the model's type. A step of the average is a thousandth of its distance from the weight,
# and bfloat16 rounds that away. Weights go from 1 to 2 and stay there: their average is 1 for ever. Nothing is said, and
# what is saved as the averaged model is the one that training began with. With 0.9 the average stops short of 2; in
# float32 it arrives.
# Seen with torch 2.15.0 (Linux, Python 3.11) on 2026-11-30. Downloads 3 GB.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install --quiet torch==2.15.0 numpy==2.4.6
cat >ema.py <<'PY'
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

print("torch", torch.__version__)


def average(dtype, decay):
    """Averages weights that go from 1 to 2 in 1,000 steps and stay there for 9,000."""
    model = nn.Linear(4, 4, bias=False).to(dtype)
    with torch.no_grad():
        model.weight.fill_(1)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
    for step in range(10_000):
        with torch.no_grad():
            model.weight.fill_(min(2.0, 1 + step / 1000))
        averaged.update_parameters(model)
    assert averaged.module.weight.dtype is dtype
    return averaged.module.weight[0, 0].item()


for dtype in (torch.float32, torch.bfloat16):
    for decay in (0.999, 0.9):
        print(f"{dtype}, decay {decay}: the average is {average(dtype, decay):.4f}, the weights are 2")
PY
env/bin/python ema.py 2>errors.txt | tee out.txt || { cat errors.txt; exit 1; }
grep -qE "^torch.float32, decay 0.999: the average is (1.9999|2.0000), the weights are 2$" out.txt
grep -qx "torch.bfloat16, decay 0.999: the average is 1.0000, the weights are 2" out.txt
grep -qx "torch.bfloat16, decay 0.9: the average is 1.9688, the weights are 2" out.txt
