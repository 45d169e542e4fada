"""Checks that ranks which compute one batch were called with equal inputs."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from castor.runtime.ranks import Peers

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
    # Of others a decorator of the function may know.
    known = {name: value for name, value in kwargs.items() if name in signature.parameters}
    return signature.bind_partial(*args, **known).arguments | kwargs


def asked_of(model: nn.Module, kwargs: Mapping[str, Any], name: str, default: Any = False) -> Any:
    """Returns an option of a call of transformers' model: the argument's, or else the config's."""
    given = kwargs.get(name)
    return getattr(model.config, name, default) if given is None else given


def check_inputs(
    ranks: Peers,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    asked: Mapping[str, Any] | None = None,
    beside: Any = None,
) -> list[Any]:
    """Ranks that share layers or sequences compute one batch. Collective; a pre-hook of the model.

    Caches are left out, of which each has its part.

    Args:
        ranks: Those that do.
        model: That is called.
        args: Of the call.
        kwargs: Of the call.
        asked: What else has to be the same, by its name in a message.
        beside: See Peers.check_equal.

    Returns:
        What every rank gives `beside`, in rank order.

    Raises:
        UsageError: They were given different ones; every rank raises it.
    """
    digest = 0
    for leaf in tree_flatten((args, kwargs), is_leaf=_is_cache)[0]:
        if isinstance(leaf, _PLAIN):
            digest = zlib.crc32(repr(leaf).encode(), digest)
        if not isinstance(leaf, torch.Tensor):
            continue
        digest = zlib.crc32(repr(tuple(leaf.shape)).encode(), digest)
        values = leaf.detach().contiguous().view(-1)
        if values.numel() and not values.is_meta:  # meta: a simulated model
            digest = zlib.crc32(values.view(torch.uint8).cpu().numpy().data, digest)
    what = f"the inputs of {type(model).__name__} (ranks that divide it take one batch)"
    return ranks.check_equal({what: f"{digest:08x}"} | dict(asked or {}), beside=beside)


def check_numbers(numbers: torch.Tensor, count: int, what: str) -> None:
    """All are of a vocabulary: of another one no rank has a row, and zeros would be computed with.

    Args:
        numbers: Of tokens.
        count: How many there are.
        what: They are, for a message.

    Raises:
        IndexError: As where the vocabulary is whole.
    """
    if numbers.is_meta or not numbers.numel():  # a simulated model
        return
    least, most = (int(x) for x in numbers.aminmax())
    if least < 0 or most >= count:
        raise IndexError(
            f"{what} from {least} to {most} are not all of a vocabulary of {count} tokens; give "
            f"numbers from 0 to {count - 1}"
        )


def find_cache(given: Iterable[Any]) -> Any:
    """Transformers' cache of keys and values among arguments; None: there is none."""
    return next(filter(_is_cache, given), None)


def _is_cache(x: Any) -> bool:
    return hasattr(x, "get_seq_length")
