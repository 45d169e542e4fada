"""A script over accelerate that knows nothing of castor: `python accelerate_cases.py _ DIRECTORY`.

What follows its imports runs on each rank.
"""

import atexit
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import rank_processes


def train(directory: Path) -> None:
    accelerator = Accelerator(cpu=True, project_dir=directory, gradient_accumulation_steps=2)
    set_seed(5)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    tokens = torch.randint(0, 64, (64, 8), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    loader = DataLoader(data, batch_size=2, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
    accelerator.save_state(directory / "state")
    accelerator.wait_for_everyone()
    accelerator.load_state(directory / "state")
    accelerator.save_model(model, directory)
    if accelerator.is_main_process:
        torch.save(losses, directory / "losses.pt")
        print("done on", accelerator.num_processes, type(model).__name__)
    atexit.register(lambda: print("grouped at exit:", torch.distributed.is_initialized()))


def plain(directory: Path, ranks: int) -> None:
    """In DistributedDataParallel."""
    directory.mkdir()
    first, *_ = rank_processes.succeeded(rank_processes.run(train, ranks, directory))
    assert first.startswith(f"done on {ranks} DistributedDataParallel\n")


def under_castor_run(directory: Path, ranks: int, *settings: str) -> str:
    """What rank 0 has printed."""
    launch = ("-m", "castor", "run", "--nproc", str(ranks), *settings)
    done = rank_processes.run_python(*launch, __file__, "train", directory)
    assert done.returncode == 0, done.stderr
    return done.stdout


if __name__ == "__main__":
    train(Path(sys.argv[2]))
