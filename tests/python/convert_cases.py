"""What tests of conversions run on several ranks: `python convert_cases.py NAME DIRECTORY`."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW

from zoo import CASES


def loaded_by_torch(directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """As torch's documentation loads a checkpoint of a model and its optimizer."""
    weights, states = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": states}
    dcp.load(state, checkpoint_id=directory)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )


def saved_by_torch(directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """As torch's documentation saves one."""
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=directory)


def sharded(directory: Path) -> None:
    """FSDP2 takes castor's export and saves it again, in one piece a rank."""
    dist.init_process_group("gloo")
    try:
        model = CASES["gpt2"].model()
        for block in model.transformer.h:
            fully_shard(block)
        fully_shard(model)
        optimizer = AdamW(model.parameters(), lr=0.5)
        loaded_by_torch(directory / "dcp", model, optimizer)
        print(optimizer.param_groups[0]["lr"])
        saved_by_torch(directory / f"of {dist.get_world_size()}", model, optimizer)
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv[1]](Path(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)  # torch at times aborts while a rank that had a mesh takes itself down
