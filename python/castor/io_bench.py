"""Measures a directory's device, and predicts a step with the optimizer state there."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from castor import _C
from castor.config import parse_bytes

Mix = Literal["read", "write", "mixed"]
Engine = Literal["auto", "io_uring", "threads"]

MIXES: tuple[Mix, ...] = get_args(Mix)
BLOCKS = ("256KiB", "1MiB", "4MiB")
DEPTHS = (4, 16, 64)

STATE_BYTES = {
    "fp32": 12.0,
    "split": 10.0,
    "split_bf16": 6.0,
    "split_int8": 4.0 + 8.0 / _C.MOMENT_BLOCK,
}
"""Bytes of optimizer state for each bf16 parameter: docs/design/0012."""

ENOUGH = 0.95
"""A setting that reaches this share of the best one is as good, and the cheapest such is taken."""
DUPLEX = 1.25
"""Mixed bandwidth over that of reading and writing in turn, above which the two overlap."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One workload: sequential blocks of one size, a fixed number of them in flight."""

    mix: Mix
    block_bytes: int
    depth: int
    read_bytes_per_second: float
    write_bytes_per_second: float
    engine: str
    """Name and settings of the I/O engine."""

    @property
    def bytes_per_second(self) -> float:
        """Both directions together."""
        return self.read_bytes_per_second + self.write_bytes_per_second

    @property
    def buffer_bytes(self) -> int:
        """Host memory in flight."""
        return self.block_bytes * self.depth


@dataclass(frozen=True, kw_only=True)
class IoReport:
    """All that was measured on one path."""

    file: str
    """The file and how it is opened: O_DIRECT, or buffered and why."""
    direct: bool
    """Transfers go past the page cache (O_DIRECT)."""
    why_no_io_uring: str
    """Empty where io_uring works."""
    measurements: tuple[Measurement, ...] = field(repr=False)

    def best(self, mix: Mix) -> Measurement:
        """The measurement with the most bytes per second.

        Raises:
            ValueError: Nothing of this mix was measured.
        """
        return max(self._of(mix), key=lambda m: m.bytes_per_second)

    def at(self, mix: Mix, block_bytes: int, depth: int) -> Measurement:
        """The measurement at one setting.

        Raises:
            ValueError: There is none.
        """
        for m in self._of(mix):
            if (m.block_bytes, m.depth) == (block_bytes, depth):
                return m
        raise ValueError(
            f"nothing was measured with mix={mix!r}, blocks of {block_bytes} bytes and {depth} in "
            "flight"
        )

    def suggested(self, mix: Mix = "mixed") -> Measurement:
        """The one with the least memory in flight among those within 5% of the best.

        Raises:
            ValueError: Nothing of this mix was measured.
        """
        enough = ENOUGH * self.best(mix).bytes_per_second
        return min(
            (m for m in self._of(mix) if m.bytes_per_second >= enough),
            key=lambda m: (m.buffer_bytes, -m.bytes_per_second),
        )

    @property
    def full_duplex(self) -> bool:
        """True if reading and writing at once is clearly faster than one after the other."""
        read, write = self.best("read").bytes_per_second, self.best("write").bytes_per_second
        in_turn = 2 / (1 / read + 1 / write)
        return self.best("mixed").bytes_per_second > DUPLEX * in_turn

    def step_seconds(self, model_params: float, state_format: str) -> float:
        """Time that the transfers of one optimizer step take, all of the state being on this path.

        Args:
            model_params: Trainable parameters.
            state_format: "fp32", "split", "split_bf16" or "split_int8".

        Returns:
            Seconds, at the mixed bandwidth of the suggested setting.

        Raises:
            ValueError: As `step_bytes`.
        """
        return 2 * step_bytes(model_params, state_format) / self.suggested().bytes_per_second

    def as_dict(self) -> dict[str, Any]:
        """For JSON: bytes, seconds, and what the engines said."""
        return {
            "file": self.file,
            "direct": self.direct,
            "why_no_io_uring": self.why_no_io_uring,
            "measurements": [vars(m) for m in self.measurements],
        }

    def _of(self, mix: Mix) -> list[Measurement]:
        found = [m for m in self.measurements if m.mix == mix]
        if not found:
            raise ValueError(f"nothing was measured with mix={mix!r}")
        return found


def step_bytes(model_params: float, state_format: str) -> float:
    """Bytes that an optimizer step reads from NVMe; it writes as many.

    Args:
        model_params: Trainable parameters, 1 or more.
        state_format: "fp32", "split", "split_bf16" or "split_int8".

    Raises:
        ValueError: The format is unknown, or there are no parameters.
    """
    if state_format not in STATE_BYTES:
        raise ValueError(f"state format {state_format!r}: use one of {', '.join(STATE_BYTES)}")
    if not model_params >= 1:
        raise ValueError(f"model_params is {model_params!r}; it must be 1 or more")
    return model_params * STATE_BYTES[state_format]


def measure(
    path: str | os.PathLike[str],
    *,
    file_bytes: int | str = "1GiB",
    blocks: Sequence[int | str] = BLOCKS,
    depths: Sequence[int] = DEPTHS,
    mixes: Sequence[Mix] = MIXES,
    engine: Engine = "auto",
    seconds: float = 1.0,
    progress: Callable[[Measurement], None] | None = None,
) -> IoReport:
    """Measures a directory with a file of its own, which is removed afterwards.

    Args:
        path: A directory on the device.
        file_bytes: Size of the file; the device's own cache should be smaller.
        blocks: Block sizes; multiples of 4 KiB.
        depths: Numbers of blocks in flight.
        mixes: "read", "write", "mixed" (half of each).
        engine: "auto" takes io_uring where it works.
        seconds: Time of each measurement.
        progress: Called after each.

    Raises:
        castor.IoError: The directory cannot be used, has no room, or the device failed.
        ValueError: A block is larger than the file or no multiple of 4 KiB, a depth is not
            positive, or there is nothing to measure.
    """
    num_bytes = parse_bytes(file_bytes, "file_bytes")
    sizes = [parse_bytes(block, "block") for block in blocks]
    if not (sizes and depths and mixes):
        raise ValueError("nothing to measure: give at least one block size, depth and mix")
    for size in sizes:
        if size > num_bytes or size % 4096 != 0:
            raise ValueError(
                f"a block of {size} bytes: it must be a multiple of 4096 and at most the file's "
                f"{num_bytes}"
            )
    if min(depths) < 1:
        raise ValueError(f"depth is {min(depths)}; it must be 1 or more")
    bench = _C.IoBench(os.fspath(path), num_bytes, engine)
    try:
        found = []
        for mix in mixes:
            for size in sizes:
                for depth in depths:
                    read, written, elapsed, said = bench.measure(mix, size, depth, seconds)
                    measurement = Measurement(
                        mix=mix,
                        block_bytes=size,
                        depth=depth,
                        read_bytes_per_second=read / elapsed,
                        write_bytes_per_second=written / elapsed,
                        engine=said,
                    )
                    found.append(measurement)
                    if progress is not None:
                        progress(measurement)
        return IoReport(
            file=bench.file,
            direct=bench.direct,
            why_no_io_uring=_C.why_no_io_uring(),
            measurements=tuple(found),
        )
    finally:
        bench.close()


def render(report: IoReport, console: Console) -> None:
    """Prints the measurements, and the setting they suggest."""
    console.print(f"[bold]file[/bold]   {escape(report.file)}")
    console.print(f"[bold]engine[/bold] {escape(report.measurements[0].engine)}")
    if report.why_no_io_uring:
        console.print(f"[yellow]no io_uring here:[/yellow] {escape(report.why_no_io_uring)}")
    table = Table("block", "depth", *(f"{mix} MB/s" for mix in MIXES))
    for column in table.columns:
        column.justify = "right"
    cells = {(m.block_bytes, m.depth, m.mix): m.bytes_per_second for m in report.measurements}
    for block, depth in sorted({(block, depth) for block, depth, _ in cells}):
        row = [f"{cells[block, depth, mix] / 1e6:,.0f}" for mix in MIXES]
        table.add_row(f"{block >> 10} KiB", str(depth), *row)
    console.print(table)
    suggested = report.suggested()
    console.print(
        f"[bold]suggested[/bold] blocks of {suggested.block_bytes >> 10} KiB, {suggested.depth} in "
        f"flight: {suggested.bytes_per_second / 1e6:,.0f} MB/s mixed, "
        f"{suggested.buffer_bytes / 2**20:.0f} MiB in flight"
    )
    duplex = "overlap" if report.full_duplex else "share one bandwidth"
    console.print(f"reads and writes {duplex} on this device")


def render_step(report: IoReport, console: Console, model_params: float, state_format: str) -> None:
    """Prints what an optimizer step moves and how long that takes.

    Raises:
        ValueError: As `step_bytes`.
    """
    one_way = step_bytes(model_params, state_format)
    console.print(
        f"[bold]one step[/bold] of {model_params:,.0f} parameters ({state_format}, "
        f"{STATE_BYTES[state_format]:.2f} bytes each): {one_way / 1e9:,.1f} GB read and as much "
        f"written, {report.step_seconds(model_params, state_format):,.1f} s with all of the state "
        "on this path"
    )
