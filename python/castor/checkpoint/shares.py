"""Checkpoints of several ranks: all write their shards into the same files at once."""

from __future__ import annotations

import io
import mmap
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from castor import _C
from castor.checkpoint.container import Tensors, layout_of, pieces
from castor.checkpoint.files import (
    FileEntry,
    fsync_file,
    let_go_of_pages,
    read_pieces,
    write_behind,
)
from castor.checkpoint.hub_names import ConvertedTensor, own_runs
from castor.checkpoint.pace import Pace
from castor.checkpoint.snapshot import SnapshotTensor
from castor.checkpoint.writer import WriteBehind, Writer
from castor.runtime.rank_group import RankGroup, sendable
from castor.runtime.waits import served_by_another

_MOST_RUNS = 1024
"""Largest number of runs of a rank's shard; with more, its elements are written one by one."""


class Share:
    """One rank's share of a save that all ranks of a model make together.

    The ranks' shards of every tensor are disjoint runs of bytes. The size of each file is known
    before anything is written. Rank 0 also writes everything that is no tensor. An exception on one
    rank is raised on every rank, at its next collective call.
    """

    def __init__(self, peers: RankGroup, *, writes_replicated: bool) -> None:
        """Joins the save; every rank makes one Share for it.

        Args:
            peers: Ranks that take part, in a group that nothing else uses meanwhile.
            writes_replicated: Whether this rank writes the tensors that are the same on all ranks
                with the same shard of the model. These are buffers, step counts, and the states of
                an optimizer that runs its own step.
        """
        self._peers = peers
        self.writes_replicated = writes_replicated
        self._over = False

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which writes everything that is no tensor."""
        return self._peers.rank == 0

    @property
    def num_ranks(self) -> int:
        """Number of ranks that take part."""
        return self._peers.size

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Makes all ranks raise the exception that the block raises on one of them."""
        try:
            yield
        except Exception as error:
            if not self._over:
                self._over = True
                self._peers.all_gather_object((None, sendable(error)))
            raise

    def gather(self, value: Any = None) -> list[Any]:
        """Returns the values of all ranks, in rank order. Collective.

        Raises:
            Exception: A rank failed; the exception of the lowest such rank is raised.
        """
        with served_by_another():  # all have come to the save
            everyone = self._peers.all_gather_object((value, None))
        for _, error in everyone:
            if error is not None:
                self._over = True
                raise error
        return [given for given, _ in everyone]

    def write(
        self, directory: Path | None, files: Mapping[str, Tensors], pace: Pace | None = None
    ) -> dict[str, FileEntry]:
        """Writes safetensors files together with the other ranks. Collective.

        Args:
            directory: Directory to write into, on rank 0, which tells the others; None elsewhere.
            files: Tensors by file name. Names, dtypes and shapes are the same on every rank.
                Tensors on the meta device are placeholders for tensors that other ranks write.
            pace: See write_files.

        Returns:
            Size and checksums of each file, by name.

        Raises:
            OSError: A disk refuses.
        """
        if directory is not None:
            for name, tensors in files.items():
                header, places = layout_of(tensors)
                end = max((end for _, end in places.values()), default=len(header))
                with open(directory / name, "xb") as file:
                    file.write(header)
                    file.truncate(end)
        directory = Path(self.gather(str(directory))[0])
        ahead = pace is not None and pace.hurried
        with ExitStack() as opened, write_behind(ahead=ahead) as behind:
            for name, tensors in files.items():
                self._write_own(directory / name, tensors, behind, opened, pace)
        for name in files:
            fsync_file(directory / name)
            let_go_of_pages(directory / name)
        self.gather()
        own = {
            name: _entry(directory / name, tensors, pace)
            for i, (name, tensors) in enumerate(files.items())
            if i % self._peers.size == self._peers.rank
        }
        entries: dict[str, FileEntry] = {}
        for theirs in self.gather(own):
            entries |= theirs
        return {name: entries[name] for name in files}

    def _write_own(
        self,
        path: Path,
        tensors: Tensors,
        behind: WriteBehind,
        opened: ExitStack,
        pace: Pace | None,
    ) -> None:
        """Gives this rank's shards of a file to `behind`; `opened` closes the file on failure."""
        _, places = layout_of(tensors)
        file = opened.enter_context(io.FileIO(path, "r+"))
        writer = Writer(file.fileno(), behind)
        with io.FileIO(path, "r+") as through_cache:
            for name, (start, _) in places.items():
                tensor = tensors[name]
                if isinstance(tensor, SnapshotTensor):
                    runs = tensor.runs and tensor.runs.in_bytes(tensor.element_size(), start)
                    for at, piece in tensor.own():
                        if runs is None:
                            writer.seek(start + at)
                            writer.append(piece)
                        else:
                            writer.append_runs(piece, at, runs, through_cache.fileno())
                        if pace is not None:
                            pace.rest()
                    if tensor.written is not None:
                        tensor.written()
                elif isinstance(tensor, ConvertedTensor):
                    self._write_converted(tensor, start, writer, through_cache)
                    if pace is not None:
                        pace.rest()
                elif (
                    self.writes_replicated
                    and isinstance(tensor, torch.Tensor)
                    and not tensor.is_meta
                ):
                    writer.seek(start)
                    for piece in pieces(tensor):
                        writer.append(piece)
        writer.flush()
        behind.do(file.close)

    def _write_converted(
        self, tensor: ConvertedTensor, start: int, writer: Writer, through_cache: io.FileIO
    ) -> None:
        """Writes this rank's elements of a tensor that is converted from sharded tensors.

        Args:
            tensor: The converted tensor.
            start: First byte of the tensor in the file.
            writer: Writer of the file.
            through_cache: Another descriptor of the file, for a shard of too many runs.
        """
        own = tensor.own(replicated=self.writes_replicated)
        if own is not None:
            values, mine = (one.contiguous() for one in own)
            runs = own_runs(values, mine, most=_MOST_RUNS)
            if runs is None:
                _write_elements(through_cache, start, values, mine)
            for first, run in runs or ():
                if run.numel() > 0:
                    writer.seek(start + first * run.element_size())
                    for piece in pieces(run):
                        writer.append(piece)
        if tensor.written is not None:
            tensor.written()


def _write_elements(file: io.FileIO, start: int, values: torch.Tensor, mine: torch.Tensor) -> None:
    """Writes the elements of `values` that the mask `mine` selects, through a mapping of the file.

    Args:
        file: The file, open for reading and writing.
        start: First byte of the tensor in the file.
        values: The full tensor, contiguous.
        mine: Mask of the elements to write, of the same shape.
    """
    page = start - start % mmap.ALLOCATIONGRANULARITY
    with mmap.mmap(file.fileno(), start + values.nbytes - page, offset=page) as memory:
        in_file = torch.frombuffer(memory, dtype=torch.uint8, offset=start - page)
        size = values.element_size()
        rows = values.reshape(-1).view(torch.uint8).view(-1, size)
        there = in_file.view(-1, size)
        there[mine.reshape(-1)] = rows[mine.reshape(-1)]
        del there, in_file


def _entry(path: Path, tensors: Tensors, pace: Pace | None) -> FileEntry:
    """Returns size and checksums of a file that several ranks have written, by reading it again."""
    _, places = layout_of(tensors)
    whole, of_each = _C.Checksum(), {name: _C.Checksum() for name in places}
    left, at = list(places.items())[::-1], 0
    for piece in read_pieces(path, direct=True):
        whole.update(piece)
        behind = at + len(piece)
        while left:
            name, (start, end) = left[-1]
            of_each[name].update(piece[max(start - at, 0) : max(end - at, 0)])
            if end > behind:
                break
            left.pop()
        at = behind
        if pace is not None:
            pace.rest()
    checksums = {name: hasher.hexdigest() for name, hasher in of_each.items()}
    return FileEntry(size=at, checksum=whole.hexdigest(), tensors=checksums)
