# Question: what does a step of a model in two stages cost, with room for a rank's stage and inside
#     a budget it does not fit, beside torch's own pipelining of the same stages?
# Baseline: torch.distributed.pipelining (PipelineStage, Schedule1F1B) over two modules that hold
#     the same blocks as castor's stages; plain PyTorch in one process that accumulates the same
#     micro-batches with as many threads. All over gloo, processes of this machine, AdamW.
# Model: hybrid_parallel.py's Llama of 44M parameters, fp32, batches of 8 x 128 tokens in 4
#     micro-batches, one thread a rank, the same seed and batches everywhere. tight(x) is the
#     non-model peak of the ample run and x * the bytes of a rank's stage.
# Method: zero.py's.
"""A step of a model in stages, castor against its peers: `python benchmarks/pipelines.py`."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from _machine import command_line, describe_machine, write_record
from _ranks import Ranks, measure
from _steps import LR, QUICK, Model, Report, Step, tight
from hybrid_parallel import build
from rich.console import Console

TIGHT_SHARE = 0.5
MICROBATCHES, MODEL = 4, Model(rows=8)
BARS = {
    "castor ample / torch": 1.05,
    "castor tight / torch": None,
    "castor ample / plain": None,
}


def make_plain(_: int, model: Model) -> tuple[Step, Report]:
    """One process, a thread for each rank of the others."""
    import torch

    torch.set_num_threads(2)
    module = build(model)
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR, fused=True)

    def step(i: int) -> float:
        total, whole = 0.0, model.batch(i)
        for k in range(MICROBATCHES):
            part = {name: value.chunk(MICROBATCHES)[k] for name, value in whole.items()}
            loss = module(**part).loss / MICROBATCHES
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step, dict


def make_torch(rank: int, model: Model, cut: int) -> tuple[Step, Report]:
    """Torch's pipelining of modules written for it; the first stage has `cut` blocks."""
    import torch
    from torch import distributed, nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    from torch.nn.functional import cross_entropy

    module: Any = build(model)

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = list(module.model.layers)
            self.rotary = module.model.rotary_emb
            self.layers = nn.ModuleList(layers[cut:] if rank else layers[:cut])
            if rank == 0:
                self.embedding = module.model.embed_tokens
            else:
                self.norm, self.head = module.model.norm, module.lm_head

        def forward(self, x: Any) -> Any:
            hidden = self.embedding(x) if rank == 0 else x
            positions = torch.arange(hidden.shape[1])[None]
            angles = self.rotary(hidden, positions)
            for layer in self.layers:
                hidden = layer(
                    hidden,
                    attention_mask=None,
                    position_ids=positions,
                    position_embeddings=angles,
                )
            return hidden if rank == 0 else self.head(self.norm(hidden))

    def loss_of(logits: Any, ids: Any) -> Any:
        return cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    own = Stage()
    stage = PipelineStage(own, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(own.parameters(), lr=LR, fused=True)

    def step(i: int) -> float:
        ids, losses = model.batch(i)["input_ids"], []
        if rank == 0:
            schedule.step(ids)
        else:
            schedule.step(target=ids, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        mean = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        distributed.broadcast(mean, 1)
        return float(mean)

    return step, dict


def make_castor(_: int, model: Model, device_memory: int | None) -> tuple[Step, Report]:
    """With castor, in a device budget of bytes (None: room for everything)."""
    import torch

    from castor import Booster, HybridParallelPlugin

    module = build(model)
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR, fused=True)
    plugin = HybridParallelPlugin(
        pp_size=2, num_microbatches=MICROBATCHES, device="cpu", precision="fp32",
        device_memory=device_memory or "3GiB", host_memory="3GiB",
    )  # fmt: skip
    booster = Booster(plugin)
    booster.boost(module, optimizer)

    def step(i: int) -> float:
        done = booster.execute_pipeline(iter([model.batch(i)]), module, None, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        return float(done["loss"])

    def report() -> dict[str, Any]:
        params = list(module.parameters())
        blocks = len(
            [block for block in module.model.layers if any(True for _ in block.parameters())]
        )
        param_bytes = sum(p.numel() * p.element_size() for p in params)
        return vars(booster.report()) | {"param_bytes": param_bytes, "blocks": blocks}

    return step, report


def main() -> int:
    parser = command_line("pipelines", __doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3, help="of each contender in a round")
    arguments = parser.parse_args()
    console = Console(width=110)
    machine = describe_machine()

    model = replace(QUICK, layers=6, width=256, rows=MICROBATCHES) if arguments.quick else MODEL
    rounds, steps = (1, 1) if arguments.quick else (arguments.rounds, arguments.steps)
    ample = Ranks.start("castor, ample budget", 2, make_castor, model, None)
    reports = ample.report()
    found = {
        "plain": Ranks.start("plain PyTorch, one process", 1, make_plain, model),
        "torch": Ranks.start("torch's pipelining", 2, make_torch, model, reports[0]["blocks"]),
        "castor ample": ample,
    }
    # Stages differ: the larger need of the two, for both.
    budget = max(tight(report, TIGHT_SHARE) for report in reports)
    name = f"castor, tight({TIGHT_SHARE}) = {budget / 2**20:.0f} MiB a rank"
    found["castor tight"] = Ranks.start(name, 2, make_castor, model, budget)
    size = f"{model.rows} x {model.sequence} tokens"
    title = f"Llama in two stages, {size} in {MICROBATCHES} micro-batches, 1F1B"
    figures = {"blocks": [r["blocks"] for r in reports]} | measure(
        found, rounds, steps, bars=BARS, reference="plain", title=title, console=console
    )
    write_record(arguments, "pipelines", figures, machine=machine)
    return 0


if __name__ == "__main__":
    sys.exit(main())
