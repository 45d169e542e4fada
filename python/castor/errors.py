"""The exceptions of castor. Those of the C++ core become these classes."""

from __future__ import annotations

import ast
import linecache
import re
import sysconfig
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType, TracebackType

import torch

from castor import _C

_OF_THIS_POINT = "; the smallest budget that gets past this point is "
_OF_OTHERS = ". Models of one plugin share this budget"
"""Begin of the core's advice (csrc/core/runtime_room.cc), and of what may follow it."""
_END_OF_FIGURES = " bytes). "
_OUTSIDE = "outside any module"
_IN_TILES = (
    ". Losses that take a few numbers of each row of logits run in tiles: tile_logits='auto' "
    "(guide: policies and budgets)"
)
"""Place that stands for the loss: the core names modules, and a loss computes outside of them."""
_SMALLER_BATCH = "\nThe device is out of memory."
"""In args of an error that a smaller batch may help: what accelerate's find_executable_batch_size,
and with it the Trainer's auto_find_batch_size, look for there."""


class Error(Exception):
    """Root of what the runtime raises. Bad arguments are ValueError or TypeError instead."""


class UsageError(Error, RuntimeError):
    """Calls in an order, or on a model, that castor cannot serve; the message says what to do."""


class NonFiniteGradientError(Error, ArithmeticError):
    """A gradient holds NaN or infinity and the plugin was asked to raise (nonfinite="raise")."""


_CASTOR, _TORCH = (str(Path(str(file)).parent) for file in (__file__, torch.__file__))
"""Folders, of whose frames users know nothing: they look for their own lines."""
_OF_MODULES = str(torch.nn.modules.module.__file__)
_BETWEEN = tuple(f"{_TORCH}/{name}" for name in ("_ops.py", "_compile.py", "_dynamo/"))
"""Files of torch that pass a call on."""
_PASS_ON = re.compile(
    rf"{re.escape(sysconfig.get_path('stdlib'))}/(?!site-packages|dist-packages)"
    r"|<frozen |.*/(typer|click)/"
)
"""Files of Python's library and of command lines, which pass calls on too: threads, contexts."""
_LONGEST = 60


class OutOfMemoryError(Error, torch.OutOfMemoryError):
    """A tier's budget cannot hold a request.

    Attributes:
        tier: "device", "host" or "nvme".
        requested: Bytes asked for.
        available: Bytes that were left.
        budget: Bytes that the tier may hold.
    """

    def __init__(self, *args: object) -> None:
        self.tier, self.requested, self.available, self.budget = _C.last_out_of_memory()
        self._message = "".join(map(str, args)).removesuffix(_SMALLER_BATCH)
        self._asker = ""
        super().__init__(self._message + (_SMALLER_BATCH if self.tier == "device" else ""))

    def __str__(self) -> str:
        if self.tier != "device":
            return self._message
        asker = self._asker or _asker(self.__traceback__)
        figures, end, place = self._message.partition(_END_OF_FIGURES)
        if not (asker and end):
            return self._message
        in_tiles = _IN_TILES if _OUTSIDE in place else ""
        return f"{figures}{end}{asker}. {place}{in_tiles}"

    def asked_by(self, what: str) -> None:
        """Says what asked for the memory, where frames would show castor's own alone.

        Args:
            what: A noun phrase and what it did.
        """
        self._asker = self._asker or what

    def advise(self, advice: str) -> None:
        """Puts what is known of the whole step in place of the core's advice, which sees one point.

        Args:
            advice: Behind what is in use; no effect on an error of something else.
        """
        before, found, behind = self._message.partition(_OF_THIS_POINT)
        if found and advice:
            _, others, shares = behind.partition(_OF_OTHERS)
            self._message = before + advice + others + shares
            self.args = (self._message + _SMALLER_BATCH,)

    def blame_no_batch(self) -> None:
        """No smaller batch would help: what looks for one lets this error through."""
        self.args = (self._message,)


class IoError(Error, OSError):
    """A transfer failed or came short; errno and filename are those of OSError."""


class CorruptionError(IoError):
    """Data came back from storage different from what was written; the message names it."""


class CheckpointError(Error, RuntimeError):
    """A checkpoint is damaged, incomplete or of something else; nothing in memory was changed."""


def _asker(trace: TracebackType | None) -> str:
    """Says what asked for memory, as the frames show that an error came through; "": they do not.

    Python's innermost frame has called the operator whose result or temporary had no room. A chunk
    that a module needs is fetched by a hook, which names the module already.
    """
    frames = [(frame.f_code, tb.tb_lasti, tb.tb_lineno) for frame, tb in _walk(trace)]
    while frames and _passes_on(frames[-1][0].co_filename):
        frames.pop()
    if not frames or frames[-1][0].co_filename == _OF_MODULES:
        return ""
    code, instruction, line = frames[-1]
    call = _expression(code, instruction)
    text = f"Asked for by {call or code.co_name} ({_place(code, line)})"
    own = [f for f in frames[:-1] if not f[0].co_filename.startswith((_CASTOR, _TORCH))]
    if code.co_filename.startswith(_TORCH) and own:
        text += f", called in {own[-1][0].co_name} ({_place(own[-1][0], own[-1][2])})"
    return text


def _passes_on(file: str) -> bool:
    return file.startswith((_CASTOR, *_BETWEEN)) or _PASS_ON.match(file) is not None


def _walk(trace: TracebackType | None) -> list[tuple[FrameType, TracebackType]]:
    found = []
    while trace is not None:
        found.append((trace.tb_frame, trace))
        trace = trace.tb_next
    return found


def _place(code: CodeType, line: int) -> str:
    return f"{Path(code.co_filename).name}, line {line}"


def _expression(code: CodeType, instruction: int) -> str:
    """The function or operator that an instruction of a frame calls, as its source has it."""
    positions = getattr(code, "co_positions", None)  # since Python 3.11
    position = next(islice(positions(), instruction // 2, None), None) if positions else None
    if position is None or None in position:
        return ""
    first, last, begin, end = position
    lines = [linecache.getline(code.co_filename, number) for number in range(first, last + 1)]
    encoded = [line.encode() for line in lines]
    encoded[-1] = encoded[-1][:end]
    encoded[0] = encoded[0][begin:]
    try:
        parsed = ast.parse("(" + b"".join(encoded).decode() + ")", mode="eval").body
    except (SyntaxError, ValueError):
        return ""
    if isinstance(parsed, ast.Call):
        parsed = parsed.func
    text = ast.unparse(parsed)
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."


_C.set_python_errors(Error, UsageError, OutOfMemoryError, IoError, CorruptionError)
