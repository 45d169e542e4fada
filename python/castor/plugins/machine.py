"""Resolves `device`, `device_memory` and `host_memory` of a plugin on this machine."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from castor._loader import load_cuda
from castor.config.memory import host_memory, share_memory, usable_bytes
from castor.distributed import ParallelGroups
from castor.errors import UsageError
from castor.runtime.ranks import rank_of_node, ranks_of_node

_USABLE_SHARE = 0.95
"""Share of a GPU's free memory in the default budget; the rest is for fragmentation."""


def choose_device(device: str | torch.device | None) -> torch.device:
    """Resolves GeminiPlugin(device=...) to a device of this machine.

    Args:
        device: "cpu", "cuda" or "cuda:1"; None: the GPU if there is one, else the CPU. With several
            ranks on a machine "cuda" is the GPU that LOCAL_RANK numbers, and torch's current device
            from then on.

    Returns:
        The device; a GPU with its index.

    Raises:
        UsageError: There is no such GPU, or none for this rank, or this torch has no CUDA.
        ValueError: The text names no device.
        ImportError: castor was built without its GPU parts, or for another CUDA than torch.
        NotImplementedError: The device is neither a CPU nor a CUDA GPU.
    """
    return _with_index(named_device(device), device)


def choose_torch_device(device: str | torch.device | None) -> torch.device:
    """Resolves the device of a plugin in which torch's own classes train.

    As choose_device, but castor's GPU parts are not needed.

    Raises:
        UsageError, ValueError, NotImplementedError: See choose_device.
    """
    return _with_index(_known_device(device), device)


def _with_index(chosen: torch.device, asked: str | torch.device | None) -> torch.device:
    """Returns a checked device, a GPU with the index that was asked for or this rank's."""
    if chosen.type == "cpu":
        return chosen
    return torch.device("cuda", chosen.index if ":" in str(asked) else _own_gpu())


def named_device(device: str | torch.device | None) -> torch.device:
    """Checks that this machine has a device, without taking any of its memory.

    Args:
        device: See choose_device.

    Returns:
        The device, without an index where none was given.

    Raises:
        UsageError: There is no such GPU, or this torch has no CUDA.
        ValueError, ImportError, NotImplementedError: See choose_device.
    """
    chosen = _known_device(device)
    if chosen.type != "cpu":
        load_cuda()
    return chosen


def _known_device(device: str | torch.device | None) -> torch.device:
    """Checks that torch has a device; see named_device."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(
            f"device is {device!r}; choose 'cpu', 'cuda' or the number of a GPU, 'cuda:0'"
        ) from None
    if chosen.type == "cpu":
        return torch.device("cpu")
    if chosen.type != "cuda":
        raise NotImplementedError(
            f"device={str(device)!r} is not supported; castor computes on 'cuda' and 'cpu'"
        )
    check_cuda(chosen)
    return chosen


def _own_gpu() -> int:
    """Returns the index of this process's GPU where the user named none."""
    ranks, count = ranks_of_node(), torch.cuda.device_count()
    # A script that starts its processes itself may have set the current device of each.
    if ranks == 1 or ("LOCAL_RANK" not in os.environ and torch.cuda.current_device() > 0):
        return torch.cuda.current_device()
    if 1 < count < ranks:
        raise UsageError(
            f"{ranks} ranks were started on this machine, and torch finds {count} GPUs: start "
            f"{count}, or say which GPU a rank computes on, with device='cuda:0'"
        )
    # A single visible GPU may be another one on each rank: launchers set CUDA_VISIBLE_DEVICES.
    index = rank_of_node() if count > 1 else 0
    torch.cuda.set_device(index)  # "cuda" means the same to the rest of the script
    return index


def check_cuda(device: torch.device) -> None:
    """Raises UsageError unless torch has this GPU."""
    instead = "; pass device='cpu' to train inside a budgeted host arena"
    if torch.version.cuda is None:
        raise UsageError(
            f"device='{device}' needs a torch with CUDA, and torch {torch.__version__} has none: "
            f"install a CUDA build of torch {torch.__version__.split('+')[0]}{instead}"
        )
    if not torch.cuda.is_available():
        raise UsageError(
            f"device='{device}' needs a GPU, and torch {torch.__version__} finds none: check that "
            f"nvidia-smi lists one and that CUDA_VISIBLE_DEVICES does not hide it{instead}"
        )
    count = torch.cuda.device_count()
    if (device.index or 0) >= count:
        raise UsageError(
            f"device='{device}' is not there: torch finds {count} GPUs, 'cuda:0' to "
            f"'cuda:{count - 1}'"
        )


def choose_budgets(
    device: torch.device,
    device_bytes: int | None,
    host_bytes: int | None,
    *,
    ranks: int | None = None,
) -> tuple[int, int]:
    """Returns the budgets of the device and the host in bytes, with defaults for None.

    The default of a GPU is 95% of the memory that is free there or cached by torch. The default of
    the host is the usable memory of castor.config.memory, which the ranks of one machine share. The
    CPU device shares that memory with the host.

    Args:
        device: Device of the model.
        device_bytes: Budget of the device that was asked for.
        host_bytes: Budget of the host that was asked for.
        ranks: Number of ranks on this machine; None: as the launcher of this process says.
    """
    if device_bytes is not None and host_bytes is not None:
        return device_bytes, host_bytes
    usable = usable_bytes(host_memory().available_bytes) // (ranks or ranks_of_node())
    if device.type == "cpu":
        return share_memory(device_bytes, host_bytes, usable_bytes=usable)
    return (
        _free_gpu_bytes(device) if device_bytes is None else device_bytes,
        max(1, usable) if host_bytes is None else host_bytes,
    )


def warn_of_budgets(
    device: torch.device, device_bytes: int, host_bytes: int, *, stacklevel: int
) -> None:
    """Warns of budgets above the memory of the machine: the kernel kills a process that fills them.

    Args:
        device: Device of the model; the CPU device's memory is the host's.
        device_bytes: Budget of the device.
        host_bytes: Budget of the host tier.
        stacklevel: As warnings.warn counts, from the caller of this function.
    """
    on_cpu = device.type == "cpu"
    memory = host_memory()
    ranks = ranks_of_node()
    asked = ranks * (host_bytes + (device_bytes if on_cpu else 0))
    if asked <= memory.grantable_bytes:
        return
    of_ranks = f" in {ranks} ranks" if ranks > 1 else ""
    granted = memory.limit_bytes is not None and memory.limit_bytes < memory.total_bytes
    giver = "cgroup grants" if granted else "machine has"
    warnings.warn(
        f"{'device_memory and host_memory come' if on_cpu else 'host_memory comes'} to "
        f"{_gib(asked)} ({asked} bytes{of_ranks}), and this {giver} "
        f"{_gib(memory.grantable_bytes)}: a run that fills its budgets is killed by the kernel. "
        "Give less; what the host then has no room for goes to NVMe, with nvme_path",
        RuntimeWarning,
        stacklevel=stacklevel + 1,
    )


def check_gpus(
    groups: ParallelGroups, device: torch.device, device_bytes: int, *, stacklevel: int
) -> None:
    """Checks that every rank has a GPU of its own. Collective; does nothing on the CPU device.

    Ranks that share a GPU which has room for all their budgets get a warning.

    Args:
        groups: Process groups of all ranks.
        device: Device of this rank.
        device_bytes: Budget of this rank on the device.
        stacklevel: As warnings.warn counts, from the caller of this function.

    Raises:
        UsageError: The budgets of ranks that share a GPU come to more than its memory; every rank
            raises it.
    """
    if device.type == "cpu":
        return
    own = torch.get_device_module(device).get_device_properties(device)
    everyone = groups.gather((str(own.uuid), own.total_memory, device_bytes))
    for sharing, numbers in _sharing([uuid for uuid, _, _ in everyone]):
        budgets = sum(everyone[rank][2] for rank in sharing)
        uuid, total, _ = everyone[sharing[0]]
        shared = (
            f"ranks {numbers} compute on one GPU ({uuid}), and their device_memory comes to "
            f"{_gib(budgets)}"
        )
        if budgets > total:
            raise UsageError(
                f"{shared} of the {_gib(total)} that it has: {_INSTEAD}, or less device_memory"
            )
        if groups.rank in sharing:
            warnings.warn(
                f"{shared}; they wait for each other there: {_INSTEAD}",
                RuntimeWarning,
                stacklevel=stacklevel + 1,
            )


def check_own_gpus(device: torch.device, gather: Callable[[Any], list[Any]]) -> None:
    """Checks that no two ranks compute on one GPU, which NCCL refuses. Collective.

    Args:
        device: GPU of this rank.
        gather: Returns the values that all ranks call it with.

    Raises:
        UsageError: Two ranks compute on one GPU; every rank raises it.
    """
    own = torch.get_device_module(device).get_device_properties(device)
    uuids = gather(str(own.uuid))
    for sharing, numbers in _sharing(uuids):
        raise UsageError(
            f"ranks {numbers} compute on one GPU ({uuids[sharing[0]]}), which torch's process "
            f"groups of GPUs refuse: {_INSTEAD}"
        )


_INSTEAD = "start as many ranks as there are GPUs, or give each its own device='cuda:I'"


def _sharing(uuids: Sequence[str]) -> Iterator[tuple[list[int], str]]:
    """Yields the ranks that share each GPU, and their numbers in words.

    Args:
        uuids: Identifier of each rank's GPU, in rank order.
    """
    for uuid in sorted(set(uuids)):
        sharing = [rank for rank, one in enumerate(uuids) if one == uuid]
        if len(sharing) > 1:
            yield sharing, f"{', '.join(map(str, sharing[:-1]))} and {sharing[-1]}"


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def _free_gpu_bytes(device: torch.device) -> int:
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(_USABLE_SHARE * (free + cached))
