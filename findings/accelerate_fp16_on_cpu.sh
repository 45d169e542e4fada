#!/usr/bin/env bash
# Guess: Accelerator(mixed_precision="fp16", cpu=True) computes in float16 with a gradient scaler, as it does on a GPU
# (torch has both for the CPU), or it refuses.
# What happens: nothing is said, accelerator.mixed_precision is "fp16", and the model computes in float32, without
# autocast and without a scaler. The same call with "bf16" does compute in bfloat16. Who measures the memory or the
# losses of fp16 on a machine without a GPU, for instance in CI, measures float32. Trainer(fp16=True, use_cpu=True)
# stands on the same call.
# Seen with accelerate 1.15.0 and torch 2.11.0 (Linux, Python 3.11) on 2026-11-28. Downloads 3 GB.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install --quiet torch==2.11.0 accelerate==1.15.0
cat >computes_in.py <<'PY'
import warnings

import accelerate
import torch


def trained(precision):
    """Returns the setting, the type that a layer computes in, the scaler and the number of warnings."""
    types = []
    accelerate.state.AcceleratorState._reset_state(True)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        accelerator = accelerate.Accelerator(mixed_precision=precision, cpu=True)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        model[0].register_forward_hook(lambda module, inputs, output: types.append(output.dtype))
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        accelerator.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
    ours = [w for w in said if "accelerate" in w.filename]
    return accelerator.mixed_precision, types[0], accelerator.scaler, len(ours)


print("accelerate", accelerate.__version__, "torch", torch.__version__)
for precision in ("bf16", "fp16"):
    print(precision, *trained(precision))
with torch.autocast("cpu", torch.float16):
    own = torch.nn.Linear(4, 4)(torch.ones(2, 4)).dtype
print("torch's own autocast on the CPU:", own)
assert trained("bf16") == ("bf16", torch.bfloat16, None, 0)
assert trained("fp16") == ("fp16", torch.float32, None, 0), "it computes otherwise now"
assert own == torch.float16
PY
env/bin/python -W "ignore:Failed to initialize NumPy" computes_in.py
