"""Memory that a model's parameters share with other tensors and with other processes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from castor import _C
from castor.errors import UsageError
from castor.runtime.spec import ModelSpec

_SHARING = ("_share_fd_cpu_", "_share_filename_cpu_", "_share_cuda_")
"""Methods of a storage that share_memory_() and queues of torch.multiprocessing come through."""


def check_unshared(spec: ModelSpec) -> None:
    """Refuses parameters in memory shared with other processes, which would not see the chunks.

    Raises:
        UsageError: A parameter is in shared memory.
    """
    for name, param in zip(spec.names, spec.params, strict=True):
        if param.device.type == "cpu" and param.is_shared() and not _C.is_mapped_privately(param):
            raise UsageError(
                f"parameter '{name}' is in memory that processes share (share_memory_(), or the "
                "model came through torch.multiprocessing), and castor would move it into a chunk "
                "that the others do not see: boost copy.deepcopy(model), and send others a .clone()"
            )


@dataclass(frozen=True, kw_only=True)
class _Alias:
    """A tensor of a module that lies over a parameter's memory."""

    tensor: torch.Tensor
    param: nn.Parameter
    offset: int  # elements from the parameter's first one


class Aliases:
    """Buffers and attributes of modules that lie over parameters' memory, and move with them."""

    def __init__(self, model: nn.Module, spec: ModelSpec) -> None:
        """Finds the tensors before parameters move into chunks.

        Raises:
            UsageError: A tensor lies over the memory of a parameter and over other memory too.
        """
        self._found: list[_Alias] = []
        owners: dict[int, list[tuple[str, nn.Parameter]]] = {}
        for name, param in zip(spec.names, spec.params, strict=True):
            if _is_plain(param):
                owners.setdefault(param.untyped_storage()._cdata, []).append((name, param))
        params = set(spec.params)
        for name, tensor in _tensors_of(model):
            if tensor in params or not _is_plain(tensor) or tensor.numel() == 0:
                continue
            for owner, param in owners.get(tensor.untyped_storage()._cdata, ()):
                if alias := _alias(name, tensor, owner, param):
                    self._found.append(alias)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors that lie over parameters."""
        return [alias.tensor for alias in self._found]

    @torch.no_grad()
    def follow(self) -> None:
        """Moves the tensors to the parameters' memory in chunks, once parameters lie there."""
        for alias in self._found:
            param, tensor = alias.param, alias.tensor
            if tensor.untyped_storage()._cdata != param.untyped_storage()._cdata:
                tensor.data = param.data.as_strided(tensor.shape, tensor.stride(), alias.offset)


def _is_plain(tensor: torch.Tensor) -> bool:
    kinds = (torch.Tensor, nn.Parameter, nn.Buffer)
    return type(tensor) in kinds and tensor.layout == torch.strided and tensor.device.type == "cpu"


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, tensor) of modules' buffers and attributes, also in lists, tuples and dicts."""
    for prefix, module in model.named_modules():
        held = {**vars(module), **module._buffers}
        for name, value in held.items():
            if name in _OF_MODULES:
                continue
            path = f"{prefix}.{name}" if prefix else name
            if isinstance(value, torch.Tensor):
                yield path, value
            elif isinstance(value, list | tuple):
                yield from ((path, item) for item in value if isinstance(item, torch.Tensor))
            elif isinstance(value, dict):
                items = value.values()
                yield from ((path, item) for item in items if isinstance(item, torch.Tensor))


_OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes of every module."""


def _alias(name: str, tensor: torch.Tensor, owner: str, param: nn.Parameter) -> _Alias | None:
    first, end = _span(tensor)
    param_first, param_end = _span(param)
    if end <= param_first or first >= param_end:
        return None
    itemsize = param.element_size()
    inside = param_first <= first and end <= param_end and tensor.dtype == param.dtype
    # In its chunk a parameter that has gaps, or elements twice, lies in another order.
    dense = param_end - param_first == param.numel() * itemsize
    if not inside or not dense:
        raise UsageError(
            f"'{name}' of the model is a tensor over the memory of parameter '{owner}' and of "
            "more than that, or of another type: in its chunk the parameter has memory of its own. "
            f"Give the one or the other a .clone() before booster.boost, or make '{name}' a "
            "property that reads the parameter"
        )
    return _Alias(tensor=tensor, param=param, offset=(first - param_first) // itemsize)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns a tensor's range of bytes in its storage: the first, and one past the last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    first = int(tensor.storage_offset())
    last = first + sum((size - 1) * stride for size, stride in steps)
    return first * tensor.element_size(), (last + 1) * tensor.element_size()


def refuse_sharing(content_of: Callable[[int], str]) -> None:
    """Makes torch refuse to share storages of boosted models with other processes from now on.

    Args:
        content_of: Names the parameter, gradient or state in a storage, given torch's address of
            it; "" for a storage that is not castor's. The latest one given is used.
    """
    global _content_of
    if _content_of is _of_others:
        for name in _SHARING:
            setattr(torch.UntypedStorage, name, _refusing(getattr(torch.UntypedStorage, name)))
    _content_of = content_of


def _of_others(_: int) -> str:
    return ""


_content_of: Callable[[int], str] = _of_others


def _refusing(share: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(share)
    def share_unless_castors(storage: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
        if content := _content_of(storage._cdata):
            raise UsageError(
                f"{content} would be shared with other processes (share_memory_(), a "
                "torch.multiprocessing queue), and castor moves what is in chunks: the others "
                "would not see it. Send them a .clone(), or copy.deepcopy of the model"
            )
        return share(storage, *args, **kwargs)

    return share_unless_castors
