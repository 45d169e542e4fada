"""Counts the work of operators, and remembers their results on tensors without memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

_aten = torch.ops.aten
_on_host = _aten._scaled_dot_product_flash_attention_for_cpu
_back_on_host = _aten._scaled_dot_product_flash_attention_for_cpu_backward

Work = tuple[int, int]
"""Work of an operator: FLOPs, and bytes read and written."""
_Geometry = tuple[torch.Size, tuple[int, ...], torch.dtype]


def flops_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Returns the FLOPs of matrix products, convolutions and attention; 0 for other operators."""
    if func is _aten._grouped_mm.default:  # experts; torch has no formula for it
        left, right = args[0], args[1]
        rows = left.size(0) if left.dim() == 2 else left.size(0) * left.size(1)
        return int(2 * rows * left.size(-1) * right.size(-1))
    if func in (_on_host.default, _back_on_host.default):  # ring attention; no formula either
        forward = func is _on_host.default
        query, key, value = args[:3] if forward else args[1:4]
        of_scores, of_values = (1, 1) if forward else (3, 2)  # number of products
        pairs = query.shape[:-1].numel() * key.size(-2)
        return int(2 * pairs * (of_scores * query.size(-1) + of_values * value.size(-1)))
    formula = flop_registry.get(func._overloadpacket)
    return int(formula(*args, **kwargs, out_val=out)) if formula else 0


@cache
def is_view(func: Any) -> bool:
    """Whether an operator's results are views of its arguments, which it only reads."""
    schema = func._schema
    given = [of.alias_info for of in schema.returns]
    return func is _aten._unsafe_view.default or (
        not schema.is_mutable and bool(given) and None not in given
    )


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Returns the tensors among an operator's arguments or results, also in lists and tuples."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


@dataclass(frozen=True)
class Result:
    """Results of an operator for arguments of the same shapes."""

    geometries: tuple[_Geometry | None, ...]
    """Geometry of each result; empty: the operator writes its first argument and returns that."""
    kind: type | None
    """Type of the sequence that holds the results; None: a single tensor."""
    work: Work | None
    """Work of the operator; None: it is not counted."""

    def make(self, args: tuple[Any, ...]) -> tuple[Any, list[torch.Tensor]]:
        """Makes new results of the same geometry; returns them and the tensors in them."""
        if not self.geometries:
            return args[0], [args[0]]
        made = [
            geometry and torch.empty_strided(*geometry[:2], dtype=geometry[2], device="meta")
            for geometry in self.geometries
        ]
        tensors = [tensor for tensor in made if tensor is not None]
        return (made[0] if self.kind is None else self.kind(made)), tensors


class Results:
    """Cache of operators' results, by the shapes of their arguments.

    The blocks of a model run the same operators again and again. torch computes shapes in Python,
    which takes most of the time of a recorded step. Two kinds of operators are remembered:

    - those that change nothing and whose results have memory of their own;
    - those that write their first argument and return it in the same shape.

    Their results depend only on shapes, strides, types and the arguments that are no tensors.
    """

    def __init__(self) -> None:
        self._known: dict[Any, Result] = {}

    def find(self, key: Any) -> Result | None:
        """Returns the known result of an operator and its arguments."""
        return self._known.get(key)

    def add(
        self,
        key: Any,
        given: Sequence[torch.Tensor],
        out: Any,
        made: Sequence[torch.Tensor],
        work: Any,
    ) -> None:
        """Remembers an operator's results, if it is of a kind that is remembered.

        Args:
            key: Key of the operator and its arguments, from `key_of`.
            given: The tensors among the arguments.
            out: The results.
            made: The tensors among the results whose memory was not known before.
            work: Work of the operator; None: it is not counted.
        """
        if key[0]._schema.is_mutable:
            if _writes_first(key[0]) and out is given[0] and out.is_meta:
                self._known[key] = Result((), None, work)
            return
        values = list(out) if isinstance(out, list | tuple) else [out]
        tensors = [value for value in values if value is not None]
        if not tensors or len(made) != len(tensors):
            return
        shared = {tensor.untyped_storage()._cdata for tensor in given}
        if all(isinstance(value, torch.Tensor) and _is_whole(value, shared) for value in tensors):
            geometries = (value if value is None else _geometry(value) for value in values)
            kind = type(out) if isinstance(out, list | tuple) else None
            self._known[key] = Result(tuple(geometries), kind, work)


@cache
def _writes_first(func: Any) -> bool:
    """Whether an operator writes its first argument only, keeps its shape and returns it alone."""
    schema = func._schema
    written = [of.alias_info is not None and of.alias_info.is_write for of in schema.arguments]
    only_first = written[:1] == [True] and not any(written[1:]) and len(schema.returns) == 1
    return only_first and torch.Tag.inplace_view not in func.tags


def key_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns a key of everything that an operator's results depend on."""
    return func, _described(args), _described(tuple(kwargs.items()))


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _geometry(value), value.is_meta
    if isinstance(value, list | tuple):
        return tuple(map(_described, value))
    return type(value), value


def _geometry(tensor: torch.Tensor) -> _Geometry:
    return tensor.shape, tensor.stride(), tensor.dtype


def _is_whole(tensor: torch.Tensor, shared: set[int]) -> bool:
    """Whether a tensor has memory of its own, as large as that of a new one of its geometry."""
    if tensor.layout != torch.strided or tensor.device.type != "meta" or tensor.is_conj():
        return False
    size, stride, dtype = _geometry(tensor)
    alike = torch.empty_strided(size, stride, dtype=dtype, device="meta")
    return bool(
        type(tensor) is torch.Tensor
        and tensor.untyped_storage()._cdata not in shared
        and tensor.storage_offset() == 0
        and tensor.untyped_storage().nbytes() == alike.untyped_storage().nbytes()
    )
