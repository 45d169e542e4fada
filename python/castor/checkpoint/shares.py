"""Checkpoints of several ranks: each writes what it keeps, into the same files at once."""

from __future__ import annotations

import io
import mmap
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from castor import _C
from castor.checkpoint.container import Tensors, layout_of
from castor.checkpoint.files import (
    FileEntry,
    fsync_file,
    let_go_of_pages,
    read_pieces,
    write_behind,
)
from castor.checkpoint.held import HeldTensor
from castor.checkpoint.hub_names import ConvertedTensor, own_runs
from castor.checkpoint.pace import Pace
from castor.checkpoint.tensor_bytes import pieces
from castor.checkpoint.write_behind import WriteBehind
from castor.checkpoint.writer import Writer
from castor.runtime.ranks import Peers, sendable
from castor.runtime.waits import served_by_another

_MOST_RUNS = 1024
"""A tensor of which a rank has more runs than this is written by its elements."""


class Share:
    """One rank's of a save that all ranks of a model make together.

    The ranks' parts of every tensor are disjoint runs of bytes, in files whose size is known before
    anything is written; rank 0 does all that is no tensor. What one rank raises every rank does, at
    its next call.
    """

    def __init__(self, peers: Peers, *, writes_whole: bool) -> None:
        """Every rank makes one, for the same save.

        Args:
            peers: The ranks, in a group that nothing else uses meanwhile.
            writes_whole: Whether this rank writes what it has alike with those that have the same
                part of the model: buffers, step counts, states of an optimizer's own step.
        """
        self._peers = peers
        self.writes_whole = writes_whole
        self._over = False

    @property
    def first(self) -> bool:
        """Whether this rank does what is no tensor."""
        return self._peers.rank == 0

    @property
    def num_ranks(self) -> int:
        """Number of ranks that take part."""
        return self._peers.size

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Makes all ranks raise what the block raises on one."""
        try:
            yield
        except Exception as error:
            if not self._over:
                self._over = True
                self._peers.gather((None, sendable(error)))
            raise

    def gather(self, value: Any = None) -> list[Any]:
        """Returns the values of all ranks, in rank order; every rank calls it.

        Raises:
            Exception: What the first of those that failed has raised.
        """
        with served_by_another():  # all have come to the save
            everyone = self._peers.gather((value, None))
        for _, error in everyone:
            if error is not None:
                self._over = True
                raise error
        return [given for given, _ in everyone]

    def write(
        self, directory: Path | None, files: Mapping[str, Tensors], pace: Pace | None = None
    ) -> dict[str, FileEntry]:
        """Writes safetensors files together; every rank calls it.

        Args:
            directory: Where, on rank 0, which tells the others.
            files: Tensors by file name; the same on every rank, but for values. Those on the meta
                device are other ranks'.
            pace: As of write_files.

        Returns:
            Size and checksums of each.

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
        """Gives this rank's part of a file to `behind`; `opened` closes it if that fails."""
        _, places = layout_of(tensors)
        file = opened.enter_context(io.FileIO(path, "r+"))
        writer = Writer(file.fileno(), behind)
        with io.FileIO(path, "r+") as through_cache:
            for name, (start, _) in places.items():
                tensor = tensors[name]
                if isinstance(tensor, HeldTensor):
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
                elif self.writes_whole and isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                    writer.seek(start)
                    for piece in pieces(tensor):
                        writer.append(piece)
        writer.flush()
        behind.do(file.close)

    def _write_converted(
        self, tensor: ConvertedTensor, start: int, writer: Writer, through_cache: io.FileIO
    ) -> None:
        """Writes this rank's elements of a tensor that is made of some of which ranks have parts.

        Args:
            tensor: The tensor.
            start: Its first byte in the file.
            writer: Writes the file.
            through_cache: Another descriptor of the file, for runs that are many.
        """
        own = tensor.own(whole=self.writes_whole)
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
    """Writes some elements of a tensor, which lie one by one."""
    page = start - start % mmap.ALLOCATIONGRANULARITY
    with mmap.mmap(file.fileno(), start + values.nbytes - page, offset=page) as memory:
        in_file = torch.frombuffer(memory, dtype=torch.uint8, offset=start - page)
        size = values.element_size()
        rows = values.reshape(-1).view(torch.uint8).view(-1, size)
        there = in_file.view(-1, size)
        there[mine.reshape(-1)] = rows[mine.reshape(-1)]
        del there, in_file


def _entry(path: Path, tensors: Tensors, pace: Pace | None) -> FileEntry:
    """Size and checksums of a file that several have written: it is read again."""
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
