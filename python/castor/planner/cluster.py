"""Clusters: nodes with several ranks each, and the links between ranks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

from castor.config import Precision, parse_bandwidth, parse_bytes, parse_paths
from castor.config.files import read_settings_file
from castor.config.names import ReducedOn, ReduceOn, Reduction
from castor.errors import UsageError
from castor.estimate.machine import CPU_DEVICE, Machine, communicator_bytes, machine

_COUNTS = ("nodes", "ranks_per_node")
_BETWEEN = ("link", "link_latency_us", "network", "network_latency_us", "transport", "reduction",
            "reduce_on", "communicator_memory")  # fmt: skip
_OF_A_NODE = (
    *("device_memory", "host_memory", "h2d", "d2h", "dram", "updates", "flops"),
    *("device_bandwidth", "operator_us", "nvme", "nvme_memory"),
)
_MICROSECOND = 1e-6
PlannedReduction = Literal["ordered", "backend", "auto"]
"""GeminiPlugin's reduction; "auto": the faster one of each layout."""
REDUCTIONS: dict[PlannedReduction, tuple[Reduction, ...]] = {
    "ordered": ("ordered",),
    "backend": ("backend",),
    "auto": ("ordered", "backend"),
}
"""Reductions that a search compares, by the description's word for them."""
Transport = Literal["host", "nccl"]
"""Path of activations between GPUs: through host memory, or directly by NCCL.

Gradients and weights of data-parallel replicas go the same way, unless reduce_on is "host".
"""
TRANSPORTS: dict[Transport, str] = {
    "host": "Ranks exchange through host memory.",
    "nccl": "Activations go from GPU to GPU by NCCL, which has not run on several GPUs yet; "
    "replicas exchange gradients and weights through host memory.",
}
"""Remark on predictions for each transport."""
BETWEEN_GPUS = (
    "Activations, and what replicas of one node exchange, go from GPU to GPU by NCCL, which has "
    "not run on several GPUs yet; between nodes replicas exchange through host memory."
)
"""Remark on predictions where replicas reduce gradients on their GPUs."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """Link between ranks."""

    bytes_per_second: float
    """Bytes per second that a rank sends while it receives as many."""
    latency: float = 0.0
    """Seconds until the first byte arrives."""
    d2h: float = math.inf
    """Bytes per second of the copy from a GPU to the host before sending; inf: there is none."""
    h2d: float = math.inf
    """Bytes per second of the copy from the host to a GPU after receiving; inf: there is none."""

    def seconds(self, num_bytes: float) -> float:
        """Returns the seconds of one message from rank to rank."""
        return self.seconds_on_host(num_bytes) + self._copies(num_bytes, num_bytes)

    def seconds_on_host(self, num_bytes: float) -> float:
        """Returns the seconds of one message between host memories, without copies to GPUs."""
        return self.latency + num_bytes / self.bytes_per_second

    def collective(self, operation: str, num_bytes: float, ranks: int) -> float:
        """Returns the seconds of a collective to which each rank contributes `num_bytes`.

        Chan et al. 2007, section 4: each shard crosses each rank's link once, in an all-reduce
        twice. A ring shift goes to one neighbour only. If the link goes through host memory, a rank
        also copies its input there and its output back.

        Args:
            operation: "all_reduce", "all_to_all", "ring_shift" or "all_gather".
            num_bytes: Bytes of a rank's input.
            ranks: Number of ranks that take part.
        """
        if ranks == 1:
            return 0.0
        others = ranks - 1
        got = num_bytes
        if operation == "all_reduce":
            seconds = 2 * self.seconds_on_host(num_bytes * others / ranks)
        elif operation == "all_to_all":
            seconds = self.seconds_on_host(num_bytes * others / ranks)
        elif operation == "ring_shift":
            seconds = self.seconds_on_host(num_bytes)
        else:  # all_gather
            got = num_bytes * others
            seconds = self.seconds_on_host(got)
        return seconds + self._copies(num_bytes, got)

    def _copies(self, given: float, got: float) -> float:
        return given / self.d2h + got / self.h2d

    def waiting(self, operation: str, ranks: int) -> float:
        """Returns a collective's seconds of latency, in which a rank's processor is free."""
        if ranks == 1:
            return 0.0
        return 2 * self.latency if operation == "all_reduce" else self.latency


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Ranks that train one model."""

    machine: Machine
    """Device of one rank, and the rank's share of its host."""
    nodes: int
    """Number of nodes."""
    ranks_per_node: int
    """Number of ranks on each node."""
    link: Link
    """Link between ranks of a node."""
    network: Link
    """Link of a rank to other nodes."""
    at_once: int
    """Number of a node's ranks that can compute at a time; fewer than all if they share
    processors."""
    nvme_paths: tuple[str, ...] = ()
    """Directories on each node's NVMe; empty: a node has no NVMe."""
    transport: Transport = "host"
    """Path of activations."""
    reduction: PlannedReduction = "ordered"
    """GeminiPlugin's reduction. With "auto" a search takes the faster one of each layout."""
    reduce_on: ReduceOn = "auto"
    """GeminiPlugin's reduce_on, of ordered sums. "auto" is one of the others in each layout
    (LayoutSearch)."""
    communicator_bytes: int = 0
    """Device bytes that each communicator of a rank takes with transport "nccl"."""
    replica_link: Link | None = None
    """Link of data-parallel replicas on one node; None: `link`."""

    @property
    def on_host(self) -> bool:
        """Whether ranks compute on the host's processors, which updates and collectives need."""
        return self.machine.on_host

    def remark(self) -> str:
        """Returns a remark on predictions; empty for one rank and for ranks on the host."""
        if self.on_host or self.ranks == 1:
            return ""
        return BETWEEN_GPUS if self.reduces_on_gpus else TRANSPORTS[self.transport]

    @property
    def reduces_on_gpus(self) -> bool:
        """Whether replicas on one node exchange from GPU to GPU; with "auto": whether some may."""
        on_gpus = self.transport == "nccl" and self.reduce_on != "host"
        return on_gpus or self.reduction != "ordered"

    @property
    def reduced_on(self) -> ReducedOn:
        """Place where replicas reduce gradients, as report().reduced_on names it."""
        return "device" if self.reduces_on_gpus else "host"

    def with_each_reduction(self) -> list[Cluster]:
        """Returns the cluster with each reduction that a search compares."""
        return [dataclasses.replace(self, reduction=one) for one in REDUCTIONS[self.reduction]]

    def dram_seconds(self, num_bytes: float) -> float:
        """Returns the seconds in which every rank of a node moves `num_bytes` through its memory.

        All ranks of a node share the bandwidth, whether or not they compute at a time.
        """
        return num_bytes / self.machine.dram * self.ranks_per_node / self.at_once

    @property
    def rings_overlap(self) -> bool:
        """Whether ring shifts run while ranks compute."""
        return self.transport == "nccl"

    @property
    def ranks(self) -> int:
        """Number of ranks on all nodes."""
        return self.nodes * self.ranks_per_node

    def between(self, ranks: int) -> Link:
        """Returns the link that groups of `ranks` neighbouring ranks exchange over."""
        return self.link if ranks <= self.ranks_per_node else self.network

    @classmethod
    def read(cls, path: Path, precision: Precision) -> Cluster:
        """Reads a description of a cluster; see `of`.

        Raises:
            OSError: The file cannot be read.
            UsageError, ValueError, TypeError: The file is no description of a cluster.
        """
        try:
            return cls.of(read_settings_file(path), precision)
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from error

    @classmethod
    def of(cls, settings: Mapping[str, Any], precision: Precision) -> Cluster:
        """Makes a cluster from settings by name.

        The settings are:

        - nodes (default 1) and ranks_per_node: counts.
        - device: a preset of castor estimate, or "cpu" for ranks that compute on the host.
        - device_memory, host_memory, h2d, d2h, dram, updates, flops, device_bandwidth,
          operator_us, nvme, nvme_memory: figures as in castor estimate's options. host_memory,
          dram, updates, nvme and nvme_memory are those of a full node.
        - nvme_path: directories on each node's NVMe, as in GeminiPlugin; required with nvme.
        - at_once: number of a node's ranks that have processors at a time, for device "cpu"
          (default: all).
        - transport: "host" (default) or, for GPUs, "nccl".
        - reduction: "ordered" (default) or, with transport "nccl", "backend", or "auto" for the
          faster one of each layout.
        - reduce_on: "auto" (default), "host" or, with transport "nccl", "device".
        - communicator_memory: device memory that each of NCCL's communicators takes, with transport
          "nccl" (default: presets.json).
        - network: bandwidth of a rank to other nodes, such as "40GB/s".
        - link: bandwidth of a rank to others of its node, for transport "nccl" and device "cpu".
          GPUs that exchange through host memory have the bandwidth of dram.
        - link_latency_us and network_latency_us: latencies in microseconds (default 0).

        Args:
            settings: The settings.
            precision: Precision of the matrix products.

        Raises:
            UsageError: A name is not known, or a setting is missing or does not make sense.
            ValueError, TypeError: A figure does not make sense.
        """
        known = {"device", "at_once", "nvme_path", *_COUNTS, *_BETWEEN, *_OF_A_NODE}
        if unknown := set(settings) - known:
            raise UsageError(
                f"'{min(unknown)}' is nothing that castor knows of a cluster; there are "
                f"{', '.join(sorted(known))}"
            )
        counts = {name: settings.get(name, 1 if name == "nodes" else None) for name in _COUNTS}
        for name, count in counts.items():
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise UsageError(f"{name} is {count!r}; give a whole number of 1 or more")
        device = settings.get("device")
        on_host = device == CPU_DEVICE
        transport = _transport_of(settings, on_host=on_host)
        through_host = transport == "host" and not on_host
        reduction = settings.get("reduction", "ordered")
        if reduction not in REDUCTIONS:
            given = ", ".join(REDUCTIONS)
            raise UsageError(f"reduction is {reduction!r}; give one of {given}")
        if reduction != "ordered" and transport != "nccl":
            raise UsageError(
                f"reduction: {reduction} has NCCL add up, between GPUs: give transport: nccl as "
                "well"
            )
        reduce_on = settings.get("reduce_on", "auto")
        if reduce_on not in get_args(ReduceOn):
            given = ", ".join(get_args(ReduceOn))
            raise UsageError(f"reduce_on is {reduce_on!r}; give one of {given}")
        if reduce_on == "device" and transport != "nccl":
            raise UsageError(
                "reduce_on: device has GPUs exchange gradients: give transport: nccl as well"
            )
        if "communicator_memory" in settings and transport != "nccl":
            raise UsageError("communicator_memory is of NCCL: give transport: nccl as well")
        of_communicator = settings.get("communicator_memory", communicator_bytes())
        needed = {
            "link": counts["ranks_per_node"] > 1 and not through_host,
            "network": counts["nodes"] > 1,
        }
        for name, asked in needed.items():
            if asked and name not in settings:
                raise UsageError(f"{name} is missing: the bandwidth of a rank, such as '300GB/s'")
        at_once = settings.get("at_once", counts["ranks_per_node"])
        if isinstance(at_once, bool) or not isinstance(at_once, int) or at_once < 1:
            raise UsageError(f"at_once is {at_once!r}; give a whole number of 1 or more")
        if "at_once" in settings and not on_host:
            raise UsageError("at_once is of ranks that compute on the host (device: cpu)")
        if ("nvme" in settings) != ("nvme_path" in settings):
            raise UsageError(
                "nvme_path is missing: the directory on each node's NVMe that a plan gives ranks"
                if "nvme" in settings
                else "nvme is missing: the bandwidth of a node's NVMe, reads and writes together "
                "('mixed' of castor io-bench), such as '3GB/s'"
            )
        figures = {name: settings[name] for name in _OF_A_NODE if name in settings}
        of_node = machine(device, precision=precision, **figures)
        each = counts["ranks_per_node"]
        of_rank = dataclasses.replace(
            of_node,
            host_bytes=of_node.host_bytes // each,
            dram=of_node.dram / min(each, at_once),
            updates=of_node.updates and of_node.updates / min(each, at_once),
            nvme=of_node.nvme and of_node.nvme / each,
            nvme_bytes=of_node.nvme_bytes and of_node.nvme_bytes // each,
        )
        link, network = _link(settings, "link"), _link(settings, "network")
        # A message is written into shared memory by one rank, and read by another.
        of_memory = of_rank.dram / 2 if each > 1 else math.inf
        replica_link = None if on_host else dataclasses.replace(link, bytes_per_second=of_memory)
        if through_host:
            copies = {"d2h": of_rank.d2h, "h2d": of_rank.h2d}
            network = dataclasses.replace(network, **copies)
            link = dataclasses.replace(link, bytes_per_second=of_memory, **copies)
        return cls(
            machine=of_rank,
            nodes=counts["nodes"],
            ranks_per_node=each,
            link=link,
            network=network,
            transport=transport,
            reduction=cast(PlannedReduction, reduction),
            reduce_on=cast(ReduceOn, reduce_on),
            communicator_bytes=parse_bytes(of_communicator, "communicator_memory"),
            replica_link=replica_link,
            at_once=min(each, at_once),
            nvme_paths=tuple(map(str, parse_paths(settings.get("nvme_path"), "nvme_path"))),
        )


def _transport_of(settings: Mapping[str, Any], *, on_host: bool) -> Transport:
    given = settings.get("transport")
    if given is None:
        if "link" in settings and not on_host:
            raise UsageError(
                "link is between GPUs, and transport: host sends activations through host memory: "
                "leave it out, or give transport: nccl, where each rank has a GPU of its own"
            )
        return "host"
    if given not in TRANSPORTS:
        raise UsageError(f"transport is {given!r}; give one of {', '.join(TRANSPORTS)}")
    if on_host:
        raise UsageError("transport is of GPUs; ranks of device: cpu share memory")
    if given == "host" and "link" in settings:
        raise UsageError("link has no use with transport: host; leave one of them out")
    return cast(Transport, given)


def _link(settings: Mapping[str, Any], name: str) -> Link:
    latency = settings.get(f"{name}_latency_us", 0)
    if isinstance(latency, bool) or not isinstance(latency, int | float) or not latency >= 0:
        raise UsageError(f"{name}_latency_us is {latency!r}; give microseconds, 0 or more")
    # A single rank has no link: it takes no time.
    bandwidth = float(parse_bandwidth(settings[name], name)) if name in settings else math.inf
    return Link(bytes_per_second=bandwidth, latency=latency * _MICROSECOND)
