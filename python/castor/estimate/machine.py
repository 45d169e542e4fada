"""Machines that steps are predicted for: presets with their sources, or the user's figures."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from dataclasses import dataclass
from importlib import resources
from typing import Any

from castor.config import Precision, parse_bandwidth, parse_bytes
from castor.config.memory import usable_bytes

_RATE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([GTP]?)(?:FLOPS?(?:/s)?)?\s*", re.IGNORECASE)
_PREFIXES = {"": 1.0, "G": 1e9, "T": 1e12, "P": 1e15}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Sustained figures of one device and its host."""

    name: str
    """Description of the machine."""
    device_bytes: int
    """Bytes of device memory that training may take."""
    host_bytes: int
    """Bytes of host memory that training may take."""
    h2d: float
    """Bytes per second of the link from host to device."""
    d2h: float
    """Bytes per second of the link from device to host."""
    dram: float
    """Bytes per second of host memory, reads and writes together."""
    flops: float
    """FLOP/s of matrix products in the working precision."""
    device_bandwidth: float | None
    """Bytes per second of device memory; None: operators are counted by FLOPs alone."""
    updates: float | None = None
    """Bytes per second of the host's optimizer alone, reads and writes together; None: dram."""
    operator_seconds: float | None = None
    """Seconds that each operator takes beside its FLOPs and bytes; None: not counted."""
    nvme: float | None = None
    """Bytes per second of NVMe, reads and writes together; None: the machine has no NVMe."""
    nvme_bytes: int | None = None
    """Bytes of NVMe that training may take; None: as many as it needs."""
    on_host: bool = False
    """Whether the device is castor's CPU device: the host's processors compute, copy and update."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            figure = field.name not in ("name", "on_host") and value is not None
            if figure and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{field.name} is {value}; it must be above 0")


@functools.cache
def _data() -> dict[str, Any]:
    text = resources.files("castor.estimate").joinpath("presets.json").read_text(encoding="utf-8")
    document: dict[str, Any] = json.loads(text)
    return document


CPU_DEVICE = "cpu"
"""Name, beside those of the presets, of castor's CPU device; it has no figures of its own."""


def preset_names() -> list[str]:
    """Returns the names of the presets, in the order of presets.json."""
    return list(_data()["presets"])


def preset(name: str, precision: Precision) -> Machine:
    """Returns a machine of presets.json: vendors' peaks times the sustained fractions there.

    Its host memory is GeminiPlugin's default budget of the preset's host.

    Args:
        name: One of `preset_names`.
        precision: Precision of the matrix products.

    Raises:
        ValueError: There is no such preset.
    """
    data = _data()
    if name not in data["presets"]:
        known = ", ".join([*preset_names(), CPU_DEVICE])
        raise ValueError(f"unknown preset {name!r}; choose one of {known}")
    entry, sustained = data["presets"][name], data["sustained"]
    host = data["hosts"][entry["host"]]
    link = data["links"][entry["link"]]["bytes_per_second"] * sustained["link"]["value"]
    reserve = sustained["device_reserve_bytes"]["value"]
    return Machine(
        name=f"{entry['device']}, {host['description']}",
        device_bytes=entry["device_memory_bytes"] - reserve,
        host_bytes=usable_bytes(host["memory_bytes"]),
        h2d=link,
        d2h=link,
        dram=host["dram_bytes_per_second"] * sustained["dram"]["value"],
        flops=entry["flops"][precision] * sustained["flops"]["value"],
        device_bandwidth=entry["device_bytes_per_second"] * sustained["device_bandwidth"]["value"],
    )


def communicator_bytes() -> int:
    """Returns the device bytes that presets.json assumes for one communicator between GPUs."""
    value: int = _data()["sustained"]["communicator_bytes"]["value"]
    return value


def parse_flops(value: float | str, name: str) -> float:
    """Parses a rate of computing.

    Args:
        value: FLOP/s, or a string such as "70T" or "70 TFLOP/s".
        name: The argument's name, for errors.

    Returns:
        FLOP/s, above 0.

    Raises:
        ValueError: The string is no rate, or the rate is not above 0.
    """
    if isinstance(value, str):
        match = _RATE.fullmatch(value)
        if match is None:
            raise ValueError(f"{name} is {value!r}; write FLOP/s such as '70T' or '900G'")
        value = float(match[1]) * _PREFIXES[match[2].upper()]
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} is {value!r}; it must be above 0 FLOP/s")
    return value


def machine(
    base: str | None = None,
    *,
    precision: Precision = "bf16",
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    h2d: int | str | None = None,
    d2h: int | str | None = None,
    dram: int | str | None = None,
    updates: int | str | None = None,
    flops: float | str | None = None,
    device_bandwidth: int | str | None = None,
    operator_us: float | None = None,
    nvme: int | str | None = None,
    nvme_memory: int | str | None = None,
) -> Machine:
    """Makes a machine from a preset, from figures, or from a preset with some figures replaced.

    Sizes are bytes or strings such as "24GiB". Bandwidths are bytes per second or strings such as
    "25GB/s".

    Args:
        base: Name of a preset, or None. "cpu" is castor's CPU device: the host computes, and
            copies between tiers are copies in its memory, at `dram` unless `h2d` is given.
        precision: Precision whose rate of computing is taken from the preset.
        device_memory: Size of device memory.
        host_memory: Size of host memory.
        h2d: Bandwidth from host to device.
        d2h: Bandwidth from device to host. Without a preset, h2d by default.
        dram: Bandwidth of host memory, reads and writes together.
        updates: Bandwidth of the host's optimizer, which cores may bound below dram. Default: dram.
        flops: FLOP/s of matrix products, or a rate such as "70T".
        device_bandwidth: Bandwidth of device memory. Without it and without a preset, operators
            take the time of their FLOPs alone.
        operator_us: Microseconds, above 0, that an operator takes beside its FLOPs and bytes: its
            launch, and reading weights that few rows are multiplied with. Default: not counted.
        nvme: Bandwidth of NVMe, reads and writes together ("mixed" of `castor io-bench`). Without
            it the machine has no NVMe tier.
        nvme_memory: Size of NVMe. Default: as much as is needed.

    Raises:
        ValueError: The preset is unknown, a figure is no size, bandwidth or rate, nvme_memory is
            given without nvme, or figures are missing and there is no preset.
        TypeError: A figure has the wrong type.
    """
    sizes = {
        "device_bytes": ("device_memory", device_memory),
        "host_bytes": ("host_memory", host_memory),
        "nvme_bytes": ("nvme_memory", nvme_memory),
    }
    if nvme_memory is not None and nvme is None:
        raise ValueError("nvme_memory needs nvme, the bandwidth of the device")
    speeds = {"h2d": h2d, "d2h": d2h, "dram": dram, "device_bandwidth": device_bandwidth}
    speeds |= {"nvme": nvme, "updates": updates}
    given: dict[str, Any] = {}
    for field, (name, value) in sizes.items():
        if value is not None:
            given[field] = parse_bytes(value, name)
    for name, value in speeds.items():
        if value is not None:
            given[name] = float(parse_bandwidth(value, name))
    if operator_us is not None:
        given["operator_seconds"] = _microseconds(operator_us, "operator_us")
    if flops is not None:
        given["flops"] = parse_flops(flops, "flops")
    if base == CPU_DEVICE and "dram" in given:
        given.setdefault("h2d", given["dram"])
    if base is not None and base != CPU_DEVICE:
        return dataclasses.replace(preset(base, precision), **given)
    needed = {"device_bytes": "device memory", "host_bytes": "host memory", "h2d": "h2d"}
    needed |= {"dram": "dram", "flops": "flops"}
    missing = [label for field, label in needed.items() if field not in given]
    if missing:
        raise ValueError(
            f"the machine lacks {', '.join(missing)}; give them, or a preset: "
            f"{', '.join([*preset_names(), CPU_DEVICE])}"
        )
    given.setdefault("d2h", given["h2d"])
    given.setdefault("device_bandwidth", None)
    on_host = base == CPU_DEVICE
    name = "the CPU device of the host described" if on_host else "the machine described"
    return Machine(name=name, on_host=on_host, **given)


def _microseconds(value: object, name: str) -> float:
    """Converts microseconds to seconds."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"{name} is {value!r}; give microseconds, above 0")
    return value * 1e-6
