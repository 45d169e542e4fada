"""What scripts of scenarios for several ranks have in common: `python SCRIPT NAME DIRECTORY`."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import distributed

import castor
from simulated import compute_as_asked


def run(scenarios: Mapping[str, Any]) -> None:
    """The named one of a script's functions, of the directory that the ranks share.

    All ranks begin it together, compute with a thread each, as CASTOR_TEST_DEVICE says, and end
    when all have ended it.
    """
    torch.set_num_threads(1)
    compute_as_asked()
    castor.launch_from_torch()
    scenarios[sys.argv[1]](Path(sys.argv[2]))
    distributed.barrier()
