#!/usr/bin/env bash
# Guess: from_pretrained(path).to(torch.bfloat16) and from_pretrained(path, dtype=torch.bfloat16) are the same model.
# What happens: the parameters are, but .to() also rounds the rotary frequencies, a buffer, to bfloat16, of 8 bits, and
# they are multiplied with positions. The error of the logits grows with the position: at 1,500 it is several times that
# of bfloat16. from_pretrained(dtype=...) leaves the buffer in float32. .half() rounds it in the same way.
# Seen with transformers 5.24.0, torch 2.15.0 (Linux, Python 3.11) on 2026-11-30. Downloads 3 GB.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install --quiet torch==2.15.0 transformers==5.24.0 numpy==2.4.6
cat >rotary.py <<'PY'
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

transformers.utils.logging.disable_progress_bar()
config = LlamaConfig(
    vocab_size=64, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, initializer_range=0.2
)
torch.manual_seed(0)
LlamaForCausalLM(config).save_pretrained("model")
read = LlamaForCausalLM.from_pretrained
models = {"float32": read("model"), "dtype": read("model", dtype=torch.bfloat16), "to": read("model").to(torch.bfloat16)}
tokens = torch.randint(config.vocab_size, (1, 2000))
with torch.no_grad():
    logits = {name: model(tokens).logits.float() for name, model in models.items()}
print("transformers", transformers.__version__, "torch", torch.__version__)
same = all(map(torch.equal, models["dtype"].state_dict().values(), models["to"].state_dict().values()))
print("the same parameters:", same)
print("frequencies:", *(str(models[name].model.rotary_emb.inv_freq.dtype) for name in ("dtype", "to")))
errors = {}
for name in ("dtype", "to"):
    for start, end in ((0, 64), (1500, 2000)):
        difference = (logits[name] - logits["float32"])[:, start:end]
        errors[name, start] = (difference.square().mean().sqrt() / logits["float32"].std()).item()
        print(f"{name}: error at positions {start} to {end}, of the logits' deviation: {errors[name, start]:.3f}")
print("error far from the start at least 3 times as large:", errors["to", 1500] > 3 * errors["dtype", 1500])
print("near the start at least 3 times:", errors["to", 0] > 3 * errors["dtype", 0])
PY
env/bin/python rotary.py 2>errors.txt | tee out.txt || { cat errors.txt; exit 1; }
grep -qx "the same parameters: True" out.txt
grep -qx "frequencies: torch.float32 torch.bfloat16" out.txt
grep -qx "error far from the start at least 3 times as large: True" out.txt
grep -qx "near the start at least 3 times: False" out.txt
