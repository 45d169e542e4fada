"""A loop of Lightning's Fabric on several ranks, as its users write it; knows nothing of castor.

torchrun --nproc-per-node 2 fabric_ranks.py DIRECTORY
"""

import sys
import warnings
from pathlib import Path

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")


def main(directory: Path) -> None:
    fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(7 + fabric.global_rank)
    model = nn.Sequential(
        nn.Linear(16, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 5)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = fabric.setup(model, optimizer)
    x = torch.randn(48, 16, generator=torch.Generator().manual_seed(1))
    loader = fabric.setup_dataloaders(
        DataLoader(TensorDataset(x, torch.arange(48) % 5), batch_size=4, shuffle=True)
    )
    losses = []
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for index, (images, labels) in enumerate(loader):
            accumulating = index % 2 == 0
            with fabric.no_backward_sync(model, enabled=accumulating):
                loss = nn.functional.cross_entropy(model(images), labels)
                fabric.backward(loss / 2)
            losses += [loss.item(), fabric.all_reduce(loss.detach()).item()]
            if not accumulating:
                fabric.clip_gradients(model, optimizer, max_norm=0.5)
                optimizer.step()
                optimizer.zero_grad()
        fabric.save(directory / "state.ckpt", {"model": model, "optimizer": optimizer})
    fabric.load(directory / "state.ckpt", {"model": model, "optimizer": optimizer})
    found = {"losses": losses, "state": model.state_dict(), "type": type(model.module).__name__}
    torch.save(found, directory / f"found{fabric.global_rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
