#!/usr/bin/env bash
# Guess: clip_grad_value_ of a model in which no parameter has a gradient does nothing, as clip_grad_norm_ does, which
# returns 0. A loop that clips in every iteration comes there when a micro-batch was skipped, when all that trains sits on
# another pipeline stage, or right behind zero_grad().
# What happens: clip_grad_value_ raises a RuntimeError of the dispatcher's insides, in which neither gradients nor
# clipping are named. clip_grad_norm_ returns 0. With one gradient both work. foreach=False does not help.
# Seen with torch 2.11.0 (Linux, Python 3.11) on 2026-11-29. Downloads 3 GB.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install --quiet torch==2.11.0 numpy==2.4.6
cat >clips.py <<'PY'
import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_


def said(clip, *args, **options):
    try:
        return clip(*args, **options)
    except RuntimeError as error:
        return f"RuntimeError: {str(error).split('.')[0]}"


model = torch.nn.Linear(4, 4)
print("torch", torch.__version__)
print("norm:", said(clip_grad_norm_, model.parameters(), 1.0))
print("value:", said(clip_grad_value_, model.parameters(), 1.0))
print("value, foreach=False:", said(clip_grad_value_, model.parameters(), 1.0, foreach=False))
model(torch.ones(1, 4)).sum().backward()
print("value, with gradients:", said(clip_grad_value_, model.parameters(), 1.0))
PY
env/bin/python clips.py | tee out.txt
grep -qx "norm: tensor(0.)" out.txt
grep -q "^value: RuntimeError: Expected !nested_tensorlist" out.txt
grep -q "^value, foreach=False: RuntimeError: Expected !nested_tensorlist" out.txt
grep -qx "value, with gradients: None" out.txt
