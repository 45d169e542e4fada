"""Process groups through which ranks send memory of their devices: NCCL between GPUs."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import distributed
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from castor import _C
from castor.config.names import Reduction
from castor.errors import Error, UsageError
from castor.runtime.process_groups import end_groups, make_group
from castor.runtime.rank_group import check_equal
from castor.runtime.waits import watch_link

_LINKS = ("auto", "host")


@dataclass(frozen=True, kw_only=True, eq=False)
class DeviceGroup:
    """A process group between devices.

    It ends in a later boost (end_unused_groups), when no rank uses it any more. Users hold its
    `handle.connection()`.
    """

    group: distributed.ProcessGroup
    """The process group."""
    handle: _C.DeviceGroup
    """The same group for C++."""


@dataclass(kw_only=True, eq=False)
class _GroupsOfRun:
    """The groups between devices that were made in one default process group."""

    world: weakref.ref[distributed.ProcessGroup]
    num_made: int = 0
    """Number of groups that all ranks have begun to make."""
    groups: dict[int, DeviceGroup] = field(default_factory=dict)
    """Groups that have not ended, by their numbers, which are the same on all ranks."""


_run: _GroupsOfRun | None = None


def _groups_of_run() -> _GroupsOfRun:
    """Returns the groups of the present default process group."""
    global _run
    world = distributed.group.WORLD
    assert world is not None
    if _run is None or _run.world() is not world:
        _run = _GroupsOfRun(world=weakref.ref(world))
    return _run


def end_unused_groups(gather: Callable[[Any], list[Any]]) -> None:
    """Ends the groups between devices that no rank uses any more. Collective.

    NCCL's communicators end on all ranks together: a rank that ends one waits for the others. So
    a group does not end when a rank collects the garbage of its model, but here, where every rank
    knows that all others end the same groups in the same order.

    Args:
        gather: Returns the values that all ranks of the run call it with.
    """
    run = _groups_of_run()
    if run.num_made == 0:  # on all ranks
        return
    unused = {
        number: one.handle.aborted() for number, one in run.groups.items() if not one.handle.used()
    }
    everyone: list[dict[int, str]] = gather(unused)
    for number in sorted(set.intersection(*map(set, everyone))):
        one = run.groups.pop(number)
        if any(of_rank[number] for of_rank in everyone):
            one.handle.abort("another rank has aborted it")  # it would wait for that one
        end_groups([one.group])


@dataclass(frozen=True, kw_only=True)
class DeviceBackend:
    """Backend of torch.distributed that sends memory of the ranks' devices."""

    name: str
    """Name of the backend: "nccl"."""
    device: torch.device
    """Device of this rank."""

    @classmethod
    def find(cls, device: torch.device, gather: Callable[[Any], list[Any]]) -> DeviceBackend | None:
        """Returns the backend of the ranks' devices. Collective.

        Args:
            device: Device of this rank.
            gather: Returns the values that all ranks call it with.

        Returns:
            The backend. None on the CPU device, where two ranks compute on one GPU (NCCL refuses
            that), where torch has no backend for the device, and where CASTOR_DEVICE_LINK is
            "host": tensors then go through host memory.

        Raises:
            UsageError: CASTOR_DEVICE_LINK is unknown, or differs between ranks; every rank raises.
        """
        if device.type == "cpu":
            return None
        link = os.environ.get("CASTOR_DEVICE_LINK", "auto")
        properties = torch.get_device_module(device).get_device_properties(device)
        everyone = gather((link, backend_of(device), str(properties.uuid)))
        links, backends, devices = zip(*everyone, strict=True)
        what, remedy = (
            "the environment's CASTOR_DEVICE_LINK",
            'give all "auto" (the default) or "host"',
        )
        check_equal([{what: repr(one)} for one in links], remedy=remedy)
        if link not in _LINKS:
            raise UsageError(f"CASTOR_DEVICE_LINK is {link!r} on all ranks; {remedy}")
        (name, *others) = set(backends)
        if link == "host" or others or name is None or len(set(devices)) < len(everyone):
            return None
        return cls(name=name, device=device)

    def group(self, parts: Sequence[Sequence[int]]) -> DeviceGroup:
        """Makes a process group of this process's subset of all ranks.

        Collective: every rank calls it, with the same `parts`. Every rank exchanges an element with
        the others of its subset, so that communicators exist and take their memory now.
        """
        run = _groups_of_run()
        number = run.num_made
        run.num_made += 1
        group = make_group(parts, backend=self.name)
        made = DeviceGroup(group=group, handle=_C.DeviceGroup(group.group_name, str(self.device)))
        run.groups[number] = made
        own = torch.zeros(1, dtype=torch.uint8, device=self.device)
        everyone = torch.empty(group.size(), dtype=torch.uint8, device=self.device)
        if group.size() > 1:
            distributed.all_gather_into_tensor(everyone, own, group=group)
        torch.get_device_module(self.device).synchronize(self.device)
        return made

    def free_bytes(self) -> int:
        """Returns the device's memory that nobody has, in bytes."""
        free: int = torch.get_device_module(self.device).mem_get_info(self.device)[0]
        return free


def backend_of(device: torch.device) -> str | None:
    """Returns the name of torch's backend between devices of this type; None: torch has none."""
    try:
        name = distributed.get_default_backend_for_device(device)
    except ValueError:
        return None
    return name if distributed.is_backend_available(name) else None


class DeviceLink:
    """Link between the devices of some ranks, over a process group of their own.

    A collective on a device waits for every rank, for ever. So a rank that cannot go on says so
    (fail), and a rank that has ended or is stopped is noticed where ranks share memory: what waits
    for it is ended, and later collectives raise Error.
    """

    def __init__(
        self,
        tensors: _C.RankTensors,
        group: DeviceGroup,
        device: torch.device,
        reduction: Reduction = "ordered",
    ) -> None:
        """Has the ranks send tensors of their devices over the group.

        Args:
            tensors: Collectives of the ranks.
            group: Group of the same ranks in the same order.
            device: Device of this rank.
            reduction: Who adds up, castor or the backend.
        """
        tensors.use_device_group(group.handle, str(device), reduction=reduction)
        self.group = group.group
        self.device = device
        self._tensors = tensors
        self._store = PrefixStore(f"castor/{self.group.group_name}", _get_default_store())
        self._expecting = False
        watch_link(self)

    @property
    def lost(self) -> str:
        """Name of the rank that is lost, and why; empty: none is."""
        return self._tensors.lost()

    @contextmanager
    def expecting(self) -> Iterator[None]:
        """Encloses a pass in which tensors go through the group without castor's collectives."""
        self._expecting = True
        self._tensors.expect_messages(True)
        try:
            yield
        finally:
            self._tensors.expect_messages(False)
            self._expecting = False

    def fail(self) -> None:
        """Ends what waits for the other ranks, and tells them that this one cannot go on."""
        self._tensors.abort_device("this rank could not go on")
        with suppress(RuntimeError):  # the rank that keeps the store has ended
            self._store.set("failed", "1")

    def check(self) -> None:
        """Raises Error if a rank is lost: what the device has computed since is undefined."""
        if lost := self.lost:
            raise Error(
                f"{lost}, and what this rank's device received is undefined: start all again from "
                "the last checkpoint"
            )

    def look(self) -> None:
        """Ends work of the device that waits for a rank which is lost. Called once a second."""
        self._tensors.look()
        if not self._expecting or self.lost:
            return
        with suppress(RuntimeError):  # the rank that keeps the store has ended, which is noticed
            if self._store.check(["failed"]):
                self._tensors.abort_device("another rank could not go on")


class DeviceReduction:
    """Collectives of data-parallel ranks between their devices.

    Gradients and weights have a process group each, since two threads of a rank use them. A rank
    that is lost is noticed as by DeviceLink.
    """

    def __init__(
        self,
        groups: Sequence[DeviceGroup],
        backend: DeviceBackend,
        *,
        reduction: Reduction,
        communicator_bytes: int,
        most_bytes: int | None,
    ) -> None:
        """Takes groups of data-parallel ranks, which nothing else uses.

        Args:
            groups: The group that adds up gradients, and the one that gathers weights.
            backend: Backend of both groups.
            reduction: Who adds up, castor or the backend.
            communicator_bytes: Device memory that the groups' communicators take.
            most_bytes: Device memory that they may take with the window and the buffers of
                gradients, else the host reduces; None: as much as they need.
        """
        gradients, weights = groups
        self.backend = backend.name
        self.communicator_bytes = communicator_bytes
        self.most_bytes = most_bytes
        self.sums = (
            _C.DeviceSums(gradients.handle, str(backend.device), reduction=reduction),
            _C.DeviceSums(weights.handle, str(backend.device), reduction=reduction),
        )
        watch_link(self)

    @property
    def least_budget(self) -> int:
        """Device bytes that a budget must have for the communicators; 0: the host may reduce."""
        return self.communicator_bytes if self.most_bytes is None else 0

    def look(self) -> None:
        """Ends a collective that waits for a rank which is lost. Called once a second."""
        for one in self.sums:
            one.look()


def why_through_host(device: torch.device) -> str:
    """Returns why there is no backend between the devices of ranks (DeviceBackend.find)."""
    if device.type == "cpu":
        return "this model's device is the CPU"
    return (
        "these ranks send through host memory (ranks that share a GPU, a torch without a backend "
        "for the device, or CASTOR_DEVICE_LINK=host)"
    )


def check_device_reduction(
    backend: DeviceBackend | None, device: torch.device, reduction: Reduction
) -> None:
    """Raises UsageError if ranks have to reduce on devices, and no backend is between these."""
    if backend is not None:
        return
    reason = why_through_host(device)
    if reduction == "backend":
        raise UsageError(
            "reduction='backend' has the backend between the ranks' GPUs add up, NCCL, and "
            f"{reason}: leave it out; castor then adds in rank order"
        )
    raise UsageError(
        f"reduce_on='device' has the ranks' GPUs reduce gradients, and {reason}: leave it out; the "
        "host then reduces, with the same bits"
    )
