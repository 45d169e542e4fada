#!/usr/bin/env bash
# Guess: from_pretrained(..., gguf_file=...) computes what llama.cpp computes from the same file, or says what it leaves out.
# What happens: the config is built from a list of keys, and what is not on it has the class's default. Rotary scaling
# (llama.rope.scaling.*, the tensor rope_freqs.weight of Llama 3.1) and the biases of attention are dropped without an
# error, so that the model answers otherwise. qwen3.attention.key_length is not read either: a dense Qwen3 whose heads
# have another width than 128 cannot be loaded (the weights do not fit).
# Seen with transformers 5.24.0, gguf 0.19.0, torch 2.15.0 (Linux, Python 3.11) on 2026-11-29. Downloads 3 GB.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install --quiet torch==2.15.0 transformers==5.24.0 gguf==0.19.0 accelerate==1.15.0
cat >forgets.py <<'PY'
import gguf
import numpy as np
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

transformers.logging.set_verbosity_error()
rng = np.random.default_rng(0)


def values(*shape):
    return rng.standard_normal(shape, dtype=np.float32)


def write(name, architecture, head_dim, bias):
    writer = gguf.GGUFWriter(name, architecture)
    writer.add_vocab_size(64)
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(4.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([str(i) for i in range(64)])
    writer.add_tensor("token_embd.weight", values(64, 32))
    writer.add_tensor("output_norm.weight", values(32))
    for norm in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"blk.0.{norm}.weight", values(32))
    for part in ("q", "k", "v"):
        writer.add_tensor(f"blk.0.attn_{part}.weight", values(2 * head_dim, 32))
        if bias:
            writer.add_tensor(f"blk.0.attn_{part}.bias", values(2 * head_dim))
    writer.add_tensor("blk.0.attn_output.weight", values(32, 2 * head_dim))
    for part, shape in (("gate", (64, 32)), ("up", (64, 32)), ("down", (32, 64))):
        writer.add_tensor(f"blk.0.ffn_{part}.weight", values(*shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


print("transformers", transformers.__version__)
write("llama.gguf", "llama", 16, bias=True)
model = AutoModelForCausalLM.from_pretrained(".", gguf_file="llama.gguf")
print("llama with linear rotary scaling by 4:", model.config.rope_parameters["rope_type"])
print("llama with biases of attention:", model.model.layers[0].self_attn.q_proj.bias)
write("qwen3.gguf", "qwen3", 64, bias=False)
print("qwen3 with heads of 64:", AutoConfig.from_pretrained(".", gguf_file="qwen3.gguf").head_dim)
PY
env/bin/python forgets.py 2>/dev/null | tee out.txt
grep -qx "llama with linear rotary scaling by 4: default" out.txt
grep -qx "llama with biases of attention: None" out.txt
grep -qx "qwen3 with heads of 64: 128" out.txt
