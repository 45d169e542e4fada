"""Takes the arguments of plugins, and resolves those of GeminiPlugin."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch.optim import Optimizer

from castor.config import GeminiConfig, did_you_mean, parse_bandwidth, parse_bytes, parse_paths
from castor.config.declared import hints_of, types_of, values_of
from castor.config.settings import GeminiArguments, GeminiSettings

# --- Arguments that GeminiPlugin knows and cannot honour yet --------------------------------------

# Arguments of Colossal-AI's GeminiPlugin that this version knows but cannot honour, each with the
# value that asks for nothing, and what to do instead.
NOT_YET: dict[str, tuple[object, str]] = {
    "chunk_config_dict": (None, "give chunk_bytes"),
    "chunk_init_device": (None, "chunks are built on the host"),
    "master_weights": (True, "16-bit precisions always keep fp32 master weights"),
    "force_outputs_fp32": (False, "cast the outputs in the training loop"),
    "strict_ddp_mode": (False, "every rank has all gradients"),
    "search_range_m": (None, "give chunk_bytes"),
    "hidden_dim": (None, "give chunk_bytes"),
    "min_chunk_size_m": (None, "give chunk_bytes"),
    "memstats": (None, "give trace_file"),
    "tp_size": (1, "use HybridParallelPlugin"),
    "pp_size": (1, "use HybridParallelPlugin"),
    "ep_size": (1, "use HybridParallelPlugin"),
    "sp_size": (1, "use HybridParallelPlugin"),
    "num_microbatches": (None, "use HybridParallelPlugin(pp_size=...)"),
    "microbatch_size": (None, "use HybridParallelPlugin(pp_size=...)"),
    "enable_all_optimization": (False, "turn it on in the model"),
    "enable_fused_normalization": (False, "turn it on in the model"),
    "enable_flash_attention": (False, "use the model's attn_implementation"),
    "enable_jit_fused": (False, "turn it on in the model"),
    "enable_sequence_parallelism": (False, "every rank has full sequences"),
    "enable_async_reduce": (False, "gradients are exchanged when backward is over"),
    "use_fp8": (False, "use bf16"),
    "fp8_communication": (False, "gradients are sent in the working precision"),
    "nvme_dir": (None, "give nvme_path"),
}


def arguments_of(plugin: type) -> frozenset[str]:
    """Returns the names of the arguments that a plugin and its base classes take and honour."""
    return frozenset(
        one.name
        for kind in plugin.__mro__
        if kind is not object
        for one in inspect.signature(kind.__init__).parameters.values()  # type: ignore[misc]
        if one.kind is one.KEYWORD_ONLY
    )


def check_not_yet(plugin: type, arguments: dict[str, Any]) -> None:
    """Checks arguments that a plugin accepts only at the value that asks for nothing.

    Raises:
        TypeError: There is no such argument.
        NotImplementedError: An argument has another value.
    """
    for name, value in arguments.items():
        if name not in NOT_YET:
            known = did_you_mean(name, arguments_of(plugin) | NOT_YET.keys())
            raise TypeError(f"{plugin.__name__} has no argument {name!r}{known}")
        neutral, instead = NOT_YET[name]
        if value != neutral:
            raise NotImplementedError(f"{name}={value!r} is not supported yet: {instead}")


# --- Takes the arguments of plugins, and resolves those of GeminiPlugin ---------------------------

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
