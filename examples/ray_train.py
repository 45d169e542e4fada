"""A GPT on Ray Train's workers, in castor's chunks: `python examples/ray_train.py DIRECTORY`.

Ray starts the workers and makes their process group, and boost finds it: the loop is that of one
process. Checkpoints are written by all workers together, into a directory that all see, and handed
to Ray; where workers are lost it starts others, which go on from the last one.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is fetched: model and data are made here

import ray
from ray import train
from ray.train.torch import TorchConfig, TorchTrainer

WORKERS, EPOCHS = 2, 3


def loop(settings: dict[str, Any]) -> None:
    """What each worker runs."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from castor import Booster, GeminiPlugin

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=512, n_embd=128, n_layer=4, n_head=4,
                        bos_token_id=0, eos_token_id=0)  # fmt: skip
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    counting = torch.arange(64)[:, None] + torch.arange(33)
    dataset = torch.utils.data.TensorDataset(counting)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    plugin = GeminiPlugin(device=device, device_memory="16MiB", max_norm=1.0)
    loader = plugin.prepare_dataloader(dataset, batch_size=4, shuffle=True, seed=0)
    booster = Booster(plugin)
    model, optimizer, _, loader, _ = booster.boost(model, optimizer, dataloader=loader)

    begun = 0
    if checkpoint := train.get_checkpoint():
        with checkpoint.as_directory() as path:
            begun = booster.load(path, model, optimizer, dataloader=loader).extra["epochs"]
    for epoch in range(begun, EPOCHS):
        loader.sampler.set_epoch(epoch)
        for (tokens,) in loader:
            tokens = tokens.to(device)
            loss = model(input_ids=tokens, labels=tokens).loss
            booster.backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        extra = {"epochs": epoch + 1}
        path = booster.save(settings["runs"], model, optimizer, dataloader=loader, extra=extra)
        figures = booster.report()
        first = train.get_context().get_world_rank() == 0
        train.report(
            {"loss": loss.item(), "epoch": epoch + 1, "ranks": figures.ranks,
             "link": figures.rank_link, "peak_device_bytes": figures.peak_device_bytes},
            checkpoint=train.Checkpoint.from_directory(path) if first else None,
        )  # fmt: skip


def main() -> int:
    """Trains, and prints what the first worker has reported last."""
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    directory = Path(sys.argv[1]).absolute()
    directory.mkdir(parents=True, exist_ok=True)
    ray.init()
    gpus = ray.cluster_resources().get("GPU", 0) >= WORKERS
    trainer = TorchTrainer(
        loop,
        train_loop_config={"runs": str(directory / "castor")},
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if gpus else "gloo"),
        scaling_config=train.ScalingConfig(num_workers=WORKERS, use_gpu=gpus),
        run_config=train.RunConfig(
            name="gpt", storage_path=str(directory), failure_config=train.FailureConfig(1)
        ),
    )
    print(trainer.fit().metrics)
    return 0


if __name__ == "__main__":
    sys.exit(main())
