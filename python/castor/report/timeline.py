"""The last step of a boosted model, event by event, and what follows from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from castor.config.event_names import BACKWARD_ENTER, FORWARD_ENTER, FORWARD_EXIT, GRAD_READY

ROOT = 0

Phase = Literal["forward", "backward", "optimizer"]


class Event(NamedTuple):
    """An event of the step. Times are ns since the first one, sizes bytes."""

    kind: int
    """Position in EVENT_KINDS."""
    id: int
    """A module; for grad_ready, a chunk."""
    time_ns: int
    slot_bytes: int
    """Chunks that come and go, when the event began."""
    nonmodel_bytes: int
    """Highest until the next event: activations, temporaries, gradients on their way."""
    device_peak_bytes: int
    """Highest device total until the next event."""
    host_bytes: int


class Transfer(NamedTuple):
    """A chunk or a gradient on its way."""

    kind: str
    """fetch, eviction or gradient."""
    cause: str
    """demand, prefetch, plan, pressure, step_end or backward."""
    event: int
    chunk: int
    start_ns: int
    submit_ns: int
    """Time that the step was held up when the copy began."""
    wait_ns: int
    """Time that the first use of the chunk waited for the rest."""
    bytes: int
    """Copied; 0 for a chunk whose host storage was up to date."""

    @property
    def stall_ns(self) -> int:
        """Time that the step was held up in all."""
        return self.submit_ns + self.wait_ns


class Chunk(NamedTuple):
    """A chunk, and the places of its payloads."""

    params: list[int]
    capacity_bytes: int
    used_bytes: int
    dtype: str
    trainable: bool
    on_device_bytes: int
    """Device bytes of the chunk while it is resident there."""
    payloads: dict[str, tuple[str, int]]
    """kind -> (tier, bytes), as it is now: after the step."""


class Span(NamedTuple):
    """A module at work, from start_ns to end_ns."""

    module: int
    phase: Phase
    start_ns: int
    end_ns: int


class Sample(NamedTuple):
    """Bytes from time_ns until the next sample. Upper bounds, whose sum the step did reach."""

    time_ns: int
    event: int
    slot_bytes: int
    nonmodel_bytes: int
    host_bytes: int


@dataclass(frozen=True, kw_only=True)
class StepTimeline:
    """The columns of `_C.Session.timeline` and `chunks`, by name."""

    events: list[Event]
    transfers: list[Transfer]
    chunks: list[Chunk]
    resident_at_start: list[int]
    """Streamed chunks that inference left on the device."""
    on_device_at_start: list[int]
    """Chunks that live there for good with all their payloads, until their first eviction, after
    which they are streamed."""
    update_begin_ns: int
    end_ns: int
    device_times: list[tuple[int, int]]
    """By the clock of a device that works beside the host: for each event, when the device came to
    it, in ns since it came to the first one, and the ns of computing until the next. Empty where
    the step was not timed."""
    device_end_ns: int
    """When the device came to the end of the passes."""
    peak_device_bytes: int
    guidance: str
    """demand (no plan yet), plan, or diverged (left the plan)."""
    complete: bool
    """False where the step had more events or transfers than the recorder keeps."""

    @classmethod
    def of(cls, timeline: Mapping[str, Any], chunks: list[dict[str, Any]]) -> StepTimeline:
        """Reads what the extension returned."""
        fields = dict(timeline)
        fields["events"] = [Event(*row) for row in fields["events"]]
        fields["transfers"] = [Transfer(*row) for row in fields["transfers"]]
        return cls(**fields, chunks=[Chunk(**chunk) for chunk in chunks])

    def left_device(self) -> set[int]:
        """Chunks that lived on the device and had to leave it in this step."""
        evicted = {transfer.chunk for transfer in self.transfers if transfer.kind == "eviction"}
        return evicted.intersection(self.on_device_at_start)

    def on_device(self) -> set[int]:
        """Chunks that lived on the device, with all their payloads, from beginning to end."""
        return set(self.on_device_at_start) - self.left_device()

    def payload_bytes(self, tier: str) -> dict[str, int]:
        """Bytes of the payloads that lived on a tier, by kind; kinds without bytes are left out."""
        totals: dict[str, int] = {}
        on_device = self.on_device()
        for i, chunk in enumerate(self.chunks):
            for kind, (now, size) in chunk.payloads.items():
                # A chunk that became resident after the step came from the host.
                place = "device" if i in on_device else "host" if now == "device" else now
                if place == tier:
                    totals[kind] = totals.get(kind, 0) + size
        return totals

    def residency(self) -> list[list[tuple[int, int]]]:
        """For each chunk, the intervals (start_ns, end_ns) in which the device held it."""
        left = self.left_device()
        since: dict[int, int] = dict.fromkeys(self.resident_at_start + self.on_device_at_start, 0)
        intervals: list[list[tuple[int, int]]] = [[] for _ in self.chunks]
        for transfer in self.transfers:
            if transfer.kind == "fetch":
                since[transfer.chunk] = transfer.start_ns
            elif transfer.kind == "eviction" and transfer.chunk in left:
                left.remove(transfer.chunk)  # its parameters stay, as a slot
            elif transfer.kind == "eviction" and transfer.chunk in since:
                end = transfer.start_ns + transfer.submit_ns
                intervals[transfer.chunk].append((since.pop(transfer.chunk), end))
        for chunk, start in since.items():
            intervals[chunk].append((start, self.end_ns))
        return intervals

    def memory(self) -> list[Sample]:
        """The device and host curves, with a sample at each event and at each move of a chunk.

        Non-model bytes are the peak of their event, and never more than what the device's peak in
        that event leaves beside the chunks: the sum is a height that the step reached. A chunk
        that had to leave counts as slots from the beginning.
        """
        left = self.left_device()
        fixed = sum(self.chunks[chunk].on_device_bytes for chunk in self.on_device())
        slots = sum(self.chunks[chunk].capacity_bytes for chunk in self.resident_at_start)
        slots += sum(self.chunks[chunk].on_device_bytes for chunk in left)
        samples = []
        moves = iter(_moves(self.transfers))
        move = next(moves, None)

        def sample(i: int, time_ns: int) -> Sample:
            event = self.events[i]
            room = max(0, event.device_peak_bytes - fixed - slots)
            return Sample(time_ns, i, slots, min(event.nonmodel_bytes, room), event.host_bytes)

        for i, event in enumerate(self.events):
            samples.append(sample(i, event.time_ns))
            while move is not None and move[0] == i:
                _, time_ns, chunk, sign = move
                slots += sign * self.chunks[chunk].capacity_bytes
                if chunk in left:  # everything but its parameters' slot leaves
                    left.remove(chunk)
                    slots += 2 * self.chunks[chunk].capacity_bytes
                    slots -= self.chunks[chunk].on_device_bytes
                samples.append(sample(i, max(time_ns, samples[-1].time_ns)))
                move = next(moves, None)
        samples.append(samples[-1]._replace(time_ns=max(self.end_ns, samples[-1].time_ns)))
        return samples

    def phases(self) -> list[tuple[Phase, int, int]]:
        """(phase, start_ns, end_ns): forward from an enter of the model, backward, optimizer."""
        phases: list[tuple[Phase, int, int]] = []
        phase: Phase = "forward"
        start = 0
        for event in self.events:
            backward = event.kind in (BACKWARD_ENTER, GRAD_READY)
            again = event.kind == FORWARD_ENTER and event.id == ROOT
            if (backward and phase == "forward") or (again and phase == "backward"):
                phases.append((phase, start, event.time_ns))
                phase, start = ("backward" if backward else "forward"), event.time_ns
        phases.append((phase, start, self.update_begin_ns))
        phases.append(("optimizer", self.update_begin_ns, self.end_ns))
        return [entry for entry in phases if entry[2] > entry[1]]

    def spans(self) -> list[Span]:
        """Modules at work, by start; those of forward nest, those of backward follow each other.

        A module's backward ends where the next one's begins: torch does not tell more.
        """
        times = [event.time_ns for event in self.events]
        copied = (t.start_ns + t.submit_ns for t in self.transfers if t.cause != "step_end")
        return self._spans(times, max([*times[-1:], *copied], default=0))

    def device_spans(self) -> list[Span]:
        """The same by the clock of the device; empty where the step was not timed by it."""
        if not self.device_times:
            return []
        return self._spans([reached_ns for reached_ns, _ in self.device_times], self.device_end_ns)

    def _spans(self, times: list[int], end_ns: int) -> list[Span]:
        spans = self._spans_between(times, end_ns)
        return sorted(spans, key=lambda span: (span.start_ns, -span.end_ns))

    def _spans_between(self, times: list[int], end_ns: int) -> Iterator[Span]:
        entered: list[tuple[int, int]] = []
        backward: tuple[int, int] | None = None
        last_ns = 0
        for (kind, module, *_), time_ns in zip(self.events, times, strict=True):
            if backward and (kind in (FORWARD_ENTER, BACKWARD_ENTER)):
                yield Span(backward[0], "backward", backward[1], time_ns)
                backward = None
            if kind == FORWARD_ENTER:
                # What an interrupted forward left entered ends where the model is entered again.
                while module == ROOT and entered:
                    yield Span(entered[-1][0], "forward", entered.pop()[1], last_ns)
                entered.append((module, time_ns))
            elif kind == FORWARD_EXIT and any(module == other for other, _ in entered):
                found = False
                while not found:
                    other, start = entered.pop()
                    found = other == module
                    yield Span(other, "forward", start, time_ns)
            elif kind == BACKWARD_ENTER:
                backward = (module, time_ns)
            last_ns = time_ns
        while entered:
            yield Span(entered[-1][0], "forward", entered.pop()[1], end_ns)
        if backward:
            yield Span(backward[0], "backward", backward[1], end_ns)


def _moves(transfers: list[Transfer]) -> Iterator[tuple[int, int, int, int]]:
    """(event, time_ns, chunk, +1 or -1): a fetch takes its slot when it begins, an eviction gives
    it back when it ends.
    """  # noqa: D205
    for transfer in transfers:
        if transfer.kind == "fetch":
            yield transfer.event, transfer.start_ns, transfer.chunk, 1
        elif transfer.kind == "eviction":
            end = transfer.start_ns + transfer.submit_ns
            yield transfer.event, end, transfer.chunk, -1
