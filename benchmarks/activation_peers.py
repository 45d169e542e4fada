# Question: how large a batch trains in one budget, and what does a step take at one batch, where
#     castor decides what becomes of activations, and where others do?
# Baseline: transformers' gradient checkpointing, off and on, and of every second block; torch's
#     save_on_cpu.
# Model: GPT-2 of 42.5M parameters (vocabulary 8192), samples of 512 tokens, fp32.
# Method: all train in castor's chunks on the CPU device, whose budget counts everybody's
#     activations alike; peers have activations="keep", which leaves theirs alone, and
#     tile_logits=False. The budget is what two samples take where everything is kept. On the CPU
#     device save_on_cpu gives each tensor back as it is, so its hooks are written out with memory
#     that the budget does not count, as a GPU's would not; transformers' offload of block inputs
#     has nowhere to go there either, and is left out. Steps take turns at a batch that all train,
#     two untimed ones first; ratios are taken within a round.
# Targets: none; the losses are the same bits wherever logits are whole.
"""Activations beside peers: `python benchmarks/activation_peers.py [--quick]`."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from _machine import command_line, describe_machine, paired, spread, write_record
from _steps import QUICK, VOCAB, Model
from activations import BASELINE, Contender, Workload
from rich.console import Console
from rich.table import Table
from torch.autograd.graph import saved_tensors_hooks


class SaveOnHost(saved_tensors_hooks):
    """torch.autograd.graph.save_on_cpu, of a device whose memory is the host's."""

    def __init__(self) -> None:
        super().__init__(self._pack, self._unpack)

    @staticmethod
    def _pack(tensor: torch.Tensor) -> tuple[Any, torch.dtype, torch.Size]:
        values = tensor.detach().contiguous()
        return values.view(-1).view(torch.uint8).numpy().copy(), tensor.dtype, tensor.shape

    @staticmethod
    def _unpack(packed: tuple[Any, torch.dtype, torch.Size]) -> torch.Tensor:
        values, dtype, shape = packed
        found = torch.empty(shape, dtype=dtype)
        np.copyto(found.view(-1).view(torch.uint8).numpy(), values)
        return found


def checkpointing(**settings: Any) -> Callable[[Any], None]:
    """Turns transformers' on."""

    def enable(model: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            model.activation_checkpointing_enable(**settings)

    return enable


@dataclass(frozen=True)
class Peer:
    """Who decides what becomes of activations."""

    settings: dict[str, Any] = field(default_factory=lambda: dict(BASELINE))
    """GeminiPlugin's."""
    prepare: Callable[[Any], None] = lambda _: None
    """Before the model is boosted."""
    around: Callable[[], Any] = nullcontext
    """A pass."""


PEERS = {
    "castor auto": Peer({"activations": "auto"}),
    "castor auto, whole logits": Peer({"activations": "auto", "tile_logits": False}),
    "keep": Peer(),
    "checkpointing": Peer(prepare=checkpointing()),
    "checkpointing, every second": Peer(prepare=checkpointing(every_n_layers=2)),
    "save_on_cpu": Peer(around=SaveOnHost),
}


class Peers(Workload):
    """A workload whose settings are peers."""

    def contender(self, budget: int, settings: Any, batch: int | None = None) -> Contender:
        """A model boosted anew."""
        model = self.build()
        settings.prepare(model)
        tokens = (batch or self.tokens[0], self.tokens[1])
        contender = Contender(model, self.vocabulary, tokens, budget, settings.settings)
        contender.around = settings.around
        return contender


def kept_budget(workload: Peers) -> int:
    """What two samples take where everything is kept, and one module beside it."""
    whole = workload.contender(8 << 30, PEERS["keep"], 2)
    for number in range(2):
        whole.step(number)
    modules = whole.model.modules()
    largest = max(sum(p.nbytes for p in m.parameters(recurse=False)) for m in modules)
    return int(whole.booster.report(whole.model).peak_nonmodel_bytes + 2.2 * largest)


def in_turn(workload: Peers, names: list[str], budget: int, batch: int, rounds: int) -> Any:
    """Seconds of steps at one batch, and ratios to castor's with whole logits."""
    contenders: dict[str, Contender] = {}
    for name in names:
        contenders[name] = workload.contender(budget, PEERS[name], batch)
    for number in range(rounds + 2):
        for contender in contenders.values():
            contender.step(number)
    whole = {tuple(c.losses) for name, c in contenders.items() if name != "castor auto"}
    if len(whole) > 1:
        raise AssertionError("who decides about activations changes the losses")
    ours = contenders["castor auto, whole logits"].seconds[2:]
    return {
        "batch": batch,
        "seconds": {name: spread(c.seconds[2:]) for name, c in contenders.items()},
        "step_ratio": {name: paired(c.seconds[2:], ours) for name, c in contenders.items()},
    }


def main() -> None:
    parser = command_line("activation_peers", __doc__)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    gc.freeze()  # a collection looks through what steps make, not through what was imported
    machine, rounds = describe_machine(), 1 if args.quick else args.rounds
    model = QUICK if args.quick else Model(sequence=512)
    most = 4 if args.quick else 64
    workload = Peers(model.build, VOCAB, (1, model.sequence), most=most)
    budget = kept_budget(workload)
    largest = {name: workload.largest(peer, budget) for name, peer in PEERS.items()}
    # Of some peers not even one sample may fit, where a whole block is brought back at once.
    able = [name for name, batch in largest.items() if batch]
    batch = min(largest[name] for name in able)
    results = {"budget_bytes": budget, "largest_batch": largest}
    results |= in_turn(workload, able, budget, batch, rounds)
    table = Table(
        "who decides", "largest batch", "step", "/ castor's, whole logits",
        title=f"{budget / 2**20:.0f} MiB; steps at batch {batch}",
    )  # fmt: skip
    for name in PEERS:
        seconds, ratio = (results[key].get(name) for key in ("seconds", "step_ratio"))
        shown = [f"{seconds['median']:.2f} s", f"{ratio['median']:.2f}"] if seconds else ["", ""]
        table.add_row(name, str(largest[name]), *shown)
    Console().print(table)
    write_record(args, "activation_peers", {"results": results}, machine=machine)


if __name__ == "__main__":
    main()
