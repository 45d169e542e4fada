"""Ranks of launchers that tell them little: `python launch_cases.py NAME DIRECTORY`."""

import os
import signal
import sys
import warnings
from pathlib import Path

import torch
from torch import distributed, multiprocessing

import castor
from castor.config.memory import host_memory
from castor.runtime.ranks import be_alone, rank_of_node, ranks_of_node
from rank_processes import held_port

RANKS = 2


def _train() -> list[str]:
    """Where this rank is, its part of the host's memory, the loss of a step, what was warned."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    plugin = castor.GeminiPlugin(device="cpu", precision="fp32")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        castor.Booster(plugin).boost(model, optimizer)
    loss = model(torch.full((2, 8), 0.1)).square().mean()
    loss.backward()
    optimizer.step()
    share = plugin.config.host_bytes / host_memory().available_bytes
    said = " ".join(str(one.message) for one in warned) or "nothing"
    return [f"{rank_of_node()} of {ranks_of_node()}", str(share), str(loss.item()), said]


def assert_shares(rank: int, lines: list[str]) -> None:
    """What _train has found on one of RANKS that know of each other."""
    place, budget, loss, warned = lines
    assert (place, warned) == (f"{rank} of {RANKS}", "nothing")
    assert float(budget) <= 1 / RANKS
    assert float(loss) < 1


def _join() -> None:
    """By RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT alone."""
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
        os.environ.pop(name, None)
    castor.launch_from_torch()


def told_no_more(_: Path) -> None:
    """Ranks that have met on this machine, or whose launcher says more by names of its own."""
    _join()
    print(*_train(), sep="\n")


def elsewhere(_: Path) -> None:
    """As told_no_more, of ranks that have met at an address that may be another machine's."""
    _join()
    os.environ["MASTER_ADDR"] = "10.0.0.1"
    print(*_train(), sep="\n")


def _spawned(rank: int, port: int, directory: Path) -> None:
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    distributed.init_process_group("gloo", rank=rank, world_size=RANKS)
    (directory / f"{rank}.txt").write_text("\n".join(_train()))
    distributed.destroy_process_group()


def spawn(directory: Path) -> None:
    with held_port() as holder:
        multiprocessing.spawn(_spawned, args=(holder.getsockname()[1], directory), nprocs=RANKS)


def forks(_: Path) -> None:
    """Prints the status of a forked child that does all that is to be done at exit."""
    be_alone()
    distributed.all_reduce(torch.ones(1))
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # where it waits for ever
        sys.exit()
    print(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]))
