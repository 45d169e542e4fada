"""Shared set-up of the recipes' tests: offline, one thread, quiet."""

import atexit
import os
import shutil
import tempfile
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Read when datasets is imported: rows tokenised in tests stay out of the user's cache.
os.environ["HF_DATASETS_CACHE"] = tempfile.mkdtemp(prefix="castor-recipes-")

import torch
import transformers

import small_model

atexit.register(shutil.rmtree, os.environ["HF_DATASETS_CACHE"], ignore_errors=True)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights, a tokenizer and rows: small_model.make."""
    return small_model.make(tmp_path_factory.mktemp("place"))
