"""Snapshots of boosted models, which a save reads beside the training or together with ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from castor.checkpoint.container import SavedTensor, Tensors, write_files
from castor.checkpoint.files import FileEntry, os_errors
from castor.checkpoint.pace import Pace
from castor.checkpoint.shares import Share
from castor.checkpoint.snapshot import SnapshotTensor
from castor.config.memory import host_memory
from castor.runtime.engine import Engine

Saving = Iterator[Path]
"""A save in two halves. It yields the checkpoint's path once it has taken the snapshot. When it is
resumed, it writes the files, among them the tensors that boosted models hold."""

Write = Callable[[Path, Mapping[str, Tensors]], dict[str, FileEntry]]
"""Function that writes safetensors files into a directory, as write_files does."""

_PART_OF_MEMORY = 2
"""Copies take the machine's free memory divided by this: training may come to need more."""


class Reading:
    """A snapshot of boosted models, for one save.

    Where training goes on meanwhile, the save copies as many chunks as there is memory for. The
    save's thread makes the copies. If somebody is about to write a chunk before that, the writer
    makes its copy. Updates and torch's operators that would write a chunk without a copy wait until
    the save has read all that it takes of the chunk.
    """

    def __init__(self, engines: Sequence[Engine], share: Share | None, *, later: bool) -> None:
        """Begins the snapshot: the save reads weights and states as they are now.

        Args:
            engines: Engines of the models that are saved.
            share: This rank's share of the work; None: this process does all of it.
            later: Whether training goes on while the save reads.

        Raises:
            UsageError: The weights are between two steps, or a step has failed.
        """
        self.share = share
        self._chunks: dict[Engine, Counter[int]] = {}
        self._with_states: set[Engine] = set()
        self._pace = Pace(self._holds) if later else None
        self._not_held: dict[Engine, list[int]] = {}
        try:
            for engine in engines:
                self._not_held[engine] = engine.session.begin_reads()
                self._chunks[engine] = Counter()
        except BaseException:
            self.end()
            raise

    def take(self, tensors: Mapping[str, SavedTensor]) -> dict[str, SavedTensor]:
        """Returns the tensors in a form that can be written later.

        A chunk is released when the last tensor taken from it has been written. Tensors outside
        chunks (buffers, step counts) are copied to the CPU now, if training goes on meanwhile.
        """
        taken = dict(tensors)
        for key, tensor in tensors.items():
            if isinstance(tensor, SnapshotTensor):
                chunk = tensor.engine.session.chunk_of(tensor.index)
                self._chunks[tensor.engine][chunk] += 1
                if tensor.states:
                    self._with_states.add(tensor.engine)
                taken[key] = replace(tensor, written=partial(self._written, tensor.engine, chunk))
            elif isinstance(tensor, torch.Tensor) and self._pace and not tensor.is_meta:
                taken[key] = tensor.detach().to("cpu", copy=True)
        return taken

    @property
    def follows(self) -> bool:
        """Whether this rank writes only its share of the tensors, and rank 0 all the rest."""
        return self.share is not None and not self.share.first

    def follow(self, target: Path, needed: int, files: Mapping[str, Tensors]) -> None:
        """Writes this rank's share of the files, where rank 0 leads.

        Args:
            target: Directory of the checkpoint, for messages.
            needed: Bytes that all ranks write at most, for messages.
            files: Tensors by path of the file.

        Raises:
            IoError: The disk refuses.
        """
        with os_errors(target, "write", needed):
            self.write(None, files)

    def write(self, directory: Path | None, files: Mapping[str, Tensors]) -> dict[str, FileEntry]:
        """Writes safetensors files into a directory, alone or with other ranks.

        Args:
            directory: Directory to write into; None: rank 0 tells it.
            files: Tensors by path of the file; see Share.write and write_files.

        Returns:
            Size and checksums of each file.

        Raises:
            OSError: The disk refuses.
        """
        with ExitStack() as over:
            if self._pace is not None:
                self._pace.begin()
                over.callback(self._pace.end)
                for engine in self._chunks:
                    engine.session.finish_copies()
            if self.share is not None:
                return self.share.write(directory, files, self._pace)
            assert directory is not None
            return write_files(directory, files, self._pace)

    def let_go_of_the_rest(self) -> None:
        """Ends the taking: releases chunks of which nothing was taken, begins copies of others."""
        for engine, left in self._chunks.items():
            for chunk in {engine.session.chunk_of(i) for i in range(len(engine.params))}:
                if left[chunk] == 0:
                    engine.session.end_read(chunk)
        if self._pace is not None:
            self._begin_copies()

    def _begin_copies(self) -> None:
        """Begins copies of chunks; those that would be held longest come first."""
        ranks = 1 if self.share is None else self.share.num_ranks
        most = host_memory().available_bytes // (_PART_OF_MEMORY * ranks)
        for engine, left in self._chunks.items():
            states = engine in self._with_states
            chunks = sorted(+left, reverse=True)
            most -= engine.session.begin_copies(chunks, states=states, most=most)

    def hurry(self) -> None:
        """Makes the save run at full speed, because somebody waits for it."""
        if self._pace is not None:
            self._pace.hurry()

    def await_not_held(self) -> None:
        """Waits until the save has read every chunk that castor cannot keep others from writing.

        Such a chunk is on a device, or somebody has an older view of its memory.
        """
        for engine, chunks in self._not_held.items():
            for chunk in chunks:
                engine.session.await_read(chunk)

    def end(self) -> None:
        """Ends the snapshot and releases all chunks."""
        for engine in self._not_held:
            engine.session.end_reads()

    def _holds(self) -> bool:
        return any(engine.session.reads_awaited for engine in self._chunks)

    def _written(self, engine: Engine, chunk: int) -> None:
        left = self._chunks[engine]
        left[chunk] -= 1
        if left[chunk] == 0:
            engine.session.end_read(chunk)


def taken(reading: Reading | None, tensors: Mapping[str, SavedTensor]) -> dict[str, SavedTensor]:
    """Returns the tensors to write: those of Reading.take, or `tensors` where `reading` is None."""
    return dict(tensors) if reading is None else reading.take(tensors)


def share_of(reading: Reading | None) -> Share | None:
    """Returns this rank's share of the work; None: this process writes alone."""
    return None if reading is None else reading.share


def write_of(reading: Reading | None) -> Write:
    """Returns the function that writes the save's files, alone or with other ranks."""
    return write_files if reading is None else reading.write


def at_once(saving: Saving) -> Path:
    """Runs both halves of a save; returns the checkpoint's path."""
    path = next(saving)
    rest(saving)
    return path


def rest(saving: Saving) -> None:
    """Runs the second half of a save."""
    for _ in saving:
        raise AssertionError("a save yields once")
