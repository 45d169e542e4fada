"""Boost in one call, of settings in one place (as TorchAcc's accelerate)."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from castor.booster import Booster
from castor.config import did_you_mean
from castor.config.files import read_settings_file, write_settings_file
from castor.data import AsyncLoader
from castor.errors import UsageError
from castor.plugins import GeminiPlugin
from castor.plugins.by_name import PLUGIN_ARGUMENTS, plugin_of

_LOADER_ARGUMENTS = inspect.signature(AsyncLoader).parameters.keys() - {"loader", "device"}


@dataclass(frozen=True, init=False)
class Config:
    """Options of `accelerate` beside the objects, as names and values.

    Two are equal when they were given the same. Files hold the names and values that were given, as
    `castor run --config` reads and writes them; its runs' castor.json is one. Trainers have loaders
    of their own: with one of AsyncLoader's arguments a file is refused there.

    Args:
        **arguments: GeminiPlugin's, HybridParallelPlugin's, and of AsyncLoader's depth, buckets and
            pad_values. They are checked, each by its owner, when they are used; paths and devices
            become strings, tuples lists.

    Raises:
        TypeError: There are no arguments of these names.
    """

    arguments: Mapping[str, Any]
    """The arguments as they were given, in a form that a file can hold."""

    def __init__(self, **arguments: Any) -> None:
        known = PLUGIN_ARGUMENTS | _LOADER_ARGUMENTS
        unknown = [name for name in arguments if name not in known]
        if unknown:
            nearest = did_you_mean(unknown[0], known) if len(unknown) == 1 else ""
            raise TypeError(
                f"castor.Config has no argument {', '.join(map(repr, unknown))}{nearest}; it takes "
                "those of GeminiPlugin and "
                f"HybridParallelPlugin, and {', '.join(sorted(_LOADER_ARGUMENTS))}"
            )
        plain = {name: _plain(value) for name, value in arguments.items()}
        object.__setattr__(self, "arguments", plain)

    def plugin(self) -> GeminiPlugin:
        """A new plugin: HybridParallelPlugin where one of its own arguments was given.

        Raises:
            As the plugin's.
        """
        own = {k: v for k, v in self.arguments.items() if k not in _LOADER_ARGUMENTS}
        return plugin_of(own)

    def loader_arguments(self) -> dict[str, Any]:
        """The arguments of AsyncLoader that were given."""
        return {k: v for k, v in self.arguments.items() if k in _LOADER_ARGUMENTS}

    def save(self, path: str | Path) -> None:
        """Writes a file that `read` and `castor run --config` read.

        Args:
            path: Ends in .json for JSON; YAML otherwise, which needs pyyaml.

        Raises:
            UsageError: A value is none that a file can hold; the message names it.
            OSError: The file cannot be written.
        """
        write_settings_file(Path(path), self.arguments)

    @classmethod
    def read(cls, path: str | Path) -> Config:
        """From a file: JSON if its name ends in .json, else YAML.

        Raises:
            TypeError: It has names that are no arguments.
            UsageError: It holds something else than names and values.
            OSError: It cannot be read.
        """
        return cls(**read_settings_file(Path(path)))


def accelerate(
    model: nn.Module,
    optimizer: Any = None,
    dataloader: Any = None,
    lr_scheduler: Any = None,
    config: Config | None = None,
) -> Any:
    """Boosts a model and what trains it, in place, and has its batches come ahead of time.

    Where several ranks have been started it joins them, as Booster.boost does; each is given a
    loader of its own part of the data (`config.plugin().prepare_dataloader`). `castor.booster_of`
    finds the Booster, whose backward, save, load and report the loop calls.

    Args:
        model: Any module on the CPU.
        optimizer: As in Booster.boost. One that is made afterwards, of the boosted model's
            parameters, is torch's own: castor neither holds its state nor masters of 16-bit
            weights.
        dataloader: What gives the batches. An AsyncLoader of it is returned, with the config's
            options, for the device of the model; one that is an AsyncLoader stays as it is.
        lr_scheduler: Returned as it is; it may have been made before.
        config: Default: GeminiPlugin's and AsyncLoader's defaults.

    Returns:
        What was given, in the order of the arguments: the model alone, or a tuple of the model and
        the others that are not None.

    Raises:
        TypeError: An argument is something else.
        UsageError: The config has loader options and there is no loader to have them, or see
            GeminiPlugin.configure; nothing was boosted.
        ValueError, NotImplementedError, OutOfMemoryError, ImportError: As those of GeminiPlugin,
            AsyncLoader and Booster.boost.
    """
    config = Config() if config is None else config
    if not isinstance(config, Config):
        raise TypeError(f"config is a {type(config).__name__}; give a castor.Config")
    plugin = config.plugin()
    options = config.loader_arguments()
    if options and (dataloader is None or isinstance(dataloader, AsyncLoader)):
        given = "an AsyncLoader, which has its own" if dataloader is not None else "no dataloader"
        raise UsageError(
            f"the config has {', '.join(options)} for a loader, and castor.accelerate was given "
            f"{given}: leave them out, or give the DataLoader"
        )
    if dataloader is not None and not isinstance(dataloader, AsyncLoader):
        dataloader = AsyncLoader(dataloader, device=plugin.config.device, **options)
    Booster(plugin).boost(model, optimizer, dataloader=dataloader, lr_scheduler=lr_scheduler)
    returned = [one for one in (model, optimizer, dataloader, lr_scheduler) if one is not None]
    return tuple(returned) if len(returned) > 1 else model


def _plain(value: Any) -> Any:
    """Converts a value to what JSON holds; others stay as they are."""
    if isinstance(value, Path | torch.device):
        return str(value)
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple | range):
        return [_plain(one) for one in value]
    return value
