#!/usr/bin/env bash
# Guess: an optimizer's load_state_dict(state_dict()) gives its states back as they were.
# What happens: for a floating-point parameter each state is cast to the parameter's type, whatever type it had. float32
# moments of bfloat16 parameters lose 16 bits at each resume, and quantised ones (uint8) become floating point. Only an
# entry named "step" is spared. An optimizer that keeps other types has to overrule load_state_dict.
# Seen with torch 2.15.0 (Linux, Python 3.11) on 2026-11-30. Downloads 3 GB.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install --quiet torch==2.15.0 numpy==2.4.6
cat >casts.py <<'PY'
import torch


class Momentum(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})

    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param] = {
                    "step": torch.tensor(1.0),
                    "exact": torch.full(param.shape, 1 / 3),
                    "quantised": torch.full(param.shape, 201, dtype=torch.uint8),
                }


def describe(name, optimizer):
    states = optimizer.state[param].items()
    print(f"{name}:", ", ".join(f"{key} {str(value.dtype)[6:]} {value.reshape(-1)[0].item():.7g}" for key, value in states))


print("torch", torch.__version__)
param = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
before, after = Momentum([param]), Momentum([param])
before.step()
after.load_state_dict(before.state_dict())
describe("before", before)
describe("after", after)
PY
env/bin/python casts.py 2>errors.txt | tee out.txt || { cat errors.txt; exit 1; }
grep -qx "before: step float32 1, exact float32 0.3333333, quantised uint8 201" out.txt
grep -qx "after: step float32 1, exact bfloat16 0.3339844, quantised bfloat16 201" out.txt
