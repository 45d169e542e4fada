"""Machines with several ranks each, and what joins these."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from castor.config import Precision, parse_bandwidth, parse_paths
from castor.config.settings_file import read_settings_file
from castor.errors import UsageError
from castor.estimate.machine import Machine, machine

_COUNTS = ("nodes", "ranks_per_node")
_BETWEEN = ("link", "link_latency_us", "network", "network_latency_us")
_OF_A_NODE = (
    *("device_memory", "host_memory", "h2d", "d2h", "dram", "flops", "device_bandwidth"),
    *("operator_us", "nvme", "nvme_memory"),
)
_MICROSECOND = 1e-6


@dataclass(frozen=True, kw_only=True)
class Link:
    """Between ranks."""

    bytes_per_second: float
    """Bytes per second that a rank sends while it receives as many."""
    latency: float = 0.0
    """Seconds until the first byte is there."""

    def seconds(self, num_bytes: float) -> float:
        """Seconds of one message."""
        return self.latency + num_bytes / self.bytes_per_second

    def collective(self, operation: str, num_bytes: float, ranks: int) -> float:
        """Seconds of a collective operation in which each rank gives `num_bytes`.

        Chan et al. 2007, section 4: each part goes once over each rank's link, twice for a sum.
        What is passed on goes to one neighbour alone.
        """
        if ranks == 1:
            return 0.0
        others = ranks - 1
        if operation == "all_reduce":
            return 2 * self.seconds(num_bytes * others / ranks)
        if operation == "all_to_all":
            return self.seconds(num_bytes * others / ranks)
        if operation == "ring_shift":
            return self.seconds(num_bytes)
        return self.seconds(num_bytes * others)  # all_gather

    def waiting(self, operation: str, ranks: int) -> float:
        """Seconds of these in which nothing is sent: a rank's processor is free for others."""
        if ranks == 1:
            return 0.0
        return 2 * self.latency if operation == "all_reduce" else self.latency


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Ranks that train one model."""

    machine: Machine
    """A rank's: its device, and its part of the host."""
    nodes: int
    ranks_per_node: int
    link: Link
    """Between ranks of a node."""
    network: Link
    """Link of a rank to other nodes."""
    on_host: bool
    """Whether ranks compute on the host's processors, which updates and exchanges need too."""
    at_once: int
    """Ranks of a node that can compute at one time: all, but where they share processors."""
    nvme_paths: tuple[str, ...] = ()
    """Directories on each node's NVMe; none: it has none."""

    @property
    def ranks(self) -> int:
        """Number of ranks on all nodes."""
        return self.nodes * self.ranks_per_node

    def between(self, ranks: int) -> Link:
        """Returns the link between neighbours, so many of them in a row."""
        return self.link if ranks <= self.ranks_per_node else self.network

    @classmethod
    def read(cls, path: Path, precision: Precision) -> Cluster:
        """Reads a description of a cluster; see of.

        Raises:
            OSError: It cannot be read.
            UsageError, ValueError, TypeError: It is no description of a cluster.
        """
        try:
            return cls.of(read_settings_file(path), precision)
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from error

    @classmethod
    def of(cls, settings: Mapping[str, Any], precision: Precision) -> Cluster:
        """A cluster from names and values.

        Args:
            settings: nodes (default 1) and ranks_per_node; device: a preset of castor estimate, or
                "cpu" for ranks that compute on the host; figures of castor estimate's options
                (device_memory, host_memory, h2d, d2h, dram, flops, device_bandwidth, operator_us,
                nvme, nvme_memory), of which host_memory, dram, nvme and nvme_memory are a whole
                node's; nvme_path, with nvme: where that is on each node, as GeminiPlugin's;
                at_once, with device "cpu": how many of a node's ranks have processors at one time
                (default: all); link and network: bandwidths of a rank to others of its node and to
                other nodes, such as "300GB/s";
                link_latency_us and network_latency_us (default 0).
            precision: Of the matrix products.

        Raises:
            UsageError: A name is not known, or a figure is missing.
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
        needed = {"link": counts["ranks_per_node"] > 1, "network": counts["nodes"] > 1}
        for name, asked in needed.items():
            if asked and name not in settings:
                raise UsageError(f"{name} is missing: the bandwidth of a rank, such as '300GB/s'")
        device = settings.get("device")
        on_host = device == "cpu"
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
        if on_host:  # copies between tiers of one memory
            figures.setdefault("h2d", figures.get("dram"))
        of_node = machine(None if on_host else device, precision=precision, **figures)
        each = counts["ranks_per_node"]
        return cls(
            machine=dataclasses.replace(
                of_node,
                host_bytes=of_node.host_bytes // each,
                dram=of_node.dram / min(each, at_once),
                nvme=of_node.nvme and of_node.nvme / each,
                nvme_bytes=of_node.nvme_bytes and of_node.nvme_bytes // each,
            ),
            nodes=counts["nodes"],
            ranks_per_node=each,
            link=_link(settings, "link"),
            network=_link(settings, "network"),
            on_host=on_host,
            at_once=min(each, at_once),
            nvme_paths=tuple(map(str, parse_paths(settings.get("nvme_path"), "nvme_path"))),
        )


def _link(settings: Mapping[str, Any], name: str) -> Link:
    if name not in settings:
        return Link(bytes_per_second=math.inf)  # between a rank and itself
    latency = settings.get(f"{name}_latency_us", 0)
    if isinstance(latency, bool) or not isinstance(latency, int | float) or not latency >= 0:
        raise UsageError(f"{name}_latency_us is {latency!r}; give microseconds, 0 or more")
    return Link(
        bytes_per_second=float(parse_bandwidth(settings[name], name)),
        latency=latency * _MICROSECOND,
    )
