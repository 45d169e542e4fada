"""What test_heartbeats.py runs on each rank: `python heartbeat_cases.py NAME DIRECTORY`.

VICTIM is lost in a module of its second step, HOW the environment says: "killed" or "stopped".
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import distributed

import castor
import rank_cases
from castor.runtime import heartbeats
from castor.runtime.heartbeats import begin_heartbeats
from device_link_cases import linked, wait_for_a_lost_rank
from rank_cases import TOWER
from simulated import compute_as_asked

INTERVAL_SECONDS = 0.1
SECONDS_UNTIL_LOST = 3.0
SECONDS_TO_BE_HEARD = 5 * INTERVAL_SECONDS
_SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}


def _begin() -> int:
    """Begins quick heartbeats; the number of this rank."""
    castor.launch_from_torch()
    begin_heartbeats(interval_seconds=INTERVAL_SECONDS, seconds_until_lost=SECONDS_UNTIL_LOST)
    return distributed.get_rank()


def _end_self(directory: Path) -> None:
    """Ends or stops this process, once the others know where it is."""
    time.sleep(SECONDS_TO_BE_HEARD)
    (directory / "lost").write_text(str(time.time()))
    os.kill(os.getpid(), _SIGNALS[os.environ["HOW"]])


def one_is_lost(directory: Path) -> None:
    """The victim is lost in a module; the others end with an error, as a script without a try."""
    rank = _begin()
    boosted = rank_cases.boost(TOWER, zero_stage=int(os.environ.get("ZERO_STAGE", "1")))
    boosted.step(rank_cases._tower_loss(boosted.model, 0, rank))
    boosted.booster.save(directory / "run", boosted.model, boosted.optimizer)

    def lose(*_: object) -> None:
        _end_self(directory)

    if rank == int(os.environ["VICTIM"]):
        boosted.model.layers[2].register_forward_pre_hook(lose)
    for step in range(1, 4):
        boosted.step(rank_cases._tower_loss(boosted.model, step, rank))


def one_is_lost_beside_devices(directory: Path) -> None:
    """A collective of devices waits for rank 1, with which rank 0 shares no memory."""
    rank = _begin()
    ranks = linked()
    if rank == 1:
        _end_self(directory)
    print(*wait_for_a_lost_rank(ranks), flush=True)
    os._exit(0)


def ends_well(directory: Path) -> None:
    """Ranks end one after the other; threads by their names, and what a forked child does."""
    rank = _begin()
    boosted = rank_cases.boost(TOWER)
    boosted.step(rank_cases._tower_loss(boosted.model, 0, rank))
    tasks = Path("/proc/self/task").iterdir()
    print([(task / "comm").read_text().strip() for task in tasks].count("castor-beats"))
    child = os.fork()
    if child == 0:
        heartbeats._end()
        os._exit(0)
    os.waitpid(child, 0)
    distributed.barrier()
    if rank == 1:
        distributed.destroy_process_group()
        return
    time.sleep(SECONDS_UNTIL_LOST + 3)
    heartbeats._end()
    print([thread.name for thread in threading.enumerate()].count("castor waits"), flush=True)
    os._exit(0)  # who has ended does not come to the end of process groups


if __name__ == "__main__":
    torch.set_num_threads(1)
    compute_as_asked()
    scenario: Any = globals()[sys.argv[1]]
    scenario(Path(sys.argv[2]))
