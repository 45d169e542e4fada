#!/usr/bin/env bash
# Guess: transformers keeps packed documents apart by their position_ids (each begins at 0), in training and evaluation.
# What happens: only where the model makes no cache. use_cache is on by default, so that model(input_ids,
# position_ids=...) lets each document attend to those before it, without a warning. With use_cache=False it does not; an
# attention_mask of ones, which says nothing new, switches the mask between documents off again.
# Seen with transformers 5.24.0, torch 2.15.0 (Linux, Python 3.11) on 2026-11-30. Downloads 3 GB.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install --quiet torch==2.15.0 transformers==5.24.0 numpy==2.4.6
cat >packed.py <<'PY'
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, initializer_range=0.2
)
torch.manual_seed(0)
model = LlamaForCausalLM(config).eval()
tokens = torch.randint(config.vocab_size, (1, 16))
positions = torch.arange(8).repeat(2)[None]


@torch.no_grad()
def logits(tokens, **inputs):
    return model(input_ids=tokens, **inputs).logits[:, -8:]


alone = logits(tokens[:, 8:])
print("transformers", transformers.__version__, "torch", torch.__version__)
for what, inputs in {
    "default": {},
    "use_cache=False": {"use_cache": False},
    "use_cache=False and a mask of ones": {"use_cache": False, "attention_mask": torch.ones_like(tokens)},
}.items():
    difference = (logits(tokens, position_ids=positions, **inputs) - alone).abs().max().item()
    print(f"{what}: second document as if alone: {difference < 1e-4} (largest difference of logits {difference:.1e})")
PY
env/bin/python packed.py 2>errors.txt | tee out.txt || { cat errors.txt; exit 1; }
grep -q "^default: second document as if alone: False" out.txt
grep -q "^use_cache=False: second document as if alone: True" out.txt
grep -q "^use_cache=False and a mask of ones: second document as if alone: False" out.txt
