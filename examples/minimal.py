"""A Hugging Face model trained inside a device budget: the script that the README shows."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from castor import Booster, GeminiPlugin

config = GPT2Config(vocab_size=2048, n_embd=256, n_layer=8, n_head=8, eos_token_id=0)
model = GPT2LMHeadModel(config)  # 7.1M parameters: plain training holds 109 MiB and activations
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

booster = Booster(plugin=GeminiPlugin(device_memory="64MiB", max_norm=1.0))
model, optimizer, *_ = booster.boost(model, optimizer)

tokens = torch.randint(config.vocab_size, (2, 64))
for _ in range(20):
    loss = model(input_ids=tokens, labels=tokens).loss
    booster.backward(loss, optimizer)
    optimizer.step()
    optimizer.zero_grad()
print(f"loss {loss.item():.3f}\n{booster.report()}")
