#!/usr/bin/env bash
# Guess: PeftModel.from_pretrained says so when an adapter does not fit its base: one of a model with fewer layers is told
# with a warning that names the missing keys, and one of a model with more layers alike.
# What happens: only what the base lacks in the file is told. Weights of an adapter that have no place in the base are
# dropped without a word, so that an adapter of the larger sibling of a model (same width) loads, half of it.
# Seen with peft 0.21.2, transformers 5.24.0, torch 2.15.0 (Linux, Python 3.11) on 2026-11-29. Downloads 3 GB.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install --quiet torch==2.15.0 transformers==5.24.0 peft==0.21.2 accelerate==1.15.0
cat >fits.py <<'PY'
import warnings

import peft
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM


def llama(layers):
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=layers,
            num_attention_heads=4, num_key_value_heads=4,
        )
    )


def saved(layers):
    folder = f"adapter-of-{layers}"
    get_peft_model(llama(layers), LoraConfig(target_modules=["q_proj"])).save_pretrained(folder)
    return folder


def loaded(folder, layers):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = PeftModel.from_pretrained(llama(layers), folder)
    adapted = sum("lora_A" in name for name, _ in model.named_parameters())
    told = sum("missing adapter keys" in str(one.message) for one in said)
    others = [str(one.message) for one in said if "unexpected" in str(one.message).lower()]
    return f"{adapted} layers adapted, {told} warnings of missing keys, {len(others)} of unexpected ones"


print("peft", peft.__version__, "transformers", transformers.__version__)
print("of 1 layer, into 2:", loaded(saved(1), 2))
print("of 4 layers, into 2:", loaded(saved(4), 2))
PY
env/bin/python fits.py 2>/dev/null | tee out.txt
grep -qx "of 1 layer, into 2: 2 layers adapted, 1 warnings of missing keys, 0 of unexpected ones" out.txt
grep -qx "of 4 layers, into 2: 2 layers adapted, 0 warnings of missing keys, 0 of unexpected ones" out.txt
