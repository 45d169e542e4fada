"""Inputs of forwards: checks that ranks which share a batch were called with equal ones."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from castor.runtime.input_cast import as_given
from castor.runtime.rank_group import RankGroup

_PLAIN = (bool, int, float, str, type(None))


def by_name(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Returns all arguments of a call by name.

    Raises:
        TypeError: There are too many arguments, or one is given twice.
    """
    if not args:
        return kwargs
    signature = inspect.signature(function)
    # A decorator of the function may take other arguments.
    known = {name: value for name, value in kwargs.items() if name in signature.parameters}
    return signature.bind_partial(*args, **known).arguments | kwargs


def asked_of(model: nn.Module, kwargs: Mapping[str, Any], name: str, default: Any = False) -> Any:
    """Returns an option of a call to a transformers model: the argument, or else the config's."""
    given = kwargs.get(name)
    return getattr(model.config, name, default) if given is None else given


def check_inputs(
    ranks: RankGroup,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    asked: Mapping[str, Any] | None = None,
    extra: Any = None,
) -> list[Any]:
    """Checks that all ranks were called with equal inputs. Collective.

    Pre-hooks of models call it where ranks share layers or sequences. Caches are not compared,
    since each rank has its own shard of them.

    Args:
        ranks: Ranks that compute one batch.
        model: The model that is called.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        asked: Other values that have to be equal, by their names in a message.
        extra: Value that may differ; see RankGroup.check_equal.

    Returns:
        The value of `extra` of each rank, in rank order.

    Raises:
        UsageError: Ranks were given different inputs; every rank raises it.
    """
    digest = 0
    for leaf in tree_flatten((args, kwargs), is_leaf=_is_cache)[0]:
        if isinstance(leaf, _PLAIN):
            digest = zlib.crc32(repr(leaf).encode(), digest)
        if not isinstance(leaf, torch.Tensor):
            continue
        digest = zlib.crc32(repr(tuple(leaf.shape)).encode(), digest)
        values = as_given(leaf).detach().contiguous().view(-1)
        if values.numel() and not values.is_meta:  # meta: a simulated model
            digest = zlib.crc32(values.view(torch.uint8).cpu().numpy().data, digest)
    what = f"the inputs of {type(model).__name__} (ranks that shard it take one batch)"
    return ranks.check_equal({what: f"{digest:08x}"} | dict(asked or {}), extra=extra)


def check_numbers(
    numbers: torch.Tensor, count: int, what: str, *, ignored: int | None = None
) -> None:
    """Checks that all numbers are within a vocabulary.

    For another number no rank has a row, and a vocab-parallel layer would compute with zeros. On a
    GPU the host does not wait: as with PyTorch's own embedding there, the device fails an
    assertion, and a later call raises RuntimeError.

    Args:
        numbers: Numbers of tokens.
        count: Size of the vocabulary.
        what: Name of the numbers, for a message.
        ignored: Number that may occur as well; None: none.

    Raises:
        IndexError: A number is out of range, on the CPU, as with a full vocabulary in PyTorch.
    """
    if numbers.is_meta or not numbers.numel():  # a simulated model
        return
    if numbers.device.type != "cpu":
        within = (numbers >= 0) & (numbers < count)
        if ignored is not None:
            within |= numbers == ignored
        torch._assert_async(
            within.all(),
            f"{what} are not all of a vocabulary of {count} tokens; give numbers from 0 to "
            f"{count - 1}",
        )
        return
    if ignored is not None:
        numbers = numbers[numbers != ignored]
        if not numbers.numel():
            return
    least, most = (int(x) for x in numbers.aminmax())
    if least < 0 or most >= count:
        raise IndexError(
            f"{what} from {least} to {most} are not all of a vocabulary of {count} tokens; give "
            f"numbers from 0 to {count - 1}"
        )


def find_cache(given: Iterable[Any]) -> Any:
    """Returns transformers' cache of keys and values among arguments; None: there is none."""
    return next(filter(_is_cache, given), None)


def _is_cache(x: Any) -> bool:
    return hasattr(x, "get_seq_length")
