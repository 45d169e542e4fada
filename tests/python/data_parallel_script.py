"""A loop in DistributedDataParallel as PyTorch's users write it; knows nothing of castor.

torchrun --nproc-per-node 2 data_parallel_script.py DIRECTORY; a test input.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.classes = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.classes(self.features(images).flatten(1))
        return logits


def data(rows: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(rows, 1, 8, 8, generator=generator)
    return TensorDataset(images, torch.randint(0, 10, (rows,), generator=generator))


def train(model: DDP, optimizer: torch.optim.Optimizer, loader: DataLoader, rank: int) -> list:
    model.train()
    losses = []
    batches = list(loader)
    for first, last in zip(batches[::2], batches[1::2], strict=True):
        optimizer.zero_grad()
        with model.no_sync():
            images, labels = first
            nn.functional.cross_entropy(model(images), labels).div(2).backward()
        images, labels = last
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.div(2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses += [loss.item(), mean.item() / dist.get_world_size()]
    return losses


@torch.no_grad()
def evaluate(model: nn.Module, dataset: TensorDataset) -> float:
    model.eval()
    images, labels = dataset.tensors
    return nn.functional.cross_entropy(model(images), labels).item()


def main(directory: Path) -> None:
    dist.init_process_group("gloo")
    rank, local = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(rank)  # DDP gives all ranks the first one's weights

    model = Classifier().to(device)
    ddp = DDP(model, device_ids=[local] if device.type == "cuda" else None)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    training, validation = data(48, seed=1), data(16, seed=2)
    sampler = DistributedSampler(training, shuffle=True)
    loader = DataLoader(training, batch_size=6, sampler=sampler)

    losses, checkpoint = [evaluate(ddp, validation)], directory / "model.pt"
    for epoch in range(3):
        sampler.set_epoch(epoch)
        losses += train(ddp, optimizer, loader, rank)
        schedule.step()
        losses.append(evaluate(ddp, validation))
        if rank == 0:
            losses.append(evaluate(ddp.module, validation))
            torch.save(ddp.module.state_dict(), checkpoint)
        dist.barrier()
    ddp.module.load_state_dict(torch.load(checkpoint, map_location=device, weights_only=True))
    losses += train(ddp, optimizer, loader, rank)
    found = {"losses": losses, "state": ddp.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(found, directory / f"rank{rank}.pt")
    if rank == 0:
        print("trained", type(ddp).__name__, isinstance(ddp, DDP))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
