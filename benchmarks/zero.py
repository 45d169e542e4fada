# Question: what does a training step of several ranks cost in castor, with room for the whole
#     model and inside a budget it does not fit, beside torch's DDP, FSDP2 and DeepSpeed ZeRO-3?
# Baseline: DistributedDataParallel with AdamW(fused=True) and clip_grad_norm_ 1.0; FSDP2, sharded
#     by layer; DeepSpeed ZeRO-3 with torch's AdamW. All over gloo, processes of this machine.
# Model: GPT-2 of 42.5M parameters (12 layers, 512 wide, 8 heads, vocabulary 8192), fp32, 2 x 128
#     tokens a rank, one thread a rank, the same seed and batches everywhere. tight(x) is the
#     non-model peak of the ample run and x * parameter bytes.
# Method: the ranks of each contender live through the whole run and sleep while others step;
#     rounds of a few steps in rotating order; ratios are taken within a round. A step's time is the
#     slowest rank's, CPU time all ranks', bytes what the loopback device sent meanwhile.
"""One training step of several ranks, castor against its peers: `python benchmarks/zero.py`."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from typing import Any

from _machine import command_line, describe_machine, write_record
from _ranks import Ranks, measure
from _steps import (
    LR,
    MAX_NORM,
    QUICK,
    Model,
    Report,
    Step,
    tight,
    torch_step,
)
from rich.console import Console

TIGHT_SHARE, MODEL = 0.35, Model(rows=2)
BARS = {  # ratio of times to the largest that meets the target
    "castor ample / ddp": 1.05,
    "castor ample / fsdp2": 0.75,
    "castor ample / zero3": 0.60,
    "castor tight / ddp": 1.10,
}


def batch(model: Model, step: int, rank: int) -> dict[str, Any]:
    """Of a rank; other tokens on each."""
    return model.batch(1000 * step + rank)


def make_ddp(rank: int, model: Model) -> tuple[Step, Report]:
    """DistributedDataParallel."""
    import torch

    module = model.build()
    wrapped = torch.nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)
    return torch_step(wrapped, lambda i: batch(model, i, rank)), dict


def make_fsdp2(rank: int, model: Model) -> tuple[Step, Report]:
    """FSDP2: each layer and the rest are sharded over the ranks."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    module = model.build()
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for layer in module.transformer.h:
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return torch_step(module, lambda i: batch(model, i, rank)), dict


def make_zero3(rank: int, model: Model) -> tuple[Step, Report]:
    """DeepSpeed ZeRO-3."""
    import torch

    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_SIZE=os.environ["WORLD_SIZE"])
    import deepspeed

    module = model.build()
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR)
    config = {
        "train_micro_batch_size_per_gpu": model.rows,
        "gradient_clipping": MAX_NORM,
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=optimizer, config=config, dist_init_required=False
    )

    def step(i: int) -> float:
        loss = engine(**batch(model, i, rank)).loss
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step, dict


def make_castor(
    rank: int, model: Model, device_memory: int | None, overlap: str = "none"
) -> tuple[Step, Report]:
    """With castor, in a device budget of bytes (None: room for everything)."""
    import torch

    from castor import Booster, GeminiPlugin

    module = model.build()
    param_bytes = sum(p.numel() * p.element_size() for p in module.parameters())
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR, fused=True)
    booster = Booster(
        GeminiPlugin(
            device="cpu",
            device_memory=device_memory or "3GiB",
            host_memory="3GiB",
            precision="fp32",
            max_norm=MAX_NORM,
            overlap=overlap,
        )
    )
    module, optimizer, *_ = booster.boost(module, optimizer)

    def step(i: int) -> float:
        loss = module(**batch(model, i, rank)).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step, lambda: {**vars(booster.report()), "param_bytes": param_bytes}


def start_contenders(
    model: Model, console: Console, size: int, leave_out: list[str]
) -> dict[str, Ranks]:
    found = {"ddp": Ranks.start("DistributedDataParallel", size, make_ddp, model)}
    ample = Ranks.start("castor, ample budget", size, make_castor, model, None)
    found["castor ample"] = ample
    budget = tight(ample.report()[0], TIGHT_SHARE)
    name = f"castor, tight({TIGHT_SHARE}) = {budget / 2**20:.0f} MiB"
    found["castor tight"] = Ranks.start(name, size, make_castor, model, budget)
    found["castor beside"] = Ranks.start(
        'castor, ample, overlap="forward"', size, make_castor, model, None, "forward"
    )
    for key, name, make in (
        ("fsdp2", "FSDP2", make_fsdp2),
        ("zero3", "DeepSpeed ZeRO-3", make_zero3),
    ):
        missing = make is make_zero3 and find_spec("deepspeed") is None
        if key in leave_out or missing:
            why = "deepspeed is not installed" if missing else "left out"
            console.print(f"[yellow]SKIPPED: {name}: {why}")
            continue
        found[key] = Ranks.start(name, size, make, model)
    return found


def main() -> int:
    parser = command_line("zero", __doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3, help="of each contender in a round")
    parser.add_argument("--leave-out", action="append", default=[], choices=("fsdp2", "zero3"))
    arguments = parser.parse_args()
    console = Console(width=110)
    model = QUICK if arguments.quick else MODEL
    rounds, steps = (1, 1) if arguments.quick else (arguments.rounds, arguments.steps)
    machine = describe_machine()

    found = start_contenders(model, console, arguments.ranks, arguments.leave_out)
    title = f"{model.title} a rank, {arguments.ranks} ranks"
    figures = {"ranks": arguments.ranks} | measure(
        found, rounds, steps, bars=BARS, reference="ddp", title=title, console=console
    )
    write_record(arguments, "zero", figures, machine=machine)
    return 0


if __name__ == "__main__":
    sys.exit(main())
