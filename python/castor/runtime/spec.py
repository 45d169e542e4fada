"""The description of a model for the C++ core: distinct parameters, and their modules."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from castor.errors import UsageError
from castor.runtime.blocks import compiled_submodules
from castor.runtime.boosted_model import name_before_compile
from castor.runtime.packed import check_packed, is_packed
from castor.runtime.shards import is_dtensor

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class OwningModule:
    """A module whose events the runtime follows; the first one of a model is the model itself."""

    module: nn.Module
    name: str
    params: list[int]
    """Positions in ModelSpec.params of the parameters that the module needs on the device: those it
    owns directly, and if it is compiled those of all its modules (docs/design/0041)."""
    parent: int
    """Position of the nearest enclosing owning module; -1 for the model."""
    compiled: bool = False
    """Whether torch.compile compiles the module as one call."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Parameters and modules in registration order, which predicts the order of execution."""

    params: list[nn.Parameter] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    modules: list[OwningModule] = field(default_factory=list)

    @classmethod
    def of(cls, model: nn.Module, *, gather_embeddings: bool = False) -> ModelSpec:
        """Reads a model. Tied parameters appear once, under their first name.

        Args:
            model: The model.
            gather_embeddings: Whether its nn.Embedding modules read their rows in host memory.

        Raises:
            UsageError: The model has no parameters, or a parameter that castor cannot manage. Or
                gather_embeddings is True and the model has no embedding for it.
        """
        spec = cls.structure(model, gather_embeddings=gather_embeddings)
        for name, param in zip(spec.names, spec.params, strict=True):
            _check(name, param)
        if not spec.params:
            raise UsageError(f"{type(model).__name__} has no parameters; there is nothing to place")
        return spec

    @classmethod
    def structure(cls, model: nn.Module, *, gather_embeddings: bool = False) -> ModelSpec:
        """Describes a model as `of` does, with any parameters: on the meta device, or none at all.

        Raises:
            UsageError: gather_embeddings is True and the model has no embedding for it.
        """
        if gather_embeddings and not any(_reads_rows(module) for module in model.modules()):
            raise UsageError(
                f"gather_embeddings=True, but {type(model).__name__} has no module with "
                "torch.nn.Embedding's own forward; leave gather_embeddings out"
            )
        spec = cls()
        known: dict[nn.Parameter, int] = {}
        position_of: dict[str, int] = {}
        compiled, at_once = compiled_submodules(model), set()
        for name, module in model.named_modules():
            owned: list[int] = []
            for short_name, param in module._parameters.items():
                if param is None:
                    continue
                if param not in known:
                    full_name = f"{name}.{short_name}" if name else short_name
                    known[param] = len(spec.params)
                    spec.params.append(param)
                    spec.names.append(name_before_compile(full_name))
                if known[param] not in owned:
                    owned.append(known[param])
            needed = [] if gather_embeddings and _reads_rows(module) else owned
            parent = _nearest_parent(name, position_of)
            if parent in at_once:
                of_part = spec.modules[parent].params
                of_part += [i for i in needed if i not in of_part]
            elif owned or name == "" or name in compiled:
                position_of[name] = len(spec.modules)
                if name in compiled:
                    at_once.add(position_of[name])
                spec.modules.append(
                    OwningModule(
                        module=module,
                        name=name or "model",
                        params=needed,
                        parent=parent,
                        compiled=name in compiled,
                    )
                )
        return spec


def check_distinct_memory(spec: ModelSpec) -> None:
    """Raises UsageError if two Parameters share memory, which chunks would separate."""
    spans = sorted(
        (param.data_ptr(), param.data_ptr() + _span_bytes(param), name)
        for param, name in zip(spec.params, spec.names, strict=True)
        if param.numel() > 0
    )
    for (_, end, name), (start, _, other) in itertools.pairwise(spans):
        if start < end:
            raise UsageError(
                f"parameters '{name}' and '{other}' are different Parameters over the same memory; "
                "tie them by assigning the one Parameter to both modules"
            )


def _span_bytes(param: nn.Parameter) -> int:
    extent = sum((s - 1) * stride for s, stride in zip(param.shape, param.stride(), strict=True))
    return (extent + 1) * param.element_size()


def _reads_rows(module: nn.Module) -> bool:
    """Whether forward only reads some rows of the parameters, and backward reads none."""
    return (
        isinstance(module, nn.Embedding)
        and type(module).forward is nn.Embedding.forward
        and module.max_norm is None
    )


def _nearest_parent(name: str, position_of: dict[str, int]) -> int:
    while name:
        name = name.rpartition(".")[0]
        if name in position_of:
            return position_of[name]
    return -1


def _check(name: str, param: nn.Parameter) -> None:
    if is_dtensor(param):
        raise UsageError(
            f"parameter '{name}' is a DTensor, already sharded by torch.distributed; boost the "
            "plain model instead"
        )
    made_of_others: bool = is_traceable_wrapper_subclass(param)
    if made_of_others:
        raise UsageError(
            f"parameter '{name}' is a {type(param.data).__name__}, which is made of other tensors "
            "and has no memory of its own that chunks could hold; quantise the frozen base with "
            "bitsandbytes (load_in_4bit), whose parameters are their bytes, or boost the model "
            "as it was before"
        )
    if param.is_meta:
        raise UsageError(
            f"parameter '{name}' is on the meta device and has no values; materialise the model "
            "(model.to_empty and initialise, or build it without torch.device('meta')) first"
        )
    if param.layout != torch.strided:
        raise UsageError(
            f"parameter '{name}' has layout {param.layout}; only dense ones fit chunks"
        )
    check_packed(name, param)
    if param.dtype not in _FLOATS and not is_packed(param):
        raise UsageError(
            f"parameter '{name}' has dtype {param.dtype}; castor manages float32, bfloat16 and "
            "float16 parameters, and uint8 ones that a layer packs: convert it, or register it as "
            "a buffer"
        )
    if param.device.type != "cpu":
        raise UsageError(
            f"parameter '{name}' is on {param.device}; build the model on the CPU, castor moves it"
        )
