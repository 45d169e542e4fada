"""Chooses the type of each parameter and buffer of a model that trains in 16 bits.

Most get the working precision. Some stay float32, as in plain PyTorch: tensors that transformers
keeps in float32 (`_keep_in_fp32_modules_strict`: routers, correction biases, sinks), float32
tensors of a model that is 16-bit already, and tensors that the plugin's `keep_fp32` names.
"""

from __future__ import annotations

import copy
import difflib
import fnmatch
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from castor.config.names import SCALAR_TYPES, Precision, ScalarType
from castor.errors import UsageError
from castor.runtime.boosted_model import name_before_compile
from castor.runtime.packed import is_packed

KeepFp32 = Sequence["str | type[nn.Module]"]
"""Patterns of names of parameters, buffers and modules, or classes of modules."""

_HALVES = (torch.bfloat16, torch.float16)
_NUM_NAMES = 3
"""Number of nearest names in a message."""
_OF_ADAPTERS = re.compile(
    r"\.base_layer(?=\.|$)|\.original_module(?=\.|$)|\.modules_to_save\.[^.]+|"
    r"\.parametrizations(?=\.)|\.original(?=$)"
)
"""Additions of PEFT to the names of a model's own parameters."""


@dataclass(frozen=True, kw_only=True)
class TensorTypes:
    """The types that a model's parameters and buffers get, by name."""

    working: torch.dtype
    """The plugin's precision."""
    tensors: Mapping[str, torch.dtype] = field(default_factory=dict)

    def of_param(self, name: str) -> torch.dtype:
        """Returns the type of a parameter; the working precision if its name is not known."""
        return self.tensors.get(name, self.working)

    def of_buffer(self, name: str, buffer: torch.Tensor) -> torch.dtype:
        """Returns the type of a buffer; its present type if its name is not known."""
        return self.tensors.get(name, buffer.dtype)


def warn_of_default_precision(
    model: nn.Module, precision: Precision, working: torch.dtype, *, stacklevel: int
) -> None:
    """Warns if a model that is mostly in 16 bits gets another type because no precision was given.

    Args:
        model: Model that is about to be boosted.
        precision: Default precision of the device.
        working: Type of that precision.
        stacklevel: As warnings.warn counts, from the caller of this function.
    """
    elements: Counter[torch.dtype] = Counter()
    for param in model.parameters():
        if param.is_floating_point():
            elements[param.dtype] += param.numel()
    most = max(elements, key=elements.__getitem__, default=working)
    if most in _HALVES and most != working:
        own = next(name for name, scalar in SCALAR_TYPES.items() if getattr(torch, scalar) == most)
        warnings.warn(
            f"this {type(model).__name__} is in {most}, and becomes {working}: no precision was "
            f"given, and the default of this device is {precision!r}. Give precision={own!r} to "
            f"train it as it is, or precision={precision!r}",
            RuntimeWarning,
            stacklevel=stacklevel + 1,
        )


def scalar_type(dtype: torch.dtype) -> ScalarType:
    """Returns the C++ core's name of a type of parameters."""
    return next(name for name in SCALAR_TYPES.values() if getattr(torch, name) == dtype)


def tensor_types(
    model: nn.Module,
    working: torch.dtype,
    keep_fp32: KeepFp32 = (),
    *,
    in_stages: bool = False,
) -> TensorTypes:
    """Chooses the types of a model's tensors.

    In a 16-bit working precision these are float32:

    - tensors that `keep_fp32` names;
    - tensors that are float32 in a model where most elements of parameters are 16-bit already;
    - tensors that `from_pretrained(dtype=working)` of transformers makes float32. This does not
      apply if most parameters have the working precision already: their types are the user's.

    Buffers of a model of transformers get the types that `from_pretrained` gives them. Other
    persistent floating-point buffers get the working precision, as BatchNorm needs; the rest stay
    as they are.

    Args:
        model: The full model, before it is divided among ranks.
        working: The plugin's precision.
        keep_fp32: The plugin's `keep_fp32`.
        in_stages: Whether ranks run the model in pipeline stages. Stages exchange hidden states in
            the working precision. Tensors that transformers keeps in float32 for fp16 alone (T5's
            last projection of a block) would make them float32, and are then converted too.

    Raises:
        UsageError: An entry of `keep_fp32` matches nothing.
    """
    tensors = _tensors(model)
    kept = _kept_by_user(model, tensors, keep_fp32)
    floats = [
        one.tensor
        for one in tensors.values()
        if one.is_param and one.tensor.is_floating_point() and not is_packed(one.tensor)
    ]
    halves = sum(one.numel() for one in floats if one.dtype in _HALVES)
    own = sum(one.numel() for one in floats if one.dtype == working)
    total = sum(one.numel() for one in floats)
    theirs = (
        {}
        if working == torch.float32 or 2 * own > total
        else _types_loaded(model, working, in_stages)
    )
    types = {}
    for one in tensors.values():
        chosen = working if one.is_param or one.persistent else one.tensor.dtype
        deliberate = 2 * halves > total and one.tensor.dtype == torch.float32
        if not one.tensor.is_floating_point():
            chosen = one.tensor.dtype
        elif working == torch.float32:
            chosen = working if one.is_param else one.tensor.dtype
        elif deliberate or not kept.isdisjoint(one.names):
            chosen = torch.float32
        else:
            chosen = theirs.get(one.names[0], chosen)
        types.update(dict.fromkeys(map(name_before_compile, one.names), chosen))
    return TensorTypes(working=working, tensors=types)


@dataclass(kw_only=True)
class _Tensor:
    """A parameter or a buffer."""

    tensor: torch.Tensor
    is_param: bool
    persistent: bool
    """Whether it is a parameter, or a buffer that a checkpoint holds."""
    names: list[str] = field(default_factory=list)
    """All names of the tensor; the runtime uses a tied parameter's first name."""


def _tensors(model: nn.Module) -> dict[int, _Tensor]:
    """Returns all parameters and buffers, by identity."""
    found: dict[int, _Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for is_param, members in ((True, module._parameters), (False, module._buffers)):
            for name, tensor in members.items():
                if tensor is not None:
                    held = is_param or name not in module._non_persistent_buffers_set
                    one = _Tensor(tensor=tensor, is_param=is_param, persistent=held)
                    names = found.setdefault(id(tensor), one).names
                    names.append(f"{prefix}.{name}" if prefix else name)
    return found


def _kept_by_user(
    model: nn.Module, tensors: Mapping[int, _Tensor], keep_fp32: KeepFp32
) -> set[str]:
    """Returns the names of the tensors that patterns and classes match."""
    if not keep_fp32:
        return set()
    modules = dict(model.named_modules(remove_duplicate=False))
    names = [name for one in tensors.values() for name in one.names]
    kept: set[str] = set()
    for entry in keep_fp32:
        if isinstance(entry, str):
            owners = {name for name in modules if name and fnmatch.fnmatchcase(name, entry)}
            found = {name for name in names if fnmatch.fnmatchcase(name, entry)}
            known = [*names, *filter(None, modules)]
        else:
            owners = {name for name, module in modules.items() if isinstance(module, entry)}
            found = set()
            known = [type(module).__name__ for module in modules.values()]
        found |= {name for name in names if not owners.isdisjoint(_owners(name))}
        if not found:
            raise UsageError(_nothing_matches(model, entry, known, empty=bool(owners)))
        kept |= found
    return kept


def _owners(name: str) -> Iterator[str]:
    """Yields the names of the modules around a tensor, the innermost first; "" is the model."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _nothing_matches(
    model: nn.Module, entry: str | type[nn.Module], known: Sequence[str], *, empty: bool
) -> str:
    shown = repr(entry) if isinstance(entry, str) else entry.__name__
    asked = f"keep_fp32 has {shown}, "
    if empty:
        return (
            f"{asked}and the modules of {type(model).__name__} that it matches have no parameters "
            "and no buffers; take it out"
        )
    wanted = shown.strip("'").replace("*", "")
    near = difflib.get_close_matches(wanted, dict.fromkeys(known), _NUM_NAMES, cutoff=0.0)
    what = "parameter, buffer or module" if isinstance(entry, str) else "module of that class"
    return (
        f"{asked}and {type(model).__name__} has no {what} that it matches; the nearest are "
        f"{', '.join(map(repr, near))}. Names are whole: '*.gate' matches 'layers.0.gate'"
    )


def _types_loaded(
    model: nn.Module, working: torch.dtype, in_stages: bool
) -> dict[str, torch.dtype]:
    """Returns the types with which transformers would load its models within a model, by name."""
    transformers: Any = sys.modules.get("transformers.modeling_utils")
    if transformers is None:  # a model of transformers would have imported it
        return {}
    found: dict[str, torch.dtype] = {}
    outermost: list[str] = []
    for prefix, module in model.named_modules():
        if isinstance(module, transformers.PreTrainedModel) and not any(
            prefix.startswith(f"{outer}.") or not outer for outer in outermost
        ):
            outermost.append(prefix)
            found |= _types_of(module, prefix, working, in_stages)
    return found


def _types_of(
    model: Any, prefix: str, working: torch.dtype, in_stages: bool
) -> dict[str, torch.dtype]:
    """Returns the types that `from_pretrained` gives the tensors of a model of transformers."""
    patterns = set(model._keep_in_fp32_modules_strict or ())
    if working == torch.float16 and not in_stages:
        patterns |= set(model._keep_in_fp32_modules or ())
    # As core_model_loading.build_glob_alternation: regular expressions, searched for anywhere.
    matches = re.compile("|".join(sorted(pattern.replace("*", ".*") for pattern in patterns)))
    built = _types_built(model, working)
    found = {}
    for one in _tensors(model).values():
        for name in one.names:
            known = _OF_ADAPTERS.sub("", f".{name}")[1:]
            full = f"{prefix}.{name}" if prefix else name
            if one.persistent and patterns and matches.search(known):
                found[full] = torch.float32
            elif known in built:
                found[full] = built[known]
    return found


def _types_built(model: Any, working: torch.dtype) -> dict[str, torch.dtype]:
    """Returns the types with which a model's class builds its tensors in a working precision.

    `from_pretrained` keeps types that the class sets itself, float32 or others. The result is empty
    for a class that cannot be built from its config alone.
    """
    config = copy.deepcopy(model.config)
    with _BuiltWithoutValues(), torch.device("meta"):
        try:
            twin = type(model)._from_config(config, dtype=working)
        except Exception:  # classes of other packages may raise anything
            return {}
    return {
        name: one.tensor.dtype
        for one in _tensors(twin).values()
        for name in one.names
        if one.tensor.is_floating_point()
    }


class _BuiltWithoutValues(TorchFunctionMode):
    """A mode in which models are built without values, except those that their classes read."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        if func in _INITIALISERS:
            return args[0]
        if func is torch.linspace:  # classes read the rates of their blocks' drop paths from it
            given = given | {"device": "cpu"}
        return func(*args, **given)


_INITIALISERS = {torch.Tensor.uniform_, torch.Tensor.normal_}
