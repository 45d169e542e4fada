"""What tests of models that ranks on GPUs divide run: `python gpu_parallel_cases.py NAME DIR`.

CASTOR_TEST_DEVICE says on which: "simgpu:1", "cuda", or the CPU device without it.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import distributed

import castor
import pipeline_cases
import tensor_cases
from castor.runtime.engine import engine_of
from grids import some
from helpers import Boosted
from pipeline_cases import DEEP, ZERO_BUBBLE
from simulated import compute_as_asked
from split_gather_cases import SPLIT_GATHER
from tensor_cases import FAMILIES, RING, STEPS, of_all, write_own
from zoo import Case

DEVICE = "cuda" if os.environ.get("CASTOR_TEST_DEVICE") == "cuda" else "cpu"
"""The plugins' argument; compute_as_asked puts the simulated GPU in the CPU's place."""


@dataclass(frozen=True)
class ParallelCase:
    """A model, and how ranks divide it."""

    case: Case
    settings: dict[str, Any] = field(default_factory=dict)
    tight: bool = False
    """Whether the device budget is tight(0.5)."""

    def boost(self, **more: Any) -> Boosted:
        """Among all ranks."""
        settings: dict[str, Any] = {"device": DEVICE} | self.settings | more
        staged = "pp_size" in settings
        return (
            pipeline_cases.boost(self.case, **settings)
            if staged
            else tensor_cases.boost(self.case, settings.pop("tp_size", 1), **settings)
        )

    def train(self, boosted: Boosted, first: int = 0, steps: int = STEPS) -> list[float]:
        """Losses; copies of a model take other rows."""
        if "pp_size" in self.settings:
            return pipeline_cases.train(self.case, boosted, first, steps)
        return tensor_cases.train(self.case, boosted, first, steps)


def _in_stages(schedule: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"pp_size": 2} | schedule | more


INTERLEAVED = {"pp_style": "interleaved", "num_model_chunks": 2}
LAYERS = {"tp_size": 2}
ON_TWO = {
    **{
        f"{name} {how}": ParallelCase(FAMILIES[name], settings, tight)
        for name in ("gpt2", "llama")
        for how, settings, tight in (
            ("layers", LAYERS, False),
            ("layers, tight", LAYERS, True),
            ("tokens between", LAYERS | SPLIT_GATHER, False),
            ("heads for tokens", {"sp_size": 2}, False),
            ("all keys", {"sp_size": 2, "sequence_parallelism_mode": "all_gather"}, False),
        )
    },
    **{
        f"{name} {how}": ParallelCase(DEEP[name], _in_stages(settings), tight)
        for name in DEEP
        for how, settings, tight in (
            ("1f1b", {}, False),
            ("1f1b, tight", {}, True),
            ("gpipe", {"pp_style": "gpipe"}, False),
            ("interleaved", INTERLEAVED, False),
            ("zbv", ZERO_BUBBLE, False),
            ("zbv, tight", ZERO_BUBBLE, True),
        )
    },
    "llama layers, bf16": ParallelCase(FAMILIES["llama"], LAYERS | {"precision": "bf16"}),
    "llama layers, recomputed": ParallelCase(
        FAMILIES["llama"], LAYERS | SPLIT_GATHER | {"activations": "recompute"}
    ),
    "llama layers, divided loss": ParallelCase(
        FAMILIES["llama"], LAYERS | {"parallel_output": True}
    ),
    "llama heads for tokens, tight": ParallelCase(FAMILIES["llama"], {"sp_size": 2}, tight=True),
    "llama 1f1b, offloaded": ParallelCase(DEEP["llama"], _in_stages({}, activations="offload")),
    "mixtral experts": ParallelCase(FAMILIES["mixtral"], {"ep_size": 2}),
    "mixtral experts, tight": ParallelCase(FAMILIES["mixtral"], {"ep_size": 2}, tight=True),
    "mixtral layers": ParallelCase(FAMILIES["mixtral"], LAYERS),
}
"""The bits of ranks on the CPU device."""
RINGS = {
    f"{name} ring": ParallelCase(FAMILIES[name], {"sp_size": 2} | RING)
    for name in some(("gpt2", "llama"), "llama")
}
"""Which compute attention by other kernels there."""
ON_FOUR = some(
    {
        "gpt2 layers, copies": ParallelCase(FAMILIES["gpt2"], LAYERS),
        "llama layers, stages": ParallelCase(DEEP["llama"], _in_stages({}, tp_size=2)),
        "mixtral layers, copies, tight": ParallelCase(FAMILIES["mixtral"], LAYERS, tight=True),
    },
    "mixtral layers, copies, tight",
)
ON_A_REAL_ONE = (
    "gpt2 layers", "llama layers, tight", "llama tokens between", "llama heads for tokens",
    "llama all keys", "llama ring", "gpt2 1f1b", "llama 1f1b, tight", "llama interleaved",
    "llama zbv", "mixtral experts",
)  # fmt: skip
SAVED = some(("gpt2 layers", "llama zbv", "mixtral experts"), "gpt2 layers", "llama zbv")
COMPARED = some(
    tuple(ON_TWO),
    "llama layers, tight", "llama tokens between", "gpt2 heads for tokens", "gpt2 1f1b, tight",
    "llama layers, bf16", "llama layers, divided loss", "llama 1f1b, offloaded",
    "mixtral experts, tight",
)  # fmt: skip
"""Of ON_TWO, on the simulated GPU. SAVED are compared as well, by the bytes of their files."""
CASES = {2: ON_TWO | RINGS, 4: ON_FOUR}


def each(directory: Path) -> None:
    """All cases of so many ranks: losses, weights, and the device's peak in its budget."""
    castor.launch_from_torch()
    rank, size = distributed.get_rank(), distributed.get_world_size()
    asked = os.environ.get("CASES")
    names = asked.split("|") if asked else {2: [*COMPARED, *RINGS], 4: [*ON_FOUR]}[size]
    for name in names:
        case = CASES[size][name]
        more = {"device_memory": _tight(case)} if case.tight else {}
        boosted = case.boost(**more)
        losses = case.train(boosted)
        report = boosted.report()
        assert report.peak_device_bytes <= report.device_budget_bytes
        assert report.device_link == _expected_link()
        assert all(map(torch.isfinite, torch.tensor(losses)))
        weights = [param.detach().cpu().clone() for param in boosted.model.parameters()]
        torch.save((losses, weights, vars(report)), directory / f"{name}.{rank}.pt")


WAITS = {
    "one process": ParallelCase(FAMILIES["llama"]),
    "tensor parallel": ON_TWO["llama layers"],
    "sequence parallel": ON_TWO["llama tokens between"],
    "vocabulary parallel loss": ON_TWO["llama layers, divided loss"],
    "context parallel, heads": ON_TWO["llama heads for tokens"],
    "context parallel, keys": ON_TWO["llama all keys"],
    "context parallel, ring": RINGS["llama ring"],
    "expert parallel": ON_TWO["mixtral experts"],
}
"""Cases of which host_waits counts; all are resident."""


def host_waits(directory: Path) -> None:
    """How often the host waits for its device in a forward and in a backward pass."""
    castor.launch_from_torch()
    gpu: Any = torch.simgpu.gpu  # type: ignore[attr-defined]
    for name, case in WAITS.items():
        if (name == "one process") != (distributed.get_world_size() == 1):
            continue
        boosted = case.boost(placement_policy="cuda", overlap="none")
        case.train(boosted, steps=3)
        batch = case.case.batch(0)
        counts = [gpu.counts()["host_waits"]]
        loss = boosted.model(**batch).loss
        counts.append(gpu.counts()["host_waits"])
        boosted.booster.backward(loss, boosted.optimizer)
        counts.append(gpu.counts()["host_waits"])
        write_own(directory, name, [counts[1] - counts[0], counts[2] - counts[1]])
        boosted.optimizer.step()


REDUCED = ("llama layers", "llama tokens between", "llama layers, bf16", "llama layers, tight")
"""Of ON_TWO, cases whose activations castor or the backend adds up."""


def reductions(directory: Path) -> None:
    """Losses of REDUCED with each reduction."""
    castor.launch_from_torch()
    found: dict[str, list[list[float]]] = {}
    for name in REDUCED:
        case = ON_TWO[name]
        # Data-parallel ranks have two communicators more, of 8 MiB, and a window.
        more = {"device_memory": _tight(case) + (17 << 20)} if case.tight else {}
        for reduction in ("ordered", "backend"):
            boosted = case.boost(reduction=reduction, **more)
            found.setdefault(name, []).append(case.train(boosted))
            report = boosted.report()
            assert (report.reduction, report.device_link) == (reduction, _expected_link())
    write_own(directory, "reductions", found)


ZERO = {
    2: {name: ON_TWO[name] for name in ("llama heads for tokens", "gpt2 all keys")},
    4: {
        name: ON_TWO[name]
        for name in ("gpt2 layers", "llama 1f1b", "mixtral experts", "llama tokens between")
    },
}
"""Layouts in which two ranks have the same shard of the model, by the number of ranks."""


def zero_stages(directory: Path) -> None:
    """Ranks that share no memory shard gradients and weights beside other parallelism.

    Every stage has the bits of stage 1, also behind a save at stage 3 that stage 1 loads.
    """
    os.environ["CASTOR_RANK_LINK"] = "group"
    castor.launch_from_torch()
    for name, case in ZERO[distributed.get_world_size()].items():
        results: dict[int, Any] = {}
        for stage in (1, 2, 3):
            boosted = case.boost(zero_stage=stage, placement_policy="cpu")
            losses = case.train(boosted, 0, 2)
            if stage == 3:
                boosted.booster.save(directory / name, boosted.model, boosted.optimizer)
            losses += case.train(boosted, 2, 2)
            report = boosted.report()
            assert (report.zero_stage, report.rank_shard_bytes > 0) == (stage, stage == 3)
            assert (report.rank_gradient_shard_bytes > 0) == (stage > 1)
            weights = [param.detach().cpu().clone() for param in boosted.model.parameters()]
            distributed.barrier()  # the others may still read this rank's shards
            results[stage] = losses, weights
            assert losses == results[1][0], name
            assert all(map(torch.equal, weights, results[1][1])), name
        loaded = case.boost(zero_stage=1, placement_policy="cpu")
        loaded.booster.load(directory / name, loaded.model, loaded.optimizer)
        assert case.train(loaded, 2, 2) == results[1][0][2:], name


def _expected_link() -> str:
    if os.environ.get("CASTOR_DEVICE_LINK") == "host":
        return ""
    return "simnccl" if os.environ.get("CASTOR_TEST_DEVICE", "").startswith("simgpu") else ""


def saves(directory: Path) -> None:
    """Three steps, a run and a model written, and three more."""
    castor.launch_from_torch()
    for name in SAVED:
        case = ON_TWO[name]
        boosted = case.boost()
        case.train(boosted, 0, 3)
        boosted.booster.save(directory / name, boosted.model, boosted.optimizer)
        boosted.booster.save_model(boosted.model, directory / f"{name}-model")
        write_own(directory, f"{name} later", case.train(boosted, 3, 3))


def loads(directory: Path) -> None:
    """Goes on with what others have written."""
    castor.launch_from_torch()
    for name in SAVED:
        case = ON_TWO[name]
        boosted = case.boost(lazy=True)
        boosted.booster.load(directory / name, boosted.model, boosted.optimizer)
        write_own(directory, f"{name} loaded", case.train(boosted, 3, 3))


def _tight(case: ParallelCase) -> int:
    """tight(0.5) of this rank's part; the largest of all ranks', which are given one budget."""
    boosted = case.boost()
    case.train(boosted, steps=2)
    params = [param.nbytes for param in boosted.model.parameters()]
    on_device = engine_of(boosted.model).device.type != "cpu"
    gradients = max(params) if on_device else 0  # the window of those on their way to the host
    report = boosted.report()
    need = report.peak_nonmodel_bytes + 0.5 * sum(params) + gradients + report.communicator_bytes
    return max(of_all(int(need)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    compute_as_asked()
    scenario: Callable[[Path], None] = globals()[sys.argv[1]]
    scenario(Path(sys.argv[2]))
