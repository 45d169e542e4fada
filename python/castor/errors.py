"""What castor raises. The C++ core's exceptions become these classes."""

from __future__ import annotations

import torch

from castor import _C

_OF_THIS_POINT = "; the smallest budget that gets past this point is "
_OF_OTHERS = ". Models of one plugin share this budget"
"""Where the core's advice begins (csrc/core/runtime_room.cc), and what may stand behind it."""
_SMALLER_BATCH = "\nThe device is out of memory."
"""In args of an error that a smaller batch may help: what accelerate's find_executable_batch_size,
and with it the Trainer's auto_find_batch_size, look for there."""


class Error(Exception):
    """Root of what the runtime raises. Bad arguments are ValueError or TypeError instead."""


class UsageError(Error, RuntimeError):
    """Calls in an order, or on a model, that castor cannot serve; the message says what to do."""


class NonFiniteGradientError(Error, ArithmeticError):
    """A gradient holds NaN or infinity and the plugin was asked to raise (nonfinite="raise")."""


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
        super().__init__(self._message + (_SMALLER_BATCH if self.tier == "device" else ""))

    def __str__(self) -> str:
        return self._message

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


_C.set_python_errors(Error, UsageError, OutOfMemoryError, IoError, CorruptionError)
