"""Runs the phases of gpu_check.py: what has a result is left out, whatever fails stops nothing.

A phase is a list of commands, each one test (`Command`), or programs that run many tests and tell
of each (`Batch`). A result is a line of results.jsonl, written when its test is over: {"phase",
"test", "outcome", "seconds", "error", ...}. Outcomes: passed, failed, skipped, timeout (it ran past
its limit), died (its process ended under it). All but skipped are final: the next run leaves them
out.

Needs nothing but Python's standard library.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

FINAL = ("passed", "failed", "timeout", "died")
OUTCOMES = (*FINAL, "skipped")
ERROR_CHARACTERS = 4000
GRACE_SECONDS = 10.0
"""Between the request to end and the kill."""

Event = dict[str, Any]


class Results:
    """results.jsonl of a folder, and log.txt with what every program said.

    Args:
        folder: Made if it is not there.
        castor: Which castor is tested; the file's results of another one do not count.
        again: Neither do results other than "passed".
    """

    def __init__(self, folder: Path, castor: str, *, again: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._castor = folder, castor
        self._path = folder / "results.jsonl"
        self._log_path = folder / "log.txt"
        self._log_path.touch()
        self._records: dict[tuple[str, str], Event] = {}
        for line in self._path.read_bytes().splitlines() if self._path.exists() else []:
            try:
                record = json.loads(line)
            except ValueError:
                continue  # empty, or a run was killed in the middle of it
            if record["castor"] == castor:
                self._records[record["phase"], record["test"]] = record
        if again:
            passed = [r for r in self._records.values() if r["outcome"] == "passed"]
            self._records = {(r["phase"], r["test"]): r for r in passed}

    def add(self, phase: str, test: str, outcome: str, seconds: float, **more: Any) -> None:
        """Writes a result, and says it in a line."""
        record = {"phase": phase, "test": test, "outcome": outcome, "seconds": round(seconds, 3)}
        record |= {"castor": self._castor, **more}
        self._records[phase, test] = record
        with self._path.open("ab") as file:
            # A newline first: the last line may be half of one.
            file.write(b"\n" + json.dumps(record).encode() + b"\n")
        reason = str(more.get("error", "")).strip().splitlines()
        said = f": {reason[-1][:160]}" if reason and outcome != "passed" else ""
        print(f"  {outcome:8}{seconds:7.1f} s  {test}{said}", flush=True)

    def finished(self, phase: str, outcomes: Sequence[str] = FINAL) -> set[str]:
        """The tests of a phase that need not run again."""
        return {r["test"] for r in self.of(phase) if r["outcome"] in outcomes}

    def forget(self, phase: str) -> None:
        """Leaves out the results of a phase from here on; the file keeps them."""
        self._records = {key: r for key, r in self._records.items() if key[0] != phase}

    def of(self, phase: str) -> list[Event]:
        """The last result of each test of a phase."""
        return [record for (p, _), record in self._records.items() if p == phase]

    def replace_failed(self, phase: str, test: str) -> None:
        """Records that what failed in a run before has passed now."""
        if self._records.get((phase, test), {"outcome": "passed"})["outcome"] != "passed":
            self.add(phase, test, "passed", 0.0)

    def open_log(self) -> BinaryIO:
        """log.txt, whose end several processes may write to."""
        return self._log_path.open("ab", buffering=0)

    def log(self, data: bytes) -> None:
        """Adds to the log."""
        with self.open_log() as file:
            file.write(data)

    def log_size(self) -> int:
        """Bytes of the log."""
        return self._log_path.stat().st_size

    def log_since(self, start: int) -> str:
        """The end of what was logged from byte `start` on."""
        with self._log_path.open("rb") as file:
            file.seek(max(start, self.log_size() - ERROR_CHARACTERS))
            return file.read().decode(errors="replace")


@dataclass(frozen=True, kw_only=True)
class Command:
    """A program that is one test: its exit status is the outcome."""

    test: str
    argv: list[str]
    env: Mapping[str, str] = field(default_factory=dict)
    limit: float = 300.0
    """Seconds."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A program that runs many tests and tells of each as it happens."""

    name: str
    argv: Callable[[list[str]], list[str]]
    """Of the tests to leave out."""
    parse: Callable[[str], Event | None] | None = None
    """Makes an event of a line of its output; None: it tells on the descriptor CASTOR_EVENTS_FD."""
    env: Mapping[str, str] = field(default_factory=dict)
    limit: float = 120.0
    """Seconds of one test."""
    idle_limit: float = 120.0
    """Seconds before the first test, and between two."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Something that is run by name."""

    name: str
    what: str
    parts: Sequence[Command | Batch]
    limit: float | None = None
    """Seconds, where they are not those of every phase."""


def gtest_event(line: str) -> Event | None:
    """What a line of a GoogleTest program tells."""
    if planned := re.match(r"\[==========\] Running (\d+) tests?", line):
        return {"event": "planned", "count": int(planned[1])}
    if start := re.match(r"\[ RUN      \] (\S+)", line):
        return {"event": "start", "test": start[1]}
    if end := re.match(r"\[ *(OK|FAILED|SKIPPED) *\] ([^\s,]+).* \((\d+) ms\)", line):
        outcome = {"OK": "passed", "FAILED": "failed", "SKIPPED": "skipped"}[end[1]]
        return {"event": "finish", "test": end[2], "outcome": outcome, "seconds": int(end[3]) / 1e3}
    return None


class _Program:
    """A program in a process group of its own, which ends with this."""

    def __init__(self, argv: list[str], env: Mapping[str, str], **more: Any) -> None:
        environment = {**os.environ, **env}
        self._process = subprocess.Popen(
            argv, env=environment, stdin=subprocess.DEVNULL, start_new_session=True, **more
        )
        self.stdout = self._process.stdout

    def __enter__(self) -> _Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        if self.stdout is not None:
            self.stdout.close()

    def wait(self) -> int:
        return self._process.wait()

    def end(self) -> None:
        """Asks it to end, then kills it and what it started."""
        for number, seconds in ((signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, None)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)


def _lines(descriptor: int, due: Callable[[], float]) -> Iterator[str | None]:
    """Lines of a pipe, up to its end; None, and no more, when it is past due()."""
    held = b""
    while True:
        ready, _, _ = select.select([descriptor], [], [], max(0.0, due() - time.monotonic()))
        if not ready:
            yield None
            return
        data = os.read(descriptor, 1 << 16)
        if not data:
            break
        *complete, held = (held + data).split(b"\n")
        for line in complete:
            yield line.decode(errors="replace")
    if held:
        yield held.decode(errors="replace")


def _end_of(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


class _Run:
    """One run of a phase, in the time it has."""

    def __init__(self, phase: Phase, results: Results, seconds: float) -> None:
        self._phase = phase.name
        self._results = results
        self._deadline = time.monotonic() + seconds
        self._started = 0  # tests of this run

    @property
    def time_is_up(self) -> bool:
        return time.monotonic() >= self._deadline

    def run(self, part: Command | Batch) -> None:
        """Runs what has no result of a part; a program that cannot be started is a failure."""
        try:
            if isinstance(part, Command):
                if part.test not in self._results.finished(self._phase):
                    self._command(part)
                return
            while not self.time_is_up and self._launch(part):
                pass
        except OSError as error:
            test = part.test if isinstance(part, Command) else f"({part.name})"
            self._results.add(self._phase, test, "failed", 0.0, error=str(error))

    def _overdue(self, test: str, began: float, limit: float, said: str) -> None:
        """Records that a test ran past its limit.

        One that the end of the phase's time has cut short goes without a result, and is the first
        of the next run; there it has the whole time, and running past that is a result.
        """
        seconds = time.monotonic() - began
        if seconds >= limit or self._started == 1:
            error = f"{said}\nended after {seconds:.0f} s, its limit"
            self._results.add(self._phase, test, "timeout", seconds, error=error)
        else:
            print(f"  no time left for {test}: run the phase again", flush=True)

    def _command(self, command: Command) -> None:
        began, log_start = time.monotonic(), self._results.log_size()
        due = min(self._deadline, began + command.limit)
        self._started += 1
        said: list[str] = []
        self._results.log(f"\n==== {self._phase}: {' '.join(command.argv)}\n".encode())
        with (
            self._results.open_log() as log,
            _Program(command.argv, command.env, stdout=subprocess.PIPE, stderr=log) as program,
        ):
            for line in _lines(program.stdout.fileno(), lambda: due):
                if line is None:
                    program.end()
                    said_last = self._results.log_since(log_start)
                    return self._overdue(command.test, began, command.limit, said_last)
                said.append(line)
                log.write(line.encode() + b"\n")
            code = program.wait()
        outcome, error = "passed", ""
        if code != 0:
            outcome, error = "failed", f"{_end_of(code)}: {self._results.log_since(log_start)}"
        elif skips := [line for line in said if line.startswith("SKIPPED")]:
            outcome, error = "skipped", skips[0]
        seconds = time.monotonic() - began
        self._results.add(self._phase, command.test, outcome, seconds, error=error)
        return None

    def _launch(self, batch: Batch) -> bool:
        """Runs a program over the tests that have no result; True if it has to be started again."""
        finished = sorted(self._results.finished(self._phase))
        argv = batch.argv(finished)
        self._results.log(f"\n==== {self._phase}: {' '.join(argv)}\n".encode())
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpu-check-")))
            (folder / "finished.json").write_text(json.dumps(finished), encoding="utf-8")
            env = dict(batch.env) | {"CASTOR_FINISHED": str(folder / "finished.json")}
            log = stack.enter_context(self._results.open_log())
            if batch.parse is not None:
                more: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
                program = stack.enter_context(_Program(argv, env, **more))
                descriptor = program.stdout.fileno()
            else:
                descriptor, theirs = os.pipe()
                stack.callback(os.close, descriptor)
                env["CASTOR_EVENTS_FD"] = str(theirs)
                more = {"stdout": log, "stderr": log, "pass_fds": [theirs]}
                try:
                    program = stack.enter_context(_Program(argv, env, **more))
                finally:
                    os.close(theirs)
            return self._follow(batch, program, descriptor, log, finished)

    def _follow(
        self, batch: Batch, program: _Program, descriptor: int, log: Any, finished: Sequence[str]
    ) -> bool:
        planned: int | None = None
        told, restart = 0, False
        running, began, said = "", time.monotonic(), list[str]()
        log_start = self._results.log_size()
        whole = f"({batch.name})"  # stands for the program, where it is not a test that failed

        def failed(test: str, outcome: str, reason: str) -> None:
            seconds = time.monotonic() - began
            error = f"{self._results.log_since(log_start)}\n{reason}"
            self._results.add(self._phase, test, outcome, seconds, error=error)

        def due() -> float:
            return min(self._deadline, began + (batch.limit if running else batch.idle_limit))

        for line in _lines(descriptor, due):
            if line is None:
                program.end()
                if running:
                    said_last = self._results.log_since(log_start)
                    self._overdue(running, began, batch.limit, said_last)
                    return True
                failed(whole, "timeout", "came to no test in time")
                return False
            if batch.parse is not None:
                log.write(line.encode() + b"\n")
                said.append(line)
                event = batch.parse(line)
            else:
                event = json.loads(line)
            match event:
                case {"event": "planned", "count": int(planned)}:
                    self._results.replace_failed(self._phase, whole)
                case {"event": "start", "test": str(running)}:
                    began, log_start = time.monotonic(), self._results.log_size()
                    self._started += 1
                    said.clear()
                    if running in finished:
                        failed(whole, "failed", f"{running} has a result, and was run again")
                        return False
                case {"event": "finish", "test": str(test), "outcome": outcome, **more}:
                    error = "" if outcome == "passed" else "\n".join(said[-40:-1])
                    self._results.add(self._phase, test, outcome, **({"error": error} | more))
                    told, running, began = told + 1, "", time.monotonic()
                case {"event": "restart"}:
                    restart = True
        code = program.wait()
        if running:
            failed(running, "died", _end_of(code))
            return True
        if planned is None or (told == 0 and planned > 0):
            failed(whole, "died", f"came to no test: {_end_of(code)}")
            return False
        return restart or told < planned


def run_phase(phase: Phase, results: Results, seconds: float) -> None:
    """Runs what of a phase has no result, for at most that long (and GRACE_SECONDS)."""
    print(f"==== {phase.name}: {phase.what}", flush=True)
    run = _Run(phase, results, seconds)
    for part in phase.parts:
        if run.time_is_up:
            print(f"  {seconds:.0f} s are over: run the phase again for the rest", flush=True)
            break
        run.run(part)


def write_summary(phases: Sequence[Phase], results: Results) -> bool:
    """Writes summary.json and prints a table of it; True if nothing failed."""
    rows = {}
    for phase in phases:
        records = results.of(phase.name)
        counts = Counter(record["outcome"] for record in records)
        seconds = sum(record["seconds"] for record in records)
        failed = [r["test"] for r in records if r["outcome"] in ("failed", "timeout", "died")]
        rows[phase.name] = {
            **{name: counts[name] for name in OUTCOMES},
            "seconds": round(seconds, 1),
            "not_passed": failed,
        }
    (results.folder / "summary.json").write_text(json.dumps(rows, indent=2) + "\n")
    print(f"\n{'phase':24}" + "".join(f"{name:>9}" for name in (*OUTCOMES, "seconds")))
    for name, row in rows.items():
        print(f"{name:24}" + "".join(f"{row[key]!s:>9}" for key in (*OUTCOMES, "seconds")))
    return not any(row["not_passed"] for row in rows.values())
