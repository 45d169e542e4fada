"""A moment of boosted models, which a save reads while training goes on, or together with ranks."""

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
from castor.checkpoint.held import HeldTensor
from castor.checkpoint.pace import Pace
from castor.checkpoint.shares import Share
from castor.config.memory import host_memory
from castor.runtime.engine import Engine

Saving = Iterator[Path]
"""A save in two halves: it yields where it will be when all that is of the moment has been taken,
and writes what boosted models hold behind that."""

Write = Callable[[Path, Mapping[str, Tensors]], dict[str, FileEntry]]
"""Writes safetensors files of a directory, by name."""

_PART_OF_MEMORY = 2
"""Divisor of the machine's free memory that copies take: training may come to need more."""


class Reading:
    """A moment of boosted models, for one save.

    Where training goes on meanwhile, the save reads copies of chunks, of as many as there is memory
    for: it makes them itself, but for those of which somebody would write the chunk before, who
    does. Whatever would write one of the others waits until the save has read all that it takes of
    it: updates, and torch's operators.
    """

    def __init__(self, engines: Sequence[Engine], share: Share | None, *, later: bool) -> None:
        """Begins: weights and states stay as they are now.

        Args:
            engines: Of what is saved.
            share: This rank's part of the work; None: this process does it all.
            later: Whether training goes on meanwhile.

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
        """The tensors, to be written later: each chunk is let go behind its last.

        What no session holds is copied (buffers, step counts), if training goes on meanwhile.
        """
        taken = dict(tensors)
        for key, tensor in tensors.items():
            if isinstance(tensor, HeldTensor):
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
        """Whether this rank writes its part of the tensors, and another one all the rest."""
        return self.share is not None and not self.share.first

    def follow(self, target: Path, needed: int, files: Mapping[str, Tensors]) -> None:
        """Writes this rank's share of the files, where another rank leads.

        Raises:
            IoError: The disk refuses.
        """
        with os_errors(target, "write", needed):
            self.write(None, files)

    def write(self, directory: Path | None, files: Mapping[str, Tensors]) -> dict[str, FileEntry]:
        """Writes safetensors files of a directory, by itself or with other ranks: see Share.write.

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
        """All has been taken: chunks of which nothing was are free, others may be copied."""
        for engine, left in self._chunks.items():
            for chunk in {engine.session.chunk_of(i) for i in range(len(engine.params))}:
                if left[chunk] == 0:
                    engine.session.end_read(chunk)
        if self._pace is not None:
            self._begin_copies()

    def _begin_copies(self) -> None:
        """Begins the copies, first of chunks that would be held longest."""
        ranks = 1 if self.share is None else self.share.num_ranks
        most = host_memory().available_bytes // (_PART_OF_MEMORY * ranks)
        for engine, left in self._chunks.items():
            states = engine in self._with_states
            chunks = sorted(+left, reverse=True)
            most -= engine.session.begin_copies(chunks, states=states, most=most)

    def hurry(self) -> None:
        """Somebody waits for the save."""
        if self._pace is not None:
            self._pace.hurry()

    def await_not_held(self) -> None:
        """Returns when all has been written whose memory others than castor may write.

        Somebody has a view of it that was made before, which nothing holds back; or it is a
        device's.
        """
        for engine, chunks in self._not_held.items():
            for chunk in chunks:
                engine.session.await_read(chunk)

    def end(self) -> None:
        """Lets everything go."""
        for engine in self._not_held:
            engine.session.end_reads()

    def _holds(self) -> bool:
        return any(engine.session.reads_held for engine in self._chunks)

    def _written(self, engine: Engine, chunk: int) -> None:
        left = self._chunks[engine]
        left[chunk] -= 1
        if left[chunk] == 0:
            engine.session.end_read(chunk)


def taken(reading: Reading | None, tensors: Mapping[str, SavedTensor]) -> dict[str, SavedTensor]:
    """Returns the tensors that are written for `tensors`: later, if there is a Reading."""
    return dict(tensors) if reading is None else reading.take(tensors)


def share_of(reading: Reading | None) -> Share | None:
    """This rank's part of the work, where several write."""
    return None if reading is None else reading.share


def write_of(reading: Reading | None) -> Write:
    """Returns the function that writes the save's files, alone or with other ranks."""
    return write_files if reading is None else reading.write


def at_once(saving: Saving) -> Path:
    """Does both halves of a save; returns where it is."""
    path = next(saving)
    rest(saving)
    return path


def rest(saving: Saving) -> None:
    """Does the second half."""
    for _ in saving:
        raise AssertionError("a save yields once")
