"""Host memory: what this process may take of it, and what budgets are by default.

The only place where castor asks the machine for memory: budgets, `castor doctor` and the hosts of
`castor estimate` come from here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")

_UNLIMITED_V1 = 1 << 60  # cgroup v1 writes "no limit" as a number near 2^63
_HEADROOM_DIVISOR, _LEAST_HEADROOM, _MOST_HEADROOM = 10, 384 << 20, 8 << 30
_DEVICE_DIVISOR, _LEAST_DIVISOR = 4, 8


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Memory of the host at this moment. Bytes."""

    total_bytes: int
    """Memory of the machine."""
    machine_available_bytes: int
    """Memory that the machine could give without swapping (MemAvailable)."""
    limit_bytes: int | None
    """The least that a cgroup around this process grants; None: none has a limit."""
    available_bytes: int
    """Memory that this process can take: the least of the machine's and of its cgroups'."""

    @property
    def grantable_bytes(self) -> int:
        """Memory that this process could take if no other process held any."""
        return (
            self.total_bytes
            if self.limit_bytes is None
            else min(self.total_bytes, self.limit_bytes)
        )


def host_memory(*, proc: Path = PROC, cgroups: Path = CGROUPS) -> HostMemory:
    """Looks at the machine and at the cgroups around this process, of version 1 and 2.

    A cgroup leaves its limit (memory.max and memory.high, or memory.limit_in_bytes) less what is
    used; file pages that the kernel would drop first (inactive_file) count as free.

    Args:
        proc: Where the proc file system is.
        cgroups: Where cgroups are mounted.

    Raises:
        RuntimeError: The kernel does not tell what is available.
    """
    figures = dict(_pairs((proc / "meminfo").read_text(encoding="utf-8").replace(":", "")))
    if "MemAvailable" not in figures or "MemTotal" not in figures:
        raise RuntimeError(
            f"{proc}/meminfo has no MemAvailable line; give device_memory and host_memory"
        )
    total, available = figures["MemTotal"] * 1024, figures["MemAvailable"] * 1024
    groups = list(_limits(proc, cgroups))
    return HostMemory(
        total_bytes=total,
        machine_available_bytes=available,
        limit_bytes=min((limit for limit, _ in groups), default=None),
        available_bytes=min([available, *(max(0, limit - used) for limit, used in groups)]),
    )


def usable_bytes(available_bytes: int) -> int:
    """Returns the bytes of so much available memory that budgets may add up to.

    The rest is for the process itself: data loaders, batches, buffers of files, and what malloc
    keeps of freed tensors, which is tens of MiB a thread however small the model. It is a tenth, at
    most 8 GiB and at least 384 MiB, but never more than half.
    """
    tenth = available_bytes // _HEADROOM_DIVISOR
    headroom = min(max(tenth, _LEAST_HEADROOM), available_bytes // 2, _MOST_HEADROOM)
    return available_bytes - headroom


def share_memory(
    device_bytes: int | None, host_bytes: int | None, *, usable_bytes: int
) -> tuple[int, int]:
    """The budgets of a device and a host tier that are in the same memory, as the CPU device's are.

    Args:
        device_bytes: What was asked for; None for the default.
        host_bytes: As device_bytes.
        usable_bytes: What both may come to.

    Returns:
        (device, host): what was asked for. By default the device has a quarter and the host the
        rest; where one of them was given, the other has what that leaves, and at least an eighth.
    """
    least = max(1, usable_bytes // _LEAST_DIVISOR)
    if device_bytes is None:
        quarter = usable_bytes // _DEVICE_DIVISOR
        device_bytes = max(least, quarter if host_bytes is None else usable_bytes - host_bytes)
    if host_bytes is None:
        host_bytes = max(least, usable_bytes - device_bytes)
    return device_bytes, host_bytes


def cgroup_folders(
    controller: str, *, proc: Path = PROC, cgroups: Path = CGROUPS
) -> Iterator[tuple[int, Path]]:
    """(cgroup version, folder) of the groups that `controller` has around this process.

    From the group itself upwards; in a container some are not to be seen, and some do not exist.
    """
    for line in (read_small(proc / "self" / "cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2; beside version 1 it is mounted one level deeper
            for mount in (cgroups, cgroups / "unified"):
                yield from ((2, folder) for folder in _upwards(mount, path))
        elif controller in controllers.split(","):
            yield from ((1, folder) for folder in _upwards(cgroups / controller, path))


def read_small(path: Path) -> str | None:
    """The text of a small file; None if it does not exist or may not be read."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return None


def _limits(proc: Path, cgroups: Path) -> Iterator[tuple[int, int]]:
    """(limit, bytes in use that cannot be dropped) of each cgroup with a limit."""
    for version, folder in cgroup_folders("memory", proc=proc, cgroups=cgroups):
        if version == 2:
            names = ["memory.max", "memory.high"]
            usage, cache = "memory.current", "inactive_file"
        else:
            names = ["memory.limit_in_bytes"]
            usage, cache = "memory.usage_in_bytes", "total_inactive_file"
        texts = [read_small(folder / name) for name in names]
        limits = [int(text) for text in texts if text is not None and text != "max"]
        limit = min(limits, default=_UNLIMITED_V1)
        if limit < _UNLIMITED_V1:
            droppable = dict(_pairs(read_small(folder / "memory.stat") or "")).get(cache, 0)
            yield limit, max(0, int(read_small(folder / usage) or 0) - droppable)


def _pairs(text: str) -> Iterator[tuple[str, int]]:
    """The "name number" lines of a text."""
    for line in text.splitlines():
        words = line.split()
        if len(words) > 1 and words[1].isdecimal():
            yield words[0], int(words[1])


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    """The folder of a group and those above it, up to the mount."""
    folder = mount / path.strip("/")
    while True:
        yield folder
        if folder == mount:
            return
        folder = folder.parent
