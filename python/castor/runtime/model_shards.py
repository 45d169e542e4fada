"""Records about a model of which this process has shards or stages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import nn

from castor import _C
from castor.runtime.rank_group import RankGroup
from castor.runtime.weight_conversions import FileLayout


@dataclass(frozen=True, kw_only=True)
class FullModel:
    """The full model, as it was before it was divided among ranks."""

    tensors: Mapping[str, tuple[int, tuple[int, ...]]]
    """state_dict key -> (number of the tensor, full shape), in order; tied keys share a number."""
    groups: Sequence[Sequence[str]]
    """Names of the parameters in the optimizer's groups, in order."""
    files: FileLayout | None = None
    """The layout of transformers' files; None: the model is not one of transformers."""
    adapters: Mapping[str, Mapping[str, str]] | None = None
    """Keys of each PeftModel adapter's file and of the state_dict, in the file's order; None: the
    model is no PeftModel."""

    def keys_like(self, own: Iterable[str]) -> dict[str, str]:
        """Maps each full-model key of this process's tensors to the key used here, in order."""
        own_key: dict[int, str] = {}
        for key in own:
            own_key.setdefault(self.tensors[key][0], key)
        return {
            key: own_key[number] for key, (number, _) in self.tensors.items() if number in own_key
        }

    def first_key(self, key: str) -> str:
        """Returns the first of the keys that are tied to `key`, which is the parameter's name."""
        return self._first_keys[self.tensors[key][0]]

    @cached_property
    def _first_keys(self) -> dict[int, str]:
        return {number: key for key, (number, _) in reversed([*self.tensors.items()])}


@dataclass(frozen=True, kw_only=True)
class Runs:
    """The place of a shard in the full tensor: runs of one length, evenly apart.

    In elements, or bytes, in the row-major orders of the shard and of the full tensor.
    """

    first: int
    """Beginning of the first run in the full tensor."""
    length: int
    """Length of each run; 1 or more."""
    stride: int
    """From the beginning of a run to that of the next one."""

    def in_bytes(self, size: int, start: int) -> Runs:
        """Returns the runs in bytes, for a tensor at byte `start` with elements of `size` bytes."""
        return Runs(
            first=start + self.first * size, length=self.length * size, stride=self.stride * size
        )

    def in_blocks(self, size: int, *, width: int) -> Runs:
        """Returns the runs of a tensor with `width` elements for each block of `size` elements."""
        return Runs(
            first=self.first // size * width,
            length=-(-self.length // size) * width,
            stride=self.stride // size * width,
        )

    def of(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Yields for [begin, end) of the shard (place in the full tensor, number of elements)."""
        while begin < end:
            run, within = divmod(begin, self.length)
            count = min(self.length - within, end - begin)
            yield self.first + run * self.stride + within, count
            begin += count


@dataclass(frozen=True, kw_only=True)
class Segments:
    """The place of a shard in the full tensor: a few segments of any lengths.

    In elements, or bytes, as for Runs.
    """

    places: tuple[tuple[int | None, int], ...]
    """(beginning in the full tensor, length) of each segment, in the order of the shard. If the
    beginning is None, another rank has the same elements, and writes them."""

    def in_bytes(self, size: int, start: int) -> Segments:
        """See Runs."""
        places = ((None if at is None else start + at * size, n * size) for at, n in self.places)
        return Segments(places=tuple(places))

    def in_blocks(self, size: int, *, width: int) -> Segments:
        """See Runs."""
        places = (
            (None if at is None else at // size * width, -(-n // size) * width)
            for at, n in self.places
        )
        return Segments(places=tuple(places))

    def of(self, begin: int, end: int) -> Iterator[tuple[int | None, int]]:
        """See Runs; a place of None: another rank writes these elements."""
        first = 0
        for at, length in self.places:
            skipped, upto = max(begin - first, 0), min(end - first, length)
            if skipped < upto:
                yield None if at is None else at + skipped, upto - skipped
            first += length


class ShardFinder(Protocol):
    """Finds this process's shards for the rank that writes a checkpoint."""

    def find(self, key: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (parameter, this process's shard of a tensor that belongs to it)."""
        ...


class ModelShards(Protocol):
    """Shards of layers, or stages: castor.distributed's TensorParallel and PipelineParallel."""

    @property
    def peers(self) -> Sequence[RankGroup]: ...  # noqa: D102
    @property
    def full_model(self) -> FullModel | None: ...  # noqa: D102
    @property
    def stage(self) -> int: ...  # noqa: D102
    @property
    def broken(self) -> str: ...  # noqa: D102
    @property
    def has_first_shard(self) -> bool: ...  # noqa: D102
    def settle_gradients(self, session: _C.Session, params: Sequence[nn.Parameter]) -> None: ...  # noqa: D102
    def norm(self, params: Sequence[torch.Tensor], squares: Sequence[float]) -> float: ...  # noqa: D102
    def full_shape(self, param: torch.Tensor) -> tuple[int, ...] | None: ...  # noqa: D102
    def local_shard(self, param: torch.Tensor, full: torch.Tensor) -> torch.Tensor: ...  # noqa: D102
    def runs(self, param: torch.Tensor) -> Runs | Segments | None: ...  # noqa: D102
    def barrier(self) -> None: ...  # noqa: D102
