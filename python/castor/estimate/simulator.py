"""Makes the arguments of _C.Simulator: a model in chunks, a machine, the seconds of an event."""

from __future__ import annotations

from typing import Any

import torch

from castor import _C
from castor.config import Precision, StateFormat
from castor.config.names import SCALAR_TYPES, ReducedOn
from castor.estimate.machine import Machine
from castor.estimate.metatrace import TraceEvent
from castor.estimate.workload import Overlap
from castor.runtime.experts import params_by_row
from castor.runtime.spec import ModelSpec


def lay_out(
    spec: ModelSpec,
    precision: Precision,
    state_format: StateFormat,
    rule: str,
    *,
    num_ranks: int = 1,
    chunk_bytes: int = 0,
) -> _C.Simulator:
    """Lays a model out in chunks.

    Args:
        spec: The model's structure as castor sees it.
        precision: Precision of parameters and gradients, except those of float32 parameters.
        state_format: Format of the optimizer state.
        rule: Name of the optimizer's update rule (castor.runtime.rules).
        num_ranks: Number of replicas, which shard the optimizer state.
        chunk_bytes: Bytes of a chunk; 0: as training chooses them.
    """
    params = zip(spec.names, spec.params, strict=True)
    return _C.Simulator(
        params=[(name, param.numel(), param.requires_grad) for name, param in params],
        modules=[(m.name, m.params, m.parent) for m in spec.modules],
        precision=SCALAR_TYPES[precision],
        chunk_bytes=chunk_bytes,
        state_format=state_format,
        rule=rule,
        num_ranks=num_ranks,
        in_fp32=[param.dtype == torch.float32 for param in spec.params],
        by_row=params_by_row(spec, [not param.requires_grad for param in spec.params]),
    )


def seconds_of(event: TraceEvent, machine: Machine) -> float:
    """Returns the seconds of an event's operators on a machine.

    An operator takes the larger of the times of its FLOPs and its bytes (roofline), and the
    machine's operator_seconds on top.
    """
    bandwidth = machine.device_bandwidth
    return len(event.work) * (machine.operator_seconds or 0.0) + sum(
        max(flops / machine.flops, touched / bandwidth if bandwidth else 0.0)
        for flops, touched in event.work
    )


def places(
    machine: Machine, *, ranks_sharing: int = 1, reduced_on: ReducedOn = "host"
) -> dict[str, Any]:
    """Returns the figures of a machine that decide on the tier of each payload.

    Args:
        machine: The machine.
        ranks_sharing: Number of the machine's ranks that share host storage of parameters and
            gradients. A simulator with more than one is laid out for replicas.
        reduced_on: Place where replicas reduce gradients, which need a smaller window of host
            memory on the device.
    """
    return {
        "policy": "auto",
        "offload_optim_frac": 0.0,
        "offload_param_frac": 0.0,
        "host_bytes": machine.host_bytes,
        "nvme_bytes_per_second": machine.nvme or 0.0,
        "ranks_sharing": ranks_sharing,
        "reduced_on": reduced_on,
    }


def options(
    machine: Machine,
    *,
    overlap: Overlap,
    max_prefetch: int = 1,
    margin_ratio: float = 1.0,
    num_ranks: int = 1,
    device_update_fraction: float = 0.0,
    reduced_on: ReducedOn = "host",
    gathering_ranks: int = 1,
) -> dict[str, Any]:
    """Returns the options of Simulator.run for a step.

    Args:
        machine: The machine that the step runs on.
        overlap: Overlap of the host's updates with the next forward.
        max_prefetch: GeminiPlugin's max_prefetch.
        margin_ratio: GeminiPlugin's gpu_margin_mem_ratio.
        num_ranks: Number of replicas, which shard the optimizer state.
        device_update_fraction: GeminiPlugin's device_update_fraction, as a number.
        reduced_on: See places().
        gathering_ranks: Number of replicas that reduce gradients of streamed chunks on their
            devices; 1: gradients go to the host in full.
    """
    on_host = machine.on_host
    copies = "synchronous" if on_host else "overlapped"
    return places(machine, reduced_on=reduced_on) | {
        "margin_ratio": margin_ratio,
        "max_prefetch": max_prefetch,
        "device_bytes": machine.device_bytes,
        "h2d_bytes_per_second": machine.h2d,
        "d2h_bytes_per_second": machine.d2h,
        "dram_bytes_per_second": machine.dram,
        "update_bytes_per_second": machine.updates or 0.0,
        "device_update_fraction": device_update_fraction,
        # For updates on the device.
        "device_memory_bytes_per_second": machine.device_bandwidth or machine.dram,
        "parameter_copies": copies,
        "gradient_copies": copies,
        "update_cores": "shared" if on_host else "own",
        "overlap": "none" if on_host else overlap,
        "num_ranks": num_ranks,
        "gathering_ranks": gathering_ranks,
        "with_norm": True,
    }
