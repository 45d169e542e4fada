"""A Trainer of Lightning's on ranks whose module differentiates and steps by itself, as GANs do.

torchrun --nproc-per-node 2 lightning_manual.py DIRECTORY; knows nothing of castor.
"""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning_ranks import loader
from torch import nn

warnings.filterwarnings("ignore")


class Manual(lightning.LightningModule):  # type: ignore[misc,name-defined]
    """Its step calls parts of it, twice, and keeps the first pass to each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.body = nn.Sequential(nn.Linear(16, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU())
        self.head = nn.Linear(64, 5)
        self.losses: list[float] = []
        self.norms: list[float] = []

    def loss(self, batch: Any, shift: int = 0) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.head(self.body(x)), (y + shift) % 5)

    def training_step(self, batch: Any, _: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        with self.trainer.strategy.block_backward_sync():  # type: ignore[attr-defined]
            self._differentiate(self.loss(batch))
        self._differentiate(self.loss(batch, 1))
        optimizer.step()

    def _differentiate(self, loss: torch.Tensor) -> None:
        self.manual_backward(loss)
        self.losses.append(loss.item())
        self.norms.append(self.head.weight.grad.norm().item())  # type: ignore[union-attr]

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("seen", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main(directory: Path) -> None:
    lightning.seed_everything(7)
    module = Manual()
    run = lightning.Trainer(
        default_root_dir=directory, accelerator="cpu", strategy="ddp", devices=2, max_epochs=3,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    run.fit(module, loader(64, 1), loader(16, 2))
    seen = run.callback_metrics["seen"].item()
    found = {"losses": module.losses, "norms": module.norms, "seen": seen}
    (directory / f"found{run.global_rank}.json").write_text(json.dumps(found))
    torch.save([module.state_dict()], directory / f"states{run.global_rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
