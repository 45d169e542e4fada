"""What tests of layouts run on several ranks: `python layout_cases.py NAME DIRECTORY`.

The directory has folders, each with a plan.json and the config.json of the model that it is for.
"""

import sys
from pathlib import Path

import torch
from torch import distributed
from transformers import AutoConfig, AutoModelForCausalLM

import castor
from castor.config.layout_plan import read_plan
from helpers import GIB
from tensor_cases import LR, MAX_NORM, write


def train_by_plan(directory: Path) -> None:
    """The loss of a step by each plan, and that of the same samples without ranks."""
    found = {}
    for file in sorted(directory.glob("*/plan.json")):
        plan = read_plan(file)
        torch.manual_seed(0)
        config = AutoConfig.from_pretrained(file.with_name("config.json"))
        model = AutoModelForCausalLM.from_config(config)
        ids = torch.randint(config.vocab_size, (plan["batch_size"], plan["workload"]["sequence"]))
        data = {"input_ids": ids, "labels": ids}
        with torch.no_grad():
            expected = model(**data).loss.item()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
        plugin = castor.HybridParallelPlugin(
            file, device="cpu", device_memory=GIB, host_memory=GIB, precision="fp32",
            max_norm=MAX_NORM,
        )  # fmt: skip
        booster = castor.Booster(plugin=plugin)
        booster.boost(model, optimizer)
        losses = []
        for _ in range(2):
            if "num_microbatches" in plan["layout"]:
                done = booster.execute_pipeline(iter([data]), model, None, optimizer)
                losses.append(done["loss"].item())
            else:
                loss = model(**data).loss
                booster.backward(loss, optimizer)
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        found[file.parent.name] = [*losses, expected]
    write(directory, "train_by_plan", found)


if __name__ == "__main__":
    torch.set_num_threads(1)
    castor.launch_from_torch()
    globals()[sys.argv[1]](Path(sys.argv[2]))
    distributed.barrier()
