"""A small model, its data and a transformers.Trainer over them.

`python trainer_cases.py NAME DIRECTORY` runs a scenario on one rank.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import castor
from castor.integrations import transformers as integration

STEPS = 8
BUDGET = 400 << 10


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Random texts."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, 64, (8,), generator=generator)
        return {"input_ids": tokens, "labels": tokens}


def model(dropout: float = 0.1) -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
        attention_dropout=dropout,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def plugin(**settings: Any) -> castor.GeminiPlugin:
    chosen: dict[str, Any] = {
        "device": "cpu", "precision": "fp32", "device_memory": BUDGET, "host_memory": "64MiB",
        "chunk_bytes": "16KiB",
    }  # fmt: skip
    return castor.GeminiPlugin(**(chosen | settings))


def arguments(directory: Path, **settings: Any) -> TrainingArguments:
    chosen: dict[str, Any] = {
        "use_cpu": True, "max_steps": STEPS, "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2, "learning_rate": 1e-3, "weight_decay": 0.1,
        "max_grad_norm": 0.5, "logging_steps": 1, "save_strategy": "no", "report_to": [],
        "disable_tqdm": True, "seed": 5,
    }  # fmt: skip
    return TrainingArguments(output_dir=str(directory), **(chosen | settings))


def train(
    kind: type[Trainer],
    directory: Path,
    *,
    resume: Path | None = None,
    dropout: float = 0.1,
    **settings: Any,
) -> Trainer:
    run = kind(
        model=model(dropout),
        args=arguments(directory, **settings),
        train_dataset=Tokens(),
        eval_dataset=Tokens(),
    )
    run.train(resume_from_checkpoint=None if resume is None else str(resume))
    return run


def logged(run: Trainer, name: str) -> list[float]:
    return [entry[name] for entry in run.state.log_history if name in entry]


def weights(run: Trainer) -> list[torch.Tensor]:
    return [param.detach().clone() for param in run.model.parameters()]


def on_a_rank(directory: Path) -> None:
    """Six steps, and again the last three of them from a checkpoint."""
    rank = os.environ["RANK"]
    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps"}
    settings |= {"eval_steps": 4, "gradient_accumulation_steps": 1, "dropout": 0.0}
    kind = integration.trainer(Trainer, plugin())
    whole = train(kind, directory / "whole", **settings)
    checkpoint = directory / "whole" / "checkpoint-3"
    resumed = train(kind, directory / "resumed", resume=checkpoint, **settings)
    once = train(kind, directory / "once", gradient_accumulation_steps=2, max_steps=2)
    sent = once.castor.report(once.model).rank_sent_bytes  # type: ignore[attr-defined]
    found = {
        "sent": sent / 2 / sum(param.nbytes for param in once.model.parameters()),
        "whole": weights(whole), "resumed": weights(resumed), "log": whole.state.log_history,
        "ranks": whole.castor.report(whole.model).ranks,  # type: ignore[attr-defined]
    }  # fmt: skip
    torch.save(found, directory / f"found.{rank}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv[1]](Path(sys.argv[2]))
