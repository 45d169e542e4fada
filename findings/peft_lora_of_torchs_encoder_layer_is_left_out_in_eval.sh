#!/usr/bin/env bash
# Guess: LoRA on linear1 and linear2 of torch's own nn.TransformerEncoderLayer computes in eval() what it computed in
# train(), as it does for any other model with Linear layers: dropout is 0, so both are the same function.
# What happens: in eval() the layer leaves its submodules aside and gives linear1.weight and linear2.weight to one fused
# kernel. PEFT's layers answer to .weight with the frozen base weight. So the adapter trains, its loss falls, and every
# evaluation is the base model's, bit for bit, with gradients switched off or on (frozen weights ask for none, which is
# what the layer looks at). Nothing is said. torch.backends.mha.set_fastpath_enabled(False), or merging the adapter, gives
# the adapter's numbers.
# Seen with torch 2.15.0 and peft 0.21.2 (Linux, Python 3.11) on 2026-11-30. Downloads 3 GB.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install --quiet torch==2.15.0 numpy==2.4.6 transformers==5.24.0 accelerate==1.15.0 peft==0.21.2
cat >encoder.py <<'PY'
import peft
import torch
from torch import nn

print("torch", torch.__version__, "peft", peft.__version__)
torch.manual_seed(0)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x):
        return self.encoder(x)


def difference(one, other):
    return (one - other).abs().max().item()


x, target = torch.randn(8, 5, 32), torch.randn(8, 5, 32)
model = Encoder()
with torch.no_grad():
    base = model.eval()(x)
model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["linear1", "linear2"]))
model.train()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
losses = []
for _ in range(50):
    loss = nn.functional.mse_loss(model(x), target)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(f"loss of the first step {losses[0]:.3f}, of the last {losses[-1]:.3f}")
with torch.no_grad():
    trained = model(x)
    model.eval()
    evaluated = model(x)
with_gradients = model(x).detach()
torch.backends.mha.set_fastpath_enabled(False)
with torch.no_grad():
    slow = model(x)
torch.backends.mha.set_fastpath_enabled(True)
print("train() has moved from the base model:", difference(trained, base) > 0.1)
print("eval() is the base model:", difference(evaluated, base) == 0)
print("eval() with gradients on is the base model:", difference(with_gradients, base) == 0)
print("eval() without the fused kernel is what was trained:", difference(slow, trained) < 1e-5)
with torch.no_grad():
    merged = model.merge_and_unload().eval()(x)
print("merged, it is what was trained:", difference(merged, trained) < 1e-4)
assert losses[-1] < 0.9 * losses[0]
PY
env/bin/python encoder.py 2>errors.txt | tee out.txt || { cat errors.txt; exit 1; }
[ "$(grep -c ': True$' out.txt)" = 5 ]
