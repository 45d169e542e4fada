"""Data loaders that read, pad and move batches while the model computes."""

from __future__ import annotations

import copy
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from castor.checkpoint import make_resumable, rng
from castor.checkpoint.dataloader import ResumableLoader
from castor.data.batches import CopyLane
from castor.data.buckets import Buckets
from castor.errors import UsageError
from castor.plugins.machine import choose_device

# --- Reads ahead on a thread ----------------------------------------------------------------------

_GENERATORS = {
    "torch": "torch's global generator",
    "python": "Python's random",
    "numpy": "numpy's global generator",
    "cuda": "CUDA's generators",
}


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The outcome of one read."""

    batch: Any = None
    arrived: Any = None
    """Handle by which a CopyLane receives the batch."""
    error: BaseException | None = None
    """Exception that the loader raised instead of giving a batch."""
    ended: bool = False
    """Whether the loader has no further batch."""
    position: Any = None
    """The loader's position after the batch; None: the loader does not know it."""


class ReadAhead:
    """A reader that calls `read` on a thread, at most `depth` readings ahead of `take`.

    One thread calls `take`. It makes the first two readings itself, before the reading thread
    starts. Random numbers at the beginning of an iteration, such as a sampler's seed, are so drawn
    where plain PyTorch draws them. A loader that draws from the global generators in the second
    reading is refused: on a thread it would race with the training, which draws from them too.

    Args:
        read: Makes one reading, and catches the loader's errors.
        depth: Most readings ahead; 0: every reading is made in `take`, and there is no thread.
        what: Name of the loader, for messages.
    """

    def __init__(self, read: Callable[[], Reading], depth: int, what: str) -> None:
        self._read = read
        self._depth = depth
        self._what = what
        self.process = os.getpid()
        """Identifier of the process that made the reader, and has its thread."""
        self._changed = threading.Condition()
        # Guarded by _changed while the thread runs.
        self._ready: deque[Reading] = deque()
        self._stopping = False
        self._end: Reading | None = None
        self._begun = False
        self._thread: threading.Thread | None = None

    def take(self) -> Reading:
        """Returns the next reading; after the loader's end, that end again.

        Raises:
            UsageError: The loader draws from global generators.
        """
        if self._end is not None:
            return self._end
        reading = self._next()
        if reading.ended:
            self._end = reading
        return reading

    def _next(self) -> Reading:
        if self._depth == 0:
            return self._read()
        if not self._begun:
            first = self._read()
            if not first.ended:
                self._ready.append(self._read_without_drawing())
            self._begun = True
            if not self._over():
                self._start()
            return first
        with self._changed:
            if self._thread is None and not self._over():
                self._start()
            while not self._ready:
                self._changed.wait()
            reading = self._ready.popleft()
            self._changed.notify_all()
            return reading

    def _over(self) -> bool:
        return bool(self._ready) and self._ready[-1].ended

    def _read_without_drawing(self) -> Reading:
        before = rng.snapshot()
        reading = self._read()
        if reading.error is not None and not isinstance(reading.error, Exception):
            raise reading.error  # such as KeyboardInterrupt: at once
        drawn = [_GENERATORS[name] for name in rng.differing(before, rng.snapshot())]
        if drawn:
            raise UsageError(
                f"reading batches of the {self._what} draws from {' and '.join(drawn)} (in its "
                "dataset, collate_fn or sampler), and a thread that reads ahead would draw at "
                "other moments in every run: give a DataLoader num_workers=1 or more, which draw "
                "from generators of their own, or the AsyncLoader depth=0"
            )
        return reading

    def _start(self) -> None:
        self._stopping = False
        # The owner calls stop(); a daemon, so that Python does not wait for the thread before that.
        self._thread = threading.Thread(target=self._run, name="castor-async-loader", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                while len(self._ready) >= self._depth and not self._stopping:
                    self._changed.wait()
                if self._stopping:
                    return
            reading = self._read()
            with self._changed:
                self._ready.append(reading)
                self._changed.notify_all()
            if reading.ended:
                return
            del reading  # the taker has the only reference

    def stop(self) -> None:
        """Ends the thread after its present reading; a later `take` may start another.

        No effect in a forked child, which does not have the thread.
        """
        if os.getpid() != self.process:
            return
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join()


# --- Data loaders that read, pad and move batches while the model computes ------------------------


class AsyncLoader:
    """A loader that reads batches ahead on a thread, pads them, and copies them to the GPU.

    It gives the batches of `loader` in their order. An error in making a batch is raised, with its
    traceback, when that batch is due. Tensors in mappings, lists and tuples are copied out of
    page-locked memory on a stream of their own. The stream that is current when the loop takes a
    batch waits for these copies. Other objects, and tensors that are on a device already, stay as
    they are. Up to `depth` batches lie on the device in addition to the loop's.

    **Random numbers** are those of the plain loader. The base seed of workers and a sampler's seed
    are drawn on the caller's thread, where the plain loader draws them. A dataset or collate_fn
    without workers that draws from the global generators of torch, Python or numpy would race with
    the model's dropout. Such a loader is refused at the second batch, and the message says what to
    do. A loader that draws nothing in the first two batches of an epoch, but later, is not noticed.

    **Position.** `state_dict` gives the position of the batch handed out last, however far the
    thread has read, in the format of `loader`. booster.save and load take either loader, and read
    what the other wrote. A torch DataLoader gets a state_dict in place, as from booster.boost.
    Other loaders need their own (torchdata's StatefulDataLoader); it is called after each batch.

    **One iteration at a time.** `iter()`, load_state_dict and the end of the iterator's life (a
    `break`) end the present iteration and its thread. The next iteration begins where the loader
    begins. If the loader is an iterator itself, the next iteration first gives the batches that
    were read ahead. In a forked child an iteration of the parent's raises, and a new one works.

    Args:
        loader: A DataLoader, or any iterable of batches.
        device: Device that batches go to, as in GeminiPlugin: "cuda", "cuda:1", or "cpu", where
            nothing is copied. Default: "cuda" when there is a GPU, else "cpu".
        depth: Number of batches that may be ready before the loop asks for them. 0: no thread; each
            batch is read, padded and copied when it is asked for.
        buckets: Lengths in ascending order, such as [128, 256, 512]. Tensors named in pad_values,
            of shape [batch, length, ...], are padded at their end to the next length. Models then
            see few shapes, and castor plans for each once. Take care with a loss of your own that
            is a mean over tokens: labels are padded with the value that losses ignore, and a batch
            without a mask gets none.
        pad_values: Padding values by name in a mapping, or by "0", "1", ... in a tuple; None leaves
            a tensor as it is. Defaults for tensors of two dimensions: 0 for input_ids,
            attention_mask, token_type_ids, decoder_input_ids and decoder_attention_mask, and -100
            for labels.

    Raises:
        TypeError, ValueError: An argument has the wrong type, or is out of range.
        UsageError: There is no such GPU. While iterating: a batch is longer than the largest
            bucket, or a tensor of it has no value to pad with. Or the loader draws from global
            generators, or the iteration has been ended or belongs to the parent process.
        ImportError, NotImplementedError: See GeminiPlugin's device.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        device: str | torch.device | None = None,
        depth: int = 2,
        buckets: Iterable[int] | None = None,
        pad_values: Mapping[str, float | None] | None = None,
    ) -> None:
        if isinstance(loader, AsyncLoader):
            raise TypeError("the loader is an AsyncLoader already; give the one inside it")
        if isinstance(loader, str | bytes | Mapping) or not isinstance(loader, Iterable):
            raise TypeError(f"loader is a {type(loader).__name__}; give a DataLoader")
        if isinstance(depth, bool) or not isinstance(depth, int):
            raise TypeError(f"depth is {depth!r}; give a number of batches")
        if depth < 0:
            raise ValueError(f"depth is {depth}; give 0 or more")
        if pad_values is not None and buckets is None:
            raise ValueError("pad_values says what buckets pad with, and there are none: give both")
        self._depth = depth
        self._buckets = None if buckets is None else Buckets(buckets, pad_values)
        self._device = choose_device(device)
        self._lane: CopyLane | None = None
        make_resumable(loader)
        self.loader: Any = loader
        """The loader that is read."""
        self._position = _Position()
        self._left: ReadAhead | None = None
        """Reader of a loader that is an iterator, with its batches read ahead; else None."""
        self._latest: weakref.ref[_Batches] | None = None

    def __iter__(self) -> Iterator[Any]:
        """Returns an iterator over the batches; its thread starts at the first batch."""
        self._end()
        source = iter(self.loader)
        if self._lane is None and self._device.type != "cpu":
            self._lane = CopyLane(self._device)
        reading = self._left
        if reading is None or reading.process != os.getpid():
            read = _Reader(source, self.loader, self._buckets, self._lane)
            reading = ReadAhead(read, self._depth, type(self.loader).__name__)
            self._position = _Position(_position_of(self.loader))
        self._left = reading if source is self.loader else None
        batches = _Batches(reading, self._lane, self._position)
        self._latest = weakref.ref(batches)
        return batches

    def __len__(self) -> int:
        """Returns the length of the loader; raises TypeError if it has none."""
        return len(self.loader)

    @property
    def dataset(self) -> Any:
        """The loader's dataset."""
        return self.loader.dataset

    @property
    def batch_size(self) -> Any:
        """The loader's batch size."""
        return self.loader.batch_size

    @property
    def sampler(self) -> Any:
        """The loader's sampler, for its set_epoch."""
        return self.loader.sampler

    @property
    def batch_sampler(self) -> Any:
        """The loader's batch sampler."""
        return self.loader.batch_sampler

    def set_epoch(self, epoch: int) -> None:
        """Calls set_epoch of the loader or its sampler, for another order in the next iteration.

        Raises:
            UsageError: Neither the loader nor its sampler has set_epoch.
        """
        batch_sampler = getattr(self.loader, "batch_sampler", None)
        of_batches = getattr(batch_sampler, "sampler", None)
        sampler = getattr(self.loader, "sampler", None)
        owners: tuple[Any, ...] = (self.loader, sampler, batch_sampler, of_batches)
        for one in owners:
            if hasattr(one, "set_epoch"):
                one.set_epoch(epoch)
                return
        raise UsageError(
            f"neither the {type(self.loader).__name__} nor its sampler has set_epoch; a shuffling "
            "DataLoader has another order in each epoch without"
        )

    @property
    def position_class(self) -> str:
        """Name of the loader's class, which makes state_dict."""
        return type(self.loader).__name__

    def state_dict(self) -> dict[str, Any]:
        """Returns the loader's position after the batch that was handed out last.

        Raises:
            UsageError: The loader does not know its position.
        """
        self._check_knows_position()
        state = self._position.state
        found: dict[str, Any] = self.loader.state_dict() if state is None else state
        return found

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Raises CheckpointError if `state` belongs to another loader, if the loader checks it."""
        if hasattr(self.loader, "check_state_dict"):
            self.loader.check_state_dict(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Makes the next `iter()` continue after the position in `state`.

        Raises:
            UsageError: The loader does not know its position.
            CheckpointError: `state` belongs to another loader.
        """
        self._check_knows_position()
        self._end()
        self._left = None
        self.loader.load_state_dict(state)
        self._position = _Position()

    def _check_knows_position(self) -> None:
        if not hasattr(self.loader, "state_dict"):
            raise UsageError(
                f"the {type(self.loader).__name__} in this AsyncLoader does not know its position: "
                "give it a torch DataLoader, or a loader with state_dict"
            )

    def _end(self) -> None:
        """Ends the present iteration."""
        batches = self._latest() if self._latest else None
        if batches is not None:
            batches.close()


@dataclass
class _Position:
    """The loader's position at the batch handed out last; None: ask the loader."""

    state: Any = None


@dataclass
class _Reader:
    """Reads, pads and sends one batch. Holds no AsyncLoader, which may be deleted before it."""

    source: Iterator[Any]
    loader: Any
    buckets: Buckets | None
    lane: CopyLane | None

    def __call__(self) -> Reading:
        try:
            try:
                batch = next(self.source)
            except StopIteration:
                return Reading(ended=True, position=_position_of(self.loader))
            position = _position_of(self.loader)
        except BaseException as error:
            return Reading(error=error)
        arrived = None
        try:
            if self.buckets is not None:
                batch = self.buckets.pad(batch)
            if self.lane is not None:
                batch, arrived = self.lane.send(batch)
        except BaseException as error:
            return Reading(error=error, position=position)
        return Reading(batch=batch, arrived=arrived, position=position)


def _position_of(loader: Any) -> Any:
    if not hasattr(loader, "state_dict"):
        return None
    state = loader.state_dict()
    # Other loaders may change their state_dict later.
    return state if isinstance(loader, ResumableLoader) else copy.deepcopy(state)


class _Batches:
    """The iterator handed to the loop. Its thread ends with it."""

    def __init__(self, reading: ReadAhead, lane: CopyLane | None, position: _Position) -> None:
        self._reading: ReadAhead | None = reading
        self._process = os.getpid()
        self._lane = lane
        self._position = position
        self._stop = weakref.finalize(self, reading.stop)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if os.getpid() != self._process:
            raise UsageError(
                f"this iteration of an AsyncLoader is of process {self._process}, whose thread "
                "reads; iterate over the loader in the child"
            )
        if self._reading is None:
            raise UsageError(
                "this iteration of an AsyncLoader has been ended, by another one, load_state_dict "
                "or an interrupt; two that go on beside each other need an AsyncLoader each"
            )
        try:
            reading = self._reading.take()
        except BaseException:
            self.close()
            raise
        if reading.position is not None:
            self._position.state = reading.position
        if reading.error is not None:
            # The error's traceback holds this iteration for as long as the error lives.
            self._reading.stop()
            try:
                raise reading.error
            finally:
                del reading  # this frame is in the traceback, and would hold the error
        if reading.ended:
            raise StopIteration
        if self._lane is not None:
            self._lane.receive(reading.batch, reading.arrived)
        return reading.batch

    def close(self) -> None:
        """Ends the iteration; its thread has ended when this returns."""
        self._stop()
        self._reading = None
