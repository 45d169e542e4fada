"""Compiled blocks on two ranks: `python compiled_cases.py NAME DIRECTORY` (rank_processes)."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch._dynamo.utils import counters

import castor
import grids
from castor.runtime.blocks import find_blocks
from helpers import GIB, LR, losses_of_plain
from zoo import CASES, Case, llama

LLAMA, STEPS = CASES["llama"], 3
DEEP = Case("llama4", lambda: llama(layers=4), LLAMA.batch)
SCHEDULES = ("interleaved", "zbv", "interleaved again")
LAYOUTS: dict[str, dict[str, Any]] = grids.some({
    "data": {},
    "stages": {"pp_size": 2, "num_microbatches": 2},
    "layers": {"tp_size": 2},
    "sequences": {"sp_size": 2},
    "ring": {"sp_size": 2, "sequence_parallelism_mode": "ring_attn"},
}, "stages", "layers", "ring")  # fmt: skip


def loss_of(model: Any, seed: int) -> torch.Tensor:
    batch = LLAMA.batch(seed)
    return LLAMA.loss(model(**batch), batch)


def train(layout: dict[str, Any], *, fullgraph: bool, case: Case = LLAMA) -> list[float]:
    """Losses, the same batch on every rank."""
    model: Any = case.model()
    model.config.use_cache = False
    # Autograd's part of many graphs takes the longest, and is as that of the stages' few.
    many = {"tp_size", "sp_size"} & layout.keys()
    backend = "eager" if many and not grids.WHOLE else "aot_eager"
    for block in find_blocks(model).values():
        block.compile(fullgraph=fullgraph, backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    budgets = {"device_memory": GIB // 8, "host_memory": GIB // 8}
    kind = castor.HybridParallelPlugin if layout else castor.GeminiPlugin
    booster = castor.Booster(plugin=kind(device="cpu", precision="fp32", **budgets, **layout))
    booster.boost(model, optimizer)
    losses = []
    for seed in range(STEPS):
        if "pp_size" in layout:
            data = iter([LLAMA.batch(seed)])
            loss = booster.execute_pipeline(data, model, None, optimizer)["loss"]
        else:
            loss = loss_of(model, seed)
            booster.backward(loss, optimizer)
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def divided(directory: Path) -> None:
    """By layout: losses, graph breaks, and what fullgraph=True raises, if it does.

    By schedule: losses, where what was compiled for the first serves the others.
    """
    found: dict[str, Any] = {"plain": losses_of_plain(LLAMA.model(), loss_of, STEPS)}
    for name, layout in LAYOUTS.items():
        torch._dynamo.reset()
        counters.clear()
        raised = None
        try:
            losses = train(layout, fullgraph=True)
        except torch._dynamo.exc.Unsupported:
            raised = "Unsupported"
            torch._dynamo.reset()
            counters.clear()
            losses = train(layout, fullgraph=False)
        breaks = sum(counters["graph_break"].values())
        found[name] = [losses, breaks, raised]
    torch._dynamo.reset()
    found["deep"] = losses_of_plain(DEEP.model(), loss_of, STEPS)
    two_each = {"pp_size": 2, "num_microbatches": 2, "num_model_chunks": 2}
    for name in SCHEDULES:
        layout = two_each | {"pp_style": name.split()[0]}
        found[name] = train(layout, fullgraph=True, case=DEEP)
    if distributed.get_rank() == 0:
        (directory / "divided.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    castor.launch_from_torch()
    globals()[sys.argv[1]](Path(sys.argv[2]))
    distributed.barrier()
