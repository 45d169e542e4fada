"""Machines that a step is predicted for: presets with their sources, and figures of one's own."""

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
    """Sustained figures of one device and its host. Bytes, bytes per second, FLOP/s."""

    name: str
    device_bytes: int
    """Device memory that training may take."""
    host_bytes: int
    """Host memory that training may take."""
    h2d: float
    """Bandwidth of the link from host to device."""
    d2h: float
    """Bandwidth of the link from device to host."""
    dram: float
    """Bandwidth of host memory, reads and writes together."""
    flops: float
    """FLOP/s of matrix products in the working precision."""
    device_bandwidth: float | None
    """Bandwidth of device memory; None: operators are counted by FLOPs alone."""
    operator_seconds: float | None = None
    """Seconds of an operator beside its FLOPs and bytes; None: not counted."""
    nvme: float | None = None
    """Bandwidth of NVMe, reads and writes together; None: there is none."""
    nvme_bytes: int | None = None
    """NVMe bytes that training may take; None: as much as it needs."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            figure = field.name != "name" and value is not None
            if figure and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{field.name} is {value}; it must be above 0")


@functools.cache
def _data() -> dict[str, Any]:
    text = resources.files("castor.estimate").joinpath("presets.json").read_text(encoding="utf-8")
    document: dict[str, Any] = json.loads(text)
    return document


def preset_names() -> list[str]:
    """The presets there are, in the order of the data file."""
    return list(_data()["presets"])


def preset(name: str, precision: Precision) -> Machine:
    """A machine of presets.json: peaks of vendors times the sustained fractions there.

    Of the host's memory it has what GeminiPlugin's budget would be by default.

    Args:
        name: One of `preset_names`.
        precision: Of the matrix products.

    Raises:
        ValueError: There is no such preset.
    """
    data = _data()
    if name not in data["presets"]:
        raise ValueError(f"unknown preset {name!r}; choose one of {', '.join(preset_names())}")
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


def parse_flops(value: float | str, name: str) -> float:
    """Reads a rate of computing.

    Args:
        value: FLOP/s, or a string such as "70T" or "70 TFLOP/s".
        name: The argument's name, for errors.

    Returns:
        FLOP/s, above 0.

    Raises:
        ValueError: The string is no rate, or it is not above 0.
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
    flops: float | str | None = None,
    device_bandwidth: int | str | None = None,
    operator_us: float | None = None,
    nvme: int | str | None = None,
    nvme_memory: int | str | None = None,
) -> Machine:
    """A machine from a preset, from figures, or from a preset with some figures replaced.

    Args:
        base: A preset, or None.
        precision: Which of the preset's rates of computing counts.
        device_memory: Bytes, or a size such as "24GiB".
        host_memory: As device_memory.
        h2d: Bytes per second from host to device, or a bandwidth such as "25GB/s".
        d2h: From device to host. Without a preset, h2d by default.
        dram: Of host memory, reads and writes together.
        flops: FLOP/s of matrix products, or a rate such as "70T".
        device_bandwidth: Of device memory. Without it and without a preset, operators take the time
            of their FLOPs alone.
        operator_us: Microseconds that an operator takes beside its FLOPs and bytes, above 0: to be
            started, and to read weights of which few rows are multiplied. Default: not counted.
        nvme: Of NVMe, reads and writes together ("mixed" of `castor io-bench`). Without it
            there is no such tier.
        nvme_memory: Bytes of it, or a size. Default: as much as is needed.

    Raises:
        ValueError: The preset is unknown, a figure is no size, bandwidth or rate, or figures are
            missing while there is no preset.
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
    speeds["nvme"] = nvme
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
    if base is not None:
        return dataclasses.replace(preset(base, precision), **given)
    needed = {"device_bytes": "device memory", "host_bytes": "host memory", "h2d": "h2d"}
    needed |= {"dram": "dram", "flops": "flops"}
    missing = [label for field, label in needed.items() if field not in given]
    if missing:
        raise ValueError(
            f"the machine lacks {', '.join(missing)}; give them, or a preset: "
            f"{', '.join(preset_names())}"
        )
    given.setdefault("d2h", given["h2d"])
    given.setdefault("device_bandwidth", None)
    return Machine(name="the machine described", **given)


def _microseconds(value: object, name: str) -> float:
    """In seconds.

    Raises:
        ValueError: It is no number above 0.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"{name} is {value!r}; give microseconds, above 0")
    return value * 1e-6
