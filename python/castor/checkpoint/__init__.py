"""Checkpoints: durable, verified, in the layouts of Hugging Face and torch.optim."""

from castor.checkpoint.background import save_reading, wait
from castor.checkpoint.dataloader import make_resumable
from castor.checkpoint.model import save_model
from castor.checkpoint.model_load import load_model
from castor.checkpoint.optimizer import driver_of, save_optimizer
from castor.checkpoint.optimizer_load import load_optimizer
from castor.checkpoint.reading import Reading, Saving, at_once
from castor.checkpoint.run import CheckpointInfo, latest, load, process_state, save
from castor.checkpoint.scheduler import load_lr_scheduler, save_lr_scheduler
from castor.checkpoint.serve import PartsOf
from castor.checkpoint.shares import Share

__all__ = [
    "CheckpointInfo",
    "PartsOf",
    "Reading",
    "Saving",
    "Share",
    "at_once",
    "driver_of",
    "latest",
    "load",
    "load_lr_scheduler",
    "load_model",
    "load_optimizer",
    "make_resumable",
    "process_state",
    "save",
    "save_lr_scheduler",
    "save_model",
    "save_optimizer",
    "save_reading",
    "wait",
]
