"""Trainers and Accelerators on several ranks, each beside the plain one on torch's DDP.

`python framework_rank_cases.py NAME DIRECTORY` runs a scenario on one rank.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.local_sgd import LocalSGD
from accelerate.utils import DDPCommunicationHookType, set_seed
from torch import nn
from torch.optim import SGD, AdamW
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer, TrainingArguments

import castor
from castor.integrations.accelerate import accelerator
from castor.integrations.transformers import trainer
from zoo import VOCABULARY, llama

WIDTH = 16


class Normed(nn.Module):
    """With a BatchNorm, so that what ranks share besides gradients shows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 32, bias=False), nn.BatchNorm1d(32), nn.Tanh(),
            nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 5),
        )  # fmt: skip

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Rows(Dataset[dict[str, Any]]):
    """Random ones, and which were read."""

    def __init__(self, size: int, seed: int) -> None:
        self.size, self.seed = size, seed
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.read.append(index)
        noise = torch.Generator().manual_seed(1000 * self.seed + index)
        label = int(torch.randint(0, 5, (), generator=noise))
        return {"x": torch.randn(WIDTH, generator=noise), "labels": label}


def plugin() -> castor.GeminiPlugin:
    return castor.GeminiPlugin(
        device="cpu", precision="fp32", device_memory="400KiB", host_memory="64MiB"
    )


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def of_predictions(given: Any) -> dict[str, float]:
    return {"rows": len(given.label_ids), "sum": float(given.predictions.sum())}


def trainers(directory: Path) -> None:
    """Three epochs of an uneven number of rows, and again from the middle of the second."""
    for name in ("plain", "castor"):
        kind = Trainer if name == "plain" else trainer(Trainer, plugin())
        found: dict[str, Any] = {}
        for run in ("whole", "resumed"):
            rows = Rows(37, 1)
            settings = {
                "output_dir": str(directory / name / run), "use_cpu": True, "seed": 5,
                "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4,
                "gradient_accumulation_steps": 2, "num_train_epochs": 3, "learning_rate": 1e-2,
                "max_grad_norm": 0.5, "logging_steps": 1, "eval_strategy": "epoch",
                "save_steps": 4, "report_to": [], "disable_tqdm": True,
            }  # fmt: skip
            own = kind(
                model=Normed(), args=TrainingArguments(**settings), train_dataset=rows,
                eval_dataset=Rows(13, 2), compute_metrics=of_predictions,
            )  # fmt: skip
            checkpoint = directory / name / "whole" / "checkpoint-4"
            own.train(resume_from_checkpoint=str(checkpoint) if run == "resumed" else None)
            found[run] = {
                "log": own.state.log_history, "steps": own.state.global_step, "read": rows.read,
                "state": state_of(own.model), "around": type(own.model_wrapped).__module__,
            }  # fmt: skip
        torch.save(found, directory / f"trainers.{name}.{os.environ['RANK']}.pt")


class Tokens(Dataset[dict[str, Any]]):
    """As long, with other numbers of labels: means of tokens are none of rows."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Any]:
        noise = torch.Generator().manual_seed(index)
        ids = torch.randint(3, VOCABULARY, (12,), generator=noise)
        labels = ids.clone()
        labels[: index % 9] = -100
        return {"input_ids": ids, "labels": labels}


def token_means(directory: Path) -> None:
    """Losses and weights of a language model, whose tokens are counted on all ranks, or on each."""
    for name in ("plain", "castor"):
        kind = Trainer if name == "plain" else trainer(Trainer, plugin())
        found: dict[str, Any] = {}
        for averaged in (True, False):
            settings = {
                "output_dir": str(directory / name / str(averaged)), "use_cpu": True, "seed": 5,
                "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
                "max_steps": 4, "learning_rate": 1e-2, "logging_steps": 1, "report_to": [],
                "disable_tqdm": True, "average_tokens_across_devices": averaged,
                "save_strategy": "no", "optim": "sgd",
            }  # fmt: skip
            torch.manual_seed(7)
            own = kind(model=llama(), args=TrainingArguments(**settings), train_dataset=Tokens())
            own.train()
            found[str(averaged)] = {"log": own.state.log_history, "state": state_of(own.model)}
        torch.save(found, directory / f"token_means.{name}.{os.environ['RANK']}.pt")


def of_each(**settings: Any) -> Iterator[tuple[str, Any]]:
    """An Accelerator of accelerate's, then one on castor."""
    yield "plain", Accelerator(cpu=True, **settings)
    yield "castor", accelerator(Accelerator, plugin())(cpu=True, **settings)


def accelerators(directory: Path) -> None:
    """Two epochs of an uneven number of rows, and the first again from its middle."""
    for name, run in of_each(gradient_accumulation_steps=2):
        found = {
            kind: _in_loop(run, directory / name, resume=kind == "resumed")
            for kind in ("whole", "resumed")
        }
        torch.save(found, directory / f"accelerators.{name}.{os.environ['RANK']}.pt")


def _in_loop(run: Any, directory: Path, *, resume: bool) -> dict[str, Any]:
    run.free_memory()
    set_seed(3)
    rows = Rows(29, 1)
    model: Any = Normed()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader, evaluated, schedule = run.prepare(
        model, optimizer, DataLoader(rows, batch_size=4, shuffle=True),
        DataLoader(Rows(13, 2), batch_size=4),
        torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5),
    )  # fmt: skip
    found: dict[str, Any] = {"losses": [], "norms": [], "rates": [], "evaluated": []}
    if resume:
        run.load_state(directory)
    for epoch in range(2):
        model.train()
        loader.set_epoch(epoch)
        batches = run.skip_first_batches(loader, 2) if resume and epoch == 0 else loader
        for index, batch in enumerate(batches):
            with run.accumulate(model):
                loss = model(**batch)["loss"]
                run.backward(loss)
                if run.sync_gradients:
                    norm = run.clip_grad_norm_(model.parameters(), 0.5)
                    found["norms"].append(float(norm))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            found["losses"].append(loss.item())
            found["rates"].append(optimizer.param_groups[0]["lr"])
            if not resume and epoch == 0 and index == 1:
                run.save_state(directory)
        model.eval()
        with torch.no_grad():
            logits = [run.gather_for_metrics(model(**batch)["logits"]) for batch in evaluated]
        found["evaluated"].append((sum(map(len, logits)), float(torch.cat(logits).sum())))
    return found | {"read": rows.read, "state": state_of(run.unwrap_model(model))}


def as_for_ddp(directory: Path) -> None:
    """What a script written for DDP does with what prepare returns."""
    found: dict[str, Any] = {}
    for name, run in of_each():
        model: Any = Normed()
        model, optimizer = run.prepare(model, SGD(model.parameters(), lr=0.1))
        noise = torch.Generator().manual_seed(run.process_index)
        batch = {"x": torch.randn(4, WIDTH, generator=noise), "labels": torch.arange(4)}
        with model.no_sync():
            run.backward(model(**batch)["loss"])
        own = gradients(model)
        optimizer.zero_grad()
        with run.no_sync(model):
            loss = model(**batch)["loss"]
            with run.trigger_sync_in_backward(model):
                run.backward(loss)
        found[name] = {
            "inner": type(model.module).__name__, "own": own, "mean": gradients(model),
            "names": list(model.state_dict()), "saved": list(run.get_state_dict(model)),
        }  # fmt: skip
    found["stepped alone"] = _in_local_sgd()
    hook = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
    *_, (_, run) = of_each(kwargs_handlers=[hook])
    model = Normed()
    try:
        run.prepare(model, SGD(model.parameters(), lr=0.1))
    except NotImplementedError as error:
        found["refused"] = str(error)
    torch.save(found, directory / f"as_for_ddp.{os.environ['RANK']}.pt")


def _in_local_sgd() -> list[str]:
    """What is said in accelerate's LocalSGD, and in one that is not enabled."""
    said = []
    for enabled in (True, False):
        *_, (_, run) = of_each()
        model: Any = Normed()
        model, optimizer = run.prepare(model, SGD(model.parameters(), lr=0.1))
        sgd = LocalSGD(accelerator=run, model=model, local_sgd_steps=2, enabled=enabled)
        sgd.__enter__()  # its end would average weights
        run.backward(model(torch.ones(4, WIDTH), torch.arange(4))["loss"])
        try:
            optimizer.step()
            said.append("nothing")
        except NotImplementedError as error:
            said.append(str(error))
    return said


def gradients(model: nn.Module) -> torch.Tensor:
    return torch.cat([param.grad.flatten().clone() for param in model.parameters()])  # type: ignore[union-attr]


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv[1]](Path(sys.argv[2]))
