"""Checkpoints: durable, verified, in the layouts of Hugging Face and torch.optim."""
