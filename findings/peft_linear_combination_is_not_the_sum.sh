#!/usr/bin/env bash
# Guess: add_weighted_adapter(["a", "b"], [1, 1], combination_type="linear") makes an adapter whose change of the weights
# is a's change plus b's: the linear combination that its name says.
# What happens: A and B are combined each for itself, and the change of the new adapter is (B1 + B2)(A1 + A2). The cross
# terms B1 A2 + B2 A1 come with it: with two random adapters of the same rank, the change is about as far from the sum as
# the sum is long. Nothing is said. "cat" and "svd" (of the rank of both together) give the sum. Weights of one adapter
# alone, 2 or -1, are right in "linear" too, so that a trial with one adapter shows nothing.
# Seen with peft 0.21.2 and torch 2.15.0 (Linux, Python 3.11) on 2026-11-30. Downloads 3 GB.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install --quiet torch==2.15.0 numpy==2.4.6 transformers==5.24.0 accelerate==1.15.0 peft==0.21.2
cat >combine.py <<'PY'
import peft
import torch
from torch import nn

print("torch", torch.__version__, "peft", peft.__version__)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64, bias=False)

    def forward(self, x):
        return self.linear(x)


torch.manual_seed(0)
config = peft.LoraConfig(target_modules=["linear"], r=4, init_lora_weights=False)
model = peft.get_peft_model(Model(), config, adapter_name="first")
model.add_adapter("second", config)
layer = model.base_model.model.linear
wanted = layer.get_delta_weight("first") + layer.get_delta_weight("second")
for kind, more in (("linear", {}), ("cat", {}), ("svd", {"svd_rank": 8})):
    model.add_weighted_adapter(["first", "second"], [1.0, 1.0], kind, combination_type=kind, **more)
    error = (layer.get_delta_weight(kind) - wanted).norm() / wanted.norm()
    print(f"{kind}: distance from the sum / length of the sum {error.item():.2f}")
model.add_weighted_adapter(["first"], [2.0], "twice", combination_type="linear")
error = (layer.get_delta_weight("twice") - 2 * layer.get_delta_weight("first")).norm()
print(f"linear, one adapter, weight 2: distance from its double {error.item():.2f}")
PY
env/bin/python combine.py 2>errors.txt | tee out.txt || { cat errors.txt; exit 1; }
grep -qE "^linear: distance from the sum / length of the sum (0\.[89]|1\.)" out.txt
grep -qx "cat: distance from the sum / length of the sum 0.00" out.txt
grep -qx "svd: distance from the sum / length of the sum 0.00" out.txt
grep -qx "linear, one adapter, weight 2: distance from its double 0.00" out.txt
