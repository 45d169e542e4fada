"""A Hugging Face model trained inside a device budget: the script that the README shows."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from castor import Booster, GeminiPlugin

config = GPT2Config(vocab_size=2048, n_embd=256, n_layer=8, n_head=8, n_positions=128)
model = GPT2LMHeadModel(config)  # 6.9M parameters: plain training would keep 111 MB of state
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

booster = Booster(plugin=GeminiPlugin(device="cpu", device_memory="80MiB", max_norm=1.0))
model, optimizer, *_ = booster.boost(model, optimizer)

tokens = torch.randint(config.vocab_size, (2, 128))
for _ in range(20):
    loss = model(input_ids=tokens, labels=tokens).loss
    booster.backward(loss, optimizer)
    optimizer.step()
    optimizer.zero_grad()
print(f"loss {loss.item():.3f}\n{booster.report()}")
