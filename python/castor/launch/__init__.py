"""Starts a script in a process, or on every rank of this machine, for `castor run`."""

from castor.launch.run import run
from castor.launch.settings import check_paths, read_settings

__all__ = ["check_paths", "read_settings", "run"]
