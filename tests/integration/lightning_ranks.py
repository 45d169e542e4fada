"""A script of Lightning's Trainer on several ranks; knows nothing of castor unless it is told to.

torchrun --nproc-per-node 2 lightning_ranks.py DIRECTORY [own]: "own" takes CastorStrategy by hand.
"""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")


class Classifier(lightning.LightningModule):  # type: ignore[misc,name-defined]
    """A norm with buffers, so that what ranks share shows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(16, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU(),
            *(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)), nn.Linear(64, 5),
        )  # fmt: skip
        self.losses: list[float] = []

    def step(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.layers(x), y)

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        loss = self.step(batch)
        self.losses.append(loss.item())
        self.log("train", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("seen", self.step(batch), sync_dist=True)

    def test_step(self, batch: Any, index: int) -> None:
        self.log("tested", self.step(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.8)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def loader(rows: int, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(rows, 16, generator=generator), torch.arange(rows) % 5
    return DataLoader(TensorDataset(x, y), batch_size=4, shuffle=False)


def fit(directory: Path, strategy: Any, path: Path | None, **settings: Any) -> Any:
    lightning.seed_everything(7)
    module = Classifier()
    run = lightning.Trainer(
        default_root_dir=directory, accelerator="cpu", strategy=strategy, devices=2, logger=False,
        enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=0.5,
        accumulate_grad_batches=2, max_epochs=3, **settings,
    )  # fmt: skip
    run.fit(module, loader(64, 1), loader(16, 2), ckpt_path=path)
    return module, run


def main(directory: Path, own: bool) -> None:
    def strategy() -> Any:
        if not own:
            return "ddp"
        import castor
        from castor.integrations.lightning import CastorStrategy

        settings = {"device_memory": "160KiB", "host_memory": "64MiB"}
        return CastorStrategy(castor.GeminiPlugin(device="cpu", **settings))

    saver = ModelCheckpoint(directory, filename="{epoch}", save_top_k=-1, save_last=True)
    module, run = fit(directory, strategy(), None, callbacks=[saver])
    resumed, again = fit(
        directory, strategy(), directory / "epoch=1.ckpt", enable_checkpointing=False
    )
    tested = again.test(resumed, loader(16, 3), verbose=False)
    found = {
        "losses": module.losses, "resumed": resumed.losses, "tested": tested,
        "seen": run.callback_metrics["seen"].item(), "strategy": type(run.strategy).__name__,
        "samplers": type(run.train_dataloader.sampler).__name__, "world": run.world_size,
    }  # fmt: skip
    rank = run.global_rank
    (directory / f"found{rank}.json").write_text(json.dumps(found))
    torch.save([module.state_dict(), resumed.state_dict()], directory / f"states{rank}.pt")
    if rank == 0:
        print("trained on", run.world_size)


if __name__ == "__main__":
    main(Path(sys.argv[1]), "own" in sys.argv)
