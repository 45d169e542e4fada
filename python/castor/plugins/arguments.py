"""Takes the arguments of plugins, and resolves those of GeminiPlugin."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch.optim import Optimizer

from castor.config import GeminiConfig, parse_bandwidth, parse_bytes, parse_paths
from castor.config.declared import hints_of, types_of, values_of
from castor.config.settings import GeminiArguments, GeminiSettings
from castor.plugins.not_yet import check_not_yet

Plugin = TypeVar("Plugin")
Arguments = TypeVar("Arguments")
Given = ParamSpec("Given")


def takes(
    kind: Callable[Given, Arguments],
    *,
    others: Callable[[type, dict[str, Any]], None] = check_not_yet,
) -> Callable[[Callable[[Plugin, Arguments], None]], Callable[Concatenate[Plugin, Given], None]]:
    """Makes a plugin's __init__ take the fields of a dataclass as its arguments.

    Type checkers and inspect.signature see the dataclass's own signature. __init__ is called with
    the dataclass, whose checks have passed.

    Args:
        kind: The dataclass.
        others: Called with the plugin's class and the arguments that are no fields. It raises
            unless each is known and asks for nothing.
    """

    def decorate(
        init: Callable[[Plugin, Arguments], None],
    ) -> Callable[Concatenate[Plugin, Given], None]:
        by_position = sum(
            one.kind is one.POSITIONAL_OR_KEYWORD
            for one in inspect.signature(kind).parameters.values()
        )

        @functools.wraps(init)
        def take(self: Any, /, *positional: Any, **given: Any) -> None:
            if len(positional) > by_position:
                raise TypeError(
                    f"{type(self).__name__} takes arguments by their names, such as max_norm=1.0, "
                    f"and was given {positional[by_position]!r} without one"
                )
            unknown = [name for name in given if name not in types_of(kind)]
            others(type(self), {name: given.pop(name) for name in unknown})
            init(self, kind(*positional, **given))

        take.__signature__ = _signature(kind)  # type: ignore[attr-defined]
        return take

    return decorate


def _signature(kind: Any) -> inspect.Signature:
    """Returns the signature of an __init__ that takes a dataclass's fields, and those not yet."""
    fields, types = inspect.signature(kind).parameters, hints_of(kind)
    return inspect.Signature(
        [
            inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY),
            *(fields[name].replace(annotation=types[name]) for name in types_of(kind)),
            inspect.Parameter("not_yet", inspect.Parameter.VAR_KEYWORD, annotation=Any),
        ]
    )


def resolved(
    arguments: GeminiArguments, device: torch.device, device_bytes: int, host_bytes: int
) -> GeminiConfig:
    """Returns the settings that arguments come to on a device with these budgets.

    Raises:
        ValueError: An argument does not go with the device, or two contradict each other.
    """
    on_gpu = device.type != "cpu"
    if arguments.pin_memory and not on_gpu:
        raise ValueError("pin_memory=True needs device='cuda'; the CPU device copies nothing")
    if arguments.link_bandwidth is not None and on_gpu:
        raise ValueError(
            "link_bandwidth emulates a link on the CPU device, and a GPU has its own; leave it "
            "out, or pass device='cpu'"
        )
    by_default = "keep" if arguments.device_memory is None else "auto"
    return GeminiConfig(
        **values_of(arguments, GeminiSettings),
        device=str(device),
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        placement_policy=arguments.policy,
        offload_optim_frac=arguments.offload_optim_frac or 0.0,
        offload_param_frac=arguments.offload_param_frac or 0.0,
        precision=arguments.precision or ("bf16" if on_gpu else "fp32"),
        keep_fp32=tuple(arguments.keep_fp32),
        activations=by_default if arguments.activations is None else arguments.activations,
        activations_by_default=arguments.activations is None,
        overlap=arguments.overlap or ("forward" if on_gpu else "none"),
        chunk_bytes=size_of(arguments, "chunk_bytes") or 0,
        link_bytes_per_second=size_of(arguments, "link_bandwidth", parse_bandwidth) or 0,
        nvme_paths=parse_paths(arguments.nvme_path, "nvme_path"),
        nvme_bytes=size_of(arguments, "nvme_memory"),
    )


def size_of(
    arguments: GeminiArguments, name: str, parse: Callable[[Any, str], int] = parse_bytes
) -> int | None:
    """Returns the bytes of an argument that is a size; None: it was not given."""
    size = getattr(arguments, name)
    return None if size is None else parse(size, name)


def with_nvme_of(config: GeminiConfig, optimizers: Sequence[Optimizer]) -> GeminiConfig:
    """Returns the settings with the NVMe directory and fraction of a HybridAdam.

    Raises:
        ValueError: The plugin and a HybridAdam both give a directory.
    """
    asked = [getattr(optimizer, "requested_nvme", (0.0, None)) for optimizer in optimizers]
    fraction, directory = next((one for one in asked if one[1] is not None), (0.0, None))
    if directory is None:
        return config
    if config.nvme_paths:
        raise ValueError(
            f"GeminiPlugin(nvme_path=...) and HybridAdam(nvme_offload_dir={directory!r}) both "
            "say where optimizer state goes; give one"
        )
    return replace(
        config,
        nvme_paths=parse_paths(directory, "nvme_offload_dir"),
        nvme_offload_fraction=fraction,
    )
