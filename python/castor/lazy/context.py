"""Models that take no memory until they are boosted."""

from __future__ import annotations

import functools
import threading
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn import init
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from castor.errors import UsageError
from castor.lazy.files import lazy_files
from castor.lazy.materialise import materialise
from castor.lazy.tensor import LazyTensor, Recording, name_of, record

# --- Records torch.nn.init.trunc_normal_ as one operation -----------------------------------------

# From torch 2.12 on the function draws until every value is accepted, and so reads values that
# random numbers decide. A recording cannot put off its single operations, only the function as a
# whole.

_LIBRARY = torch.library.Library("castor_lazy", "DEF")
_LIBRARY.define(
    "trunc_normal_(Tensor(a!) tensor, float mean, float std, float a, float b, *,"
    " Generator? generator=None) -> Tensor(a!)",
    tags=(torch.Tag.nondeterministic_seeded,),
)
_eager = init._no_grad_trunc_normal_


torch.library.impl(_LIBRARY, "trunc_normal_", "CPU")(_eager)


@torch.library.impl(_LIBRARY, "trunc_normal_", "Meta")
def _draw_nothing(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return tensor


@functools.cache
def record_truncated_normals(lazy: type[torch.Tensor]) -> None:
    """Has torch.nn.init.trunc_normal_ call one operation for tensors of the class `lazy`.

    Other tensors are initialised by torch's function as before. Lasts as long as the process: a
    lazy tensor may be initialised after its context has ended.
    """

    @functools.wraps(_eager)
    def trunc_normal(
        tensor: torch.Tensor,
        mean: float,
        std: float,
        a: float,
        b: float,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        if not isinstance(tensor, lazy):
            return _eager(tensor, mean, std, a, b, generator=generator)
        with torch.no_grad():
            torch.ops.castor_lazy.trunc_normal_(tensor, mean, std, a, b, generator=generator)
        return tensor

    init._no_grad_trunc_normal_ = trunc_normal


# --- Models that take no memory until they are boosted --------------------------------------------

_active = threading.local()


class LazyInitContext:
    """Inside, CPU tensors are made without memory: `with LazyInitContext(): model = Model(config)`.

    What initialises them is recorded; `booster.boost` replays it straight into the chunks. For the
    same seed the weights are bitwise those of eager construction, and so is what the random
    generators give after boost, unless something drew from them in between. `from_pretrained` of
    transformers works too: boost reads the safetensors files tensor by tensor into the chunks.

    An initialiser that reads a random value (`.item()`, `if x > 0`) cannot be put off: everything
    up to it is then computed at once, with a warning that names it. Code that asks for a tensor's
    address raises UsageError. Nothing but the model should be made inside.

    Sources: torchdistX (deferred initialisation); Colossal-AI, whose name this is.
    """

    def __init__(self) -> None:
        self._recording = Recording()
        self._inside = ExitStack()

    def __enter__(self) -> LazyInitContext:
        """Starts recording.

        Raises:
            UsageError: Another one is active in this thread.
        """
        if is_active():
            raise UsageError("a LazyInitContext is active already; use one at a time")
        record_truncated_normals(LazyTensor)
        self._inside.enter_context(lazy_files(self._recording))
        self._inside.enter_context(_RecordingMode(self._recording))
        _active.context = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        """Ends the recording of new tensors; what is done to lazy ones is recorded ever after."""
        _active.context = None
        self._inside.__exit__(kind, error, where)

    @staticmethod
    def materialize(model: nn.Module) -> nn.Module:
        """Computes a lazy model in ordinary memory, without boosting it.

        Args:
            model: A model; what is not lazy in it stays as it is.

        Returns:
            The same model.

        Raises:
            UsageError: A LazyInitContext is active.
        """
        check_inactive()
        materialise(model)
        return model


class _RecordingMode(TorchDispatchMode):
    """Sees every operation of its thread."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Records what makes a CPU tensor, and what uses a lazy one."""
        kwargs = kwargs or {}
        tensors = [
            leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)
        ]
        if any(isinstance(tensor, LazyTensor) for tensor in tensors):
            return record(func, args, kwargs)
        if self._recording.given_up:
            return func(*args, **kwargs)
        without_values = all(tensor.is_meta for tensor in tensors)
        if without_values and _makes_cpu_tensor(func, tensors, kwargs):
            return record(func, args, kwargs, self._recording)
        if torch.Tag.nondeterministic_seeded in func.tags and not without_values:
            self._recording.compute_all(
                f"{name_of(func)} draws random numbers into a tensor with values"
            )
        return func(*args, **kwargs)


def _makes_cpu_tensor(func: Any, tensors: list[torch.Tensor], kwargs: dict[str, Any]) -> bool:
    """Given that `tensors`, the arguments, are on the meta device."""
    if not any("Tensor" in str(result.type) for result in func._schema.returns):
        return False
    default = "meta" if tensors else "cpu"
    return torch.device(kwargs.get("device") or default).type == "cpu"


def is_active() -> bool:
    """Whether this thread is inside a LazyInitContext."""
    return getattr(_active, "context", None) is not None


def check_inactive() -> None:
    """Raises UsageError inside a LazyInitContext."""
    if is_active():
        raise UsageError("leave the LazyInitContext first: what is made inside it has no memory")
