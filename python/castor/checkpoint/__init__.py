"""Checkpoints: durable, verified, in the layouts of Hugging Face and torch.optim."""

from castor.checkpoint.background import save_reading, wait
from castor.checkpoint.dataloader import check_equal_loaders, make_resumable
from castor.checkpoint.model import save_model
from castor.checkpoint.model_load import prepare_load_model
from castor.checkpoint.optimizer import driver_of, save_optimizer
from castor.checkpoint.optimizer_load import prepare_load_optimizer
from castor.checkpoint.ranks import LocalShards, check_equal_saves, ready_on_all
from castor.checkpoint.reading import Reading, Saving, at_once
from castor.checkpoint.run import CheckpointInfo, latest, prepare_load, process_state, save
from castor.checkpoint.scheduler import load_lr_scheduler, save_lr_scheduler
from castor.checkpoint.shares import Share

__all__ = [
    "CheckpointInfo",
    "LocalShards",
    "Reading",
    "Saving",
    "Share",
    "at_once",
    "check_equal_loaders",
    "check_equal_saves",
    "driver_of",
    "latest",
    "load_lr_scheduler",
    "make_resumable",
    "prepare_load",
    "prepare_load_model",
    "prepare_load_optimizer",
    "process_state",
    "ready_on_all",
    "save",
    "save_lr_scheduler",
    "save_model",
    "save_optimizer",
    "save_reading",
    "wait",
]
