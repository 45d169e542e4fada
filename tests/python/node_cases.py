"""What tests of ranks on several machines run: `python node_cases.py NAME DIRECTORY`.

One machine stands in for them: CASTOR_RANK_LINK="node" (rank_processes.start).
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import distributed, nn

import tensor_cases
from castor.runtime.engine import engine_of
from grids import some
from helpers import copies
from rank_cases import CLOSE, EXACT, TOWER, RankCase, _of_rank, _refused, _tower_loss, boost, train
from simulated import compute_as_asked
from zoo import tower, tower_batch

SAME_AS_ONE = some({
    **{name: EXACT[name] for name in ("frozen", "uneven", "tight", "lazy", "packed", "sgd")},
    "gpt2": EXACT["gpt2"],  # its output embedding is tied
    "overlap": EXACT["overlap"],
}, "tight", "lazy", "overlap")  # fmt: skip
"""fp32: the bits of one process with as many micro-batches."""
SAME_AS_GROUP = some({
    name: CLOSE[name]
    for name in ("accumulated", "deferred", "bf16 fp32", "bf16 split_int8", "fp16", "nvme states")
}, "deferred", "bf16 split_int8", "nvme states")  # fmt: skip
"""The bits of ranks that share nothing."""
ON_THREE = some({name: EXACT[name] for name in ("tight", "uneven")}, "uneven")
STEPS = 4


@contextmanager
def over_the_group() -> Iterator[None]:
    os.environ["CASTOR_RANK_LINK"] = "group"
    yield
    os.environ["CASTOR_RANK_LINK"] = "node"


def _keep(case: RankCase, path: Path, rank: int) -> None:
    weights, losses, report = train(case, (rank,), steps=STEPS)
    torch.save((weights, losses, vars(report)), path)


def trained(directory: Path) -> None:
    with _of_rank() as rank:
        for name, case in (SAME_AS_ONE | SAME_AS_GROUP).items():
            _keep(case, directory / f"{name}.{rank}.pt", rank)
        with over_the_group():
            for name, case in SAME_AS_GROUP.items():
                _keep(case, directory / f"{name}.group.{rank}.pt", rank)


def tight(directory: Path) -> None:
    with _of_rank() as rank:
        _keep(EXACT["tight"], directory / f"tight.{rank}.pt", rank)


def on_three_nodes(directory: Path) -> None:
    with _of_rank() as rank:
        for name, case in ON_THREE.items():
            _keep(case, directory / f"{name}.{rank}.pt", rank)


WIDTH = 256


def _wide_loss(model: nn.Module, seed: int, _: int) -> torch.Tensor:
    loss: torch.Tensor = model(**tower_batch(seed, width=WIDTH))
    return loss


def sent(directory: Path) -> None:
    """Reports before and after each of three steps, of weights all of which are trained."""
    with _of_rank() as rank:
        boosted = boost(RankCase(lambda: tower(width=WIDTH), _wide_loss), placement_policy="cpu")
        reports = [vars(boosted.booster.report(boosted.model))]
        for step in range(3):
            boosted.step(_wide_loss(boosted.model, step, rank))
            reports.append(vars(boosted.booster.report(boosted.model)))
        sizes = [chunk["used_bytes"] for chunk in engine_of(boosted.model).session.chunks()]
        (directory / f"sent{rank}.json").write_text(json.dumps([reports, sizes], default=str))


def stages(_: Path) -> None:
    """Which stage runs where another is asked for, and what is said of the link."""
    with _of_rank() as rank:
        for stage in ("auto", 1, 2, 3):
            boosted = boost(TOWER, zero_stage=stage, placement_policy="cpu")
            boosted.step(_tower_loss(boosted.model, 0, rank))
            report = boosted.booster.report(boosted.model)
            weights = sum(param.double().sum().item() for param in boosted.model.parameters())
            print(weights, report.zero_stage, report.rank_shared_bytes > 0, report.rank_link)
            distributed.barrier()


def divided(directory: Path) -> None:
    """Two ranks a layer: the ranks of a part, every other one, are seen as what they are.

    As on several machines, and then on one.
    """
    with _of_rank() as rank:
        case = tensor_cases.FAMILIES["llama"]
        for link in ("node", "auto"):
            os.environ["CASTOR_RANK_LINK"] = link
            boosted = tensor_cases.boost(case, 2)
            for step in range(2):
                batch = case.batch(10 * step + rank // 2)
                boosted.step(case.loss(boosted.model(**batch), batch))
            report = boosted.report()
            found = (copies(boosted.model.parameters()), report.rank_link, report.rank_shared_bytes)
            torch.save(found, directory / f"{link}.{rank}.pt")
            distributed.barrier()


def some_die(directory: Path) -> None:
    """KILLED are, at a PHASE of their second steps; others say why they end, and live."""
    with _of_rank() as rank:
        boosted = boost(TOWER, overlap=os.environ["OVERLAP"])
        boosted.step(_tower_loss(boosted.model, 0, rank))

        def die(*_: object) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        if str(rank) in os.environ["KILLED"].split():
            layer = boosted.model.layers[2]
            register: dict[str, Callable[..., object]] = {
                "forward": layer.register_forward_pre_hook,
                "backward": layer.register_full_backward_hook,
            }
            register[os.environ["PHASE"]](die)

        def train_on() -> None:
            for step in range(1, 4):
                boosted.step(_tower_loss(boosted.model, step, rank))

        print(_refused(train_on), flush=True)
        os._exit(0)  # there is nobody to meet at the end


if __name__ == "__main__":
    torch.set_num_threads(1)
    compute_as_asked()
    globals()[sys.argv[1]](Path(sys.argv[2]))
