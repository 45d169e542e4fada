"""Recomputes the activations of parts of a model in backward (Chen et al. 2016)."""

from __future__ import annotations

import dataclasses
import functools
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, get_device_states, set_device_states

from castor.activations.block_profile import BlockRun, Decisions, Tiles
from castor.activations.caches import place_of_use_cache, without_caches
from castor.errors import UsageError

# --- Saves and restores the states of the generators that a module may draw from ------------------


class RandomStates:
    """Random states of the CPU's generator and of the generators of some tensors' devices."""

    def __init__(self, *values: Any) -> None:
        """Reads the states for the tensors among the values, also those in plain containers."""
        self._cpu = torch.get_rng_state()
        self._devices, self._states = get_device_states(*values)
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        kinds = {tensor.device.type for tensor in tensors} - {"cpu", "meta"}
        self._kind = None if "cuda" in kinds else next(iter(kinds), None)  # None: torch's default

    def restore(self) -> None:
        """Sets the generators back to the states."""
        torch.set_rng_state(self._cpu)
        set_device_states(self._devices, self._states, device_type=self._kind)

    def are_now(self, *values: Any) -> bool:
        """Whether the generators still have these states."""
        now = RandomStates(*values)
        pairs = zip((self._cpu, *self._states), (now._cpu, *now._states), strict=True)
        return all(torch.equal(*pair) for pair in pairs)


# --- Recomputes the activations of parts of a model in backward (Chen et al. 2016) ----------------

_STOPPED = "_StopRecomputationError"
"""Exception by which torch ends a second forward that has computed all that backward needs."""
_ROUNDING = 1e-2
"""Tolerance, relative in the norm, for GPU operators that add in any order."""
_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))

_plain_checkpoint = functools.partial(checkpoint, use_reentrant=False)


class Recomputation:
    """Runs one module's forward, keeps its inputs and runs it again in backward.

    torch.utils.checkpoint does the work, with its handling of random states, autocast and early
    stopping. In addition, a second forward that differs from the first one is an error:

    - the forward writes buffers;
    - parameters were written between forward and backward;
    - the outputs differ, which is checked once, for the first module of each class.

    Routers choose their experts in the first forward only.

    Transformers calls the object as a `_gradient_checkpointing_func`. A copy or a pickle of the
    module gets torch's function instead.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        *,
        compared: bool,
        auto: Decisions | None = None,
        block: int = 0,
        lenient: bool = False,
    ) -> None:
        """Takes a module to recompute.

        Args:
            module: The module.
            name: Name of the module in the model.
            compared: Whether the outputs of the two forwards are compared once.
            auto: Policy that decides at each forward; None: each forward is recomputed.
            block: Number of the module's block in `auto`.
            lenient: Whether a module that cannot be recomputed runs as it is, without an error.
        """
        self._owner = weakref.ref(module)
        self._auto = auto
        self._tiles = auto.tiles if auto else Tiles()
        self._block = block
        self._name = name
        self._early_stop = not compared  # a forward that stops early has no output
        self._compares = compared
        self._writes_no_buffer = False  # true once a forward has been checked
        self._use_cache = place_of_use_cache(module)
        self._lenient = lenient
        self.refused = False
        """Whether a lenient recomputation has found that the module cannot be recomputed."""
        self._options: dict[str, Any] = {"context_fn": _choosing_once} if routes(module) else {}

    @property
    def recomputes(self) -> bool:
        """Whether the forward is recomputed, and not kept or offloaded by "auto"."""
        if self.refused:
            return False
        return self._auto is None or self._auto.recomputes(self._block)

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Returns function(*args, **kwargs).

        Raises:
            UsageError: The function writes buffers of the module.
        """
        module = self._owner()
        if module is None or self.refused or not torch.is_grad_enabled():
            return function(*args, **kwargs)
        args = without_caches(args, self._use_cache)
        run = None
        if self._auto:
            inputs = _arguments(function, args)
            decided = self._auto.decide(self._block, inputs)
            if decided != "recompute":
                # A forward that does not fit runs again, and is recomputed.
                lacking, output = self._try(function, args, kwargs, offload=decided == "offload")
                if not lacking:
                    return output
                self._auto.fell_short(lacking)
            run = self._auto.open(self._block)
            run.input_bytes = sum(tensor.nbytes for tensor in inputs if _has_graph(tensor))
        buffers = None if self._writes_no_buffer else _Buffers(module, copied=self._lenient)
        restores = self._lenient and buffers is not None and buffers.any
        states = RandomStates(*args, *kwargs.values()) if restores else None
        forward = functools.partial(_Forward(function, self, module, run, self._tiles), **kwargs)
        try:
            output = checkpoint(
                forward,
                *args,
                use_reentrant=False,
                early_stop=self._early_stop,
                **self._options,
            )
        except BaseException as error:
            _leave_checkpoints(error)
            raise
        if buffers is None:
            return output
        written = buffers.written()
        if written and states:
            self.refused = True
            if run:
                run.failed = True  # the forward runs twice, so the step is no valid profile
            del forward, output  # and the copies of the outputs, made to be compared
            buffers.restore()
            states.restore()
            return function(*args, **kwargs)
        self._check_buffers(module, written)
        return output

    def _try(
        self, function: Callable[..., Any], args: Any, kwargs: Any, *, offload: bool
    ) -> tuple[str, Any]:
        """Calls a function; returns the tier that had no room for it, or "", and its result.

        If a tier had no room, random states are as before the call. The function must write no
        buffers.

        Raises:
            OutOfMemoryError: A tier had no room, and other ranks compute the block together with
                this one.
        """
        assert self._auto is not None
        states = RandomStates(*args, *kwargs.values())
        try:
            with self._auto.offloading() if offload else nullcontext():
                return "", function(*args, **kwargs)
        except torch.OutOfMemoryError as error:  # castor's OutOfMemoryError is a subclass
            if not self._auto.may_run_again:
                raise
            tier: str = getattr(error, "tier", "device")
            drop_tensors(error)
        states.restore()
        return tier, None

    def _check_buffers(self, module: nn.Module, written: str) -> None:
        if written:
            raise UsageError(
                f"module '{self._name}' ({type(module).__name__}) writes its buffer '{written}' "
                "in forward, and recomputing it would write it twice; keep its activations: "
                "activations='keep', or a mapping that keeps this block"
            )
        self._writes_no_buffer = True

    def check_parameters(self, module: nn.Module, before: list[tuple[str, int]]) -> None:
        """Raises UsageError if parameters were written since the first forward."""
        for name, version in before:
            if module.get_parameter(name)._version != version:
                raise UsageError(
                    f"parameter '{self._name}.{name}' was written between forward and backward, "
                    f"which runs module '{self._name}' ({type(module).__name__}) again; write it "
                    "after backward, or keep its activations: activations='keep', or a mapping "
                    "that keeps this block"
                )

    def first_output(self, output: Any) -> list[torch.Tensor]:
        """Returns copies of an output's tensors if the outputs are to be compared; else none."""
        if not self._compares:
            return []
        return [tensor.detach().clone() for tensor in tensors_in(output)]

    def check_output(self, output: Any, first: list[torch.Tensor]) -> None:
        """Raises UsageError if the output of a second forward differs from the first one's."""
        if not first:
            return
        second = list(tensors_in(output))
        if len(second) != len(first) or not all(map(_same, second, first)):
            raise UsageError(
                f"module '{self._name}' ({type(self._owner()).__name__}) gives another output when "
                "backward runs it again, so its gradients would be wrong: something that forward "
                "changes (a cache, a counter, a generator of its own) is not among its inputs; "
                "keep its activations: activations='keep', or a mapping that keeps this block"
            )
        self._compares = False

    def __deepcopy__(self, _: dict[int, Any]) -> Any:
        """Returns torch's function for a copy of the module."""
        return _plain_checkpoint

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        """Returns torch's function for a pickle of the module."""
        return functools.partial, (checkpoint,), (checkpoint, (), {"use_reentrant": False}, None)


class _Buffers:
    """Buffers of a module before its forward, to find out whether the forward writes one."""

    def __init__(self, module: nn.Module, *, copied: bool) -> None:
        """Notes the buffers.

        Args:
            module: The module.
            copied: Whether the values are copied, for `restore`.
        """
        self._module = module
        self._before = [
            (name, buffer, buffer._version, buffer.detach().clone() if copied else None)
            for name, buffer in module.named_buffers()
        ]

    @property
    def any(self) -> bool:
        """Whether the module has buffers."""
        return bool(self._before)

    def written(self) -> str:
        """Returns the name of a buffer that has been written or replaced; "": there is none."""
        now = dict(self._module.named_buffers())
        for name, buffer, version, _ in self._before:
            if now.get(name) is not buffer or buffer._version != version:
                return name
        return ""

    def restore(self) -> None:
        """Gives every buffer its tensor and its values back."""
        with torch.no_grad():
            for name, buffer, _, values in self._before:
                path, _, last = name.rpartition(".")
                assert values is not None
                buffer.copy_(values)
                self._module.get_submodule(path)._buffers[last] = buffer


class _Forward:
    """Forward that runs twice, and checks the second run against the first one."""

    def __init__(
        self,
        function: Callable[..., Any],
        recomputation: Recomputation,
        module: nn.Module,
        run: BlockRun | None,
        tiles: Tiles,
    ) -> None:
        self._function = function
        self._recomputation = recomputation
        self._module = module
        self._run = run
        self._tiles = tiles
        self._number = tiles.number
        self._parameters: list[tuple[str, int]] | None = None
        self._required: list[bool] = []
        self._output: list[torch.Tensor] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        again = self._parameters is not None
        if self._run:
            self._run.begin(again=again)
        try:
            if not again:
                return self._first(*args, **kwargs)
            with self._tiles.at(self._number):
                return self._second(*args, **kwargs)
        except BaseException as stop:
            if self._run and type(stop).__name__ == _STOPPED:
                traceback.clear_frames(stop.__traceback__)  # drops the frames' tensors
            elif self._run:
                self._run.failed = True
            raise
        finally:
            if self._run:
                self._run.end(again=again)

    def _first(self, *args: Any, **kwargs: Any) -> Any:
        parameters = list(self._module.named_parameters())
        self._parameters = [(name, param._version) for name, param in parameters]
        self._required = [param.requires_grad for _, param in parameters]
        output = self._function(*args, **kwargs)
        self._output = self._recomputation.first_output(output)
        if self._run:
            self._run.copied(self._output)
        return output

    def _second(self, *args: Any, **kwargs: Any) -> None:
        """Runs again. Returns nothing: torch needs no output, and the kept bytes are measured."""
        self._recomputation.check_parameters(self._module, self._parameters or [])
        with _requiring(self._module, self._required):
            output = self._function(*args, **kwargs)
        self._recomputation.check_output(output, self._output)
        self._output = []


@contextmanager
def _requiring(module: nn.Module, required: list[bool]) -> Iterator[None]:
    """Has the parameters of a module require gradients as given, and as they did behind it.

    A script may freeze or unfreeze some between forward and backward.
    """
    pairs = zip(module.parameters(), required, strict=True)
    changed = [param for param, before in pairs if param.requires_grad != before]
    for param in changed:
        param.requires_grad_(not param.requires_grad)
    try:
        yield
    finally:
        for param in changed:
            param.requires_grad_(not param.requires_grad)


class RecomputingCall:
    """Recomputes a module without transformers' gradient checkpointing, or a compiled one."""

    def __init__(self, module: nn.Module, name: str, *, compared: bool) -> None:
        """See Recomputation."""
        self._owner = weakref.ref(module)
        self._name = name
        self._recomputation = Recomputation(module, name, compared=compared)

    def __call__(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Returns the result of `call`, the module's forward.

        Raises:
            UsageError: An argument is something that the forward may change.
        """
        module = self._owner()
        assert module is not None
        if not module.training or not torch.is_grad_enabled():
            return call(*args, **kwargs)
        refuse_changeable(self._name, module, (*args, *kwargs.values()))
        return self._recomputation(call, *args, **kwargs)


def refuse_changeable(name: str, module: nn.Module, values: Iterable[Any]) -> None:
    """Raises UsageError if a module is passed something that its forward may change."""
    for value in values:
        if (changeable := _not_plain(value)) is not None:
            raise UsageError(
                f"module '{name}' ({type(module).__name__}) is passed a {changeable}, "
                "which it may change, and recomputing it would change it twice; call the model "
                "without it (use_cache=False where it is a cache), or keep its activations: "
                "activations='keep', or a mapping that keeps this block"
            )


class _Choices(TorchDispatchMode):
    """Has topk and argmax of a second forward choose the same elements as in the first one.

    Kernels that add in any order round differently. That must not send a token to another expert in
    the second forward: its activations would be those of experts that the loss has not seen.
    """

    def __init__(self, chosen: list[torch.Tensor], *, again: bool) -> None:
        super().__init__()
        self._chosen = chosen
        self._again = again
        self._next = 0

    def __enter__(self) -> _Choices:
        self._next = 0
        super().__enter__()
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs an operator; notes its choice in the first forward, and repeats it in the second."""
        kwargs = kwargs or {}
        chooses = func in (torch.ops.aten.topk.default, torch.ops.aten.argmax.default)
        if not chooses:
            return func(*args, **kwargs)
        if not self._again:
            found = func(*args, **kwargs)
            self._chosen.append((found[1] if isinstance(found, tuple) else found).clone())
            return found
        chosen = self._chosen[self._next].clone()
        self._next += 1
        if func is torch.ops.aten.argmax.default:
            return chosen
        dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
        return args[0].gather(dim, chosen), chosen


def _choosing_once() -> tuple[_Choices, _Choices]:
    """Returns the contexts of a first forward and of later ones."""
    chosen: list[torch.Tensor] = []
    return _Choices(chosen, again=False), _Choices(chosen, again=True)


def drop_tensors(error: BaseException | None) -> None:
    """Drops the tensors that the frames of an error's traceback hold."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__context__


def _leave_checkpoints(error: BaseException) -> None:
    """Removes the saved-tensor hooks of checkpoints that an error has passed through.

    Torch's generator in a local variable of `checkpoint` removes them when it is freed. Otherwise
    that happens only when the traceback is freed, and in any order.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        if code.co_name == "checkpoint" and code.co_filename == torch.utils.checkpoint.__file__:
            frame.clear()


def _arguments(function: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
    """Returns the arguments, and those that transformers has bound to the function."""
    bound = function.keywords if isinstance(function, functools.partial) else {}
    return [*args, *bound.values()]


def _has_graph(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def routes(module: nn.Module) -> bool:
    """Whether a module has experts, which a router chooses."""
    return any(name.rpartition(".")[2] == "experts" for name, _ in module.named_modules())


def _same(second: torch.Tensor, first: torch.Tensor) -> bool:
    if second.shape != first.shape or second.dtype != first.dtype:
        return False
    second = second.detach()
    if second.device.type != "cpu" and second.is_floating_point():
        error = (second.double() - first.double()).norm()
        return bool(error <= _ROUNDING * first.double().norm())
    return torch.equal(*(t.contiguous().flatten().view(torch.uint8) for t in (second, first)))


def _parts(value: Any) -> list[Any] | None:
    """Returns the elements of a plain container; None: the value is none."""
    if isinstance(value, tuple | list):
        return list(value)
    if isinstance(value, dict):
        return list(value.values())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return None


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors of a value: itself, or those in plain containers."""
    if isinstance(value, torch.Tensor):
        yield value
    for part in _parts(value) or ():
        yield from tensors_in(part)


def _not_plain(value: Any) -> str | None:
    """Returns the type name of a part that is no tensor and may change; None: there is none."""
    if isinstance(value, (torch.Tensor, *_PLAIN)):
        return None
    parts = _parts(value)
    if parts is None:
        return type(value).__name__
    return next((found for part in parts if (found := _not_plain(part))), None)
