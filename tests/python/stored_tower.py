"""A model of many small layers, with its weights and gradients on NVMe or without."""

from pathlib import Path
from typing import Any

from castor.runtime.engine import engine_of
from helpers import Boosted, boost, go_on
from zoo import tower

CHUNK = 2**13
BLOCK = 4096  # of NVMe
STATE = {"fp32": 3, "split": 5, "split_bf16": 3, "split_int8": 3}
"""Of a chunk's bytes at least: what its optimizer state takes, with scales."""
WIDTH, DEPTH = 64, 48
"""Of a tower of many chunks, each of one layer."""


def short_host(chunk_bytes: int = CHUNK, *, precision: str = "fp32", state: str = "fp32") -> int:
    """Host bytes for the smallest windows, and little more: all weights have to go to NVMe."""
    per_chunk = 6 if state == "fp32" and precision != "fp32" else STATE[state]
    return 6 * (chunk_bytes + 2 * BLOCK) + per_chunk * chunk_bytes + 6 * BLOCK


def on_nvme(path: Path, chunk_bytes: int | None = None, **settings: Any) -> dict[str, Any]:
    precision = settings.get("precision", "fp32")
    if chunk_bytes is None:
        chunk_bytes = WIDTH * (WIDTH + 8) * (4 if precision == "fp32" else 2)
    state = settings.get("optim_state_format") or "fp32"
    return {
        "nvme_path": path,
        "host_memory": short_host(chunk_bytes, precision=precision, state=state),
    }


def largest_chunk(boosted: Boosted) -> int:
    chunks = engine_of(boosted.model).session.chunks()
    return max(int(chunk["used_bytes"]) for chunk in chunks)


def wide(path: Path | None = None, **settings: Any) -> Boosted:
    """A tower, its weights on NVMe if there is a path."""
    if path is not None:
        settings |= on_nvme(path, **settings)
    boosted = boost(tower(width=WIDTH, depth=DEPTH), chunk_bytes=CHUNK, **settings)
    assert (boosted.report().nvme_weight_bytes > 0) == (path is not None)
    return boosted


def go_on_wide(boosted: Boosted, first: int = 0, steps: int = 3) -> list[float]:
    return go_on(boosted, first, steps, width=WIDTH)
