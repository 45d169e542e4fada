"""Models and machines of the tests of castor estimate, and the runs that they are compared with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from castor import Booster, GeminiPlugin
from castor.estimate import Machine, machine
from castor.runtime.engine import engine_of

SMALL: dict[str, Any] = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 512,
    "n_embd": 64,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 64,
}
GPT_18B: dict[str, Any] = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 50257,
    "n_embd": 6144,
    "n_layer": 40,
    "n_head": 48,
    "n_positions": 2048,
}
MIB = 2**20

OPTIONS: dict[str, object] = {
    "policy": "auto",
    "offload_optim_frac": 0.0,
    "offload_param_frac": 0.0,
    "margin_ratio": 0.0,
    "max_prefetch": 1,
    "device_bytes": MIB,
    "host_bytes": 2**40,
    "nvme_bytes_per_second": 0.0,
    "ranks_sharing": 1,
    "reduced_on": "host",
    "h2d_bytes_per_second": 1.0,
    "d2h_bytes_per_second": 1.0,
    "dram_bytes_per_second": 1.0,
    "update_bytes_per_second": 0.0,
    "device_update_fraction": 0.0,
    "device_memory_bytes_per_second": 1.0,
    "parameter_copies": "overlapped",
    "gradient_copies": "overlapped",
    "update_cores": "own",
    "overlap": "none",
    "num_ranks": 1,
    "gathering_ranks": 1,
    "with_norm": False,
}


def write(folder: Path, config: Any) -> Path:
    path = folder / "config.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config), encoding="utf-8")
    return path


def small_machine(**changes: Any) -> Machine:
    figures: dict[str, Any] = {
        "device_memory": "8MiB",
        "host_memory": "1GiB",
        "h2d": "1GB/s",
        "dram": "10GB/s",
        "flops": "1T",
    }
    return machine(**(figures | changes))


def train(
    device_memory: str | int,
    steps: int = 3,
    *,
    model: dict[str, Any] = SMALL,
    batch: int = 2,
    **settings: Any,
) -> Any:
    """The session of a GPT-2 after some steps of one batch, in fp32 unless set."""
    torch.manual_seed(0)
    config = GPT2Config(**{k: v for k, v in model.items() if k != "model_type"}, use_cache=False)
    config.loss_type = "ForCausalLM"
    gpt = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(gpt.parameters())
    settings = {"activations": "keep"} | settings
    booster = Booster(plugin=GeminiPlugin(device="cpu", device_memory=device_memory, **settings))
    gpt, optimizer, *_ = booster.boost(gpt, optimizer)
    tokens = torch.zeros((batch, 64), dtype=torch.long)
    for _ in range(steps):
        loss = gpt(input_ids=tokens, labels=tokens).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return engine_of(gpt).session
