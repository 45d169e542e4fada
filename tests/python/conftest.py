"""Shared set-up of the Python tests: offline, seeded, quiet."""

import os

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import transformers

transformers.logging.set_verbosity_error()
# One thread: a second changes nothing on these sizes, and sums are then the same on any machine.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Every test starts from the same random state."""
    torch.manual_seed(0)
