"""Converts Adam's state between its storage formats and float32."""

from __future__ import annotations

from typing import Any, get_args

import torch

from castor import _C
from castor.config import StateFormat

STATE_FORMATS: tuple[str, ...] = get_args(StateFormat)
"""Names of the formats, with 12, 10, 6 and 4 bytes a bf16 parameter (docs/design/0012)."""

_MOMENT_TYPES = {
    "fp32": torch.float32,
    "split": torch.float32,
    "split_bf16": torch.bfloat16,
    "split_int8": torch.uint8,
}
ROUNDING_FORMATS = frozenset({"split_bf16", "split_int8"})
"""Formats whose moments are rounded stochastically, by a seed."""

_MOMENTS = ("exp_avg", "exp_avg_sq")
_OWN = frozenset({"remainder", "scales"})
"""Entries that only the split formats have, and torch's layout does not."""


def new_state(param: torch.Tensor, state_format: str) -> dict[str, torch.Tensor]:
    """Makes the state of a bf16 parameter before its first update, in a split format.

    Returns:
        remainder (int16), exp_avg and exp_avg_sq (of the format's type), all of the parameter's
        shape and strides; for split_int8 scales, float32 of shape (blocks, 2).
    """
    state = {"remainder": _C.zero_state_like(param, torch.int16)}
    for key in _MOMENTS:
        state[key] = _C.zero_state_like(param, _MOMENT_TYPES[state_format])
    if state_format == "split_int8":
        num_blocks = -(-param.numel() // _C.MOMENT_BLOCK)
        state["scales"] = torch.zeros(num_blocks, 2)
    return state


def to_portable(param: torch.Tensor, state: dict[str, Any]) -> dict[str, Any]:
    """Converts a parameter's state to the layout of torch.optim.AdamW.

    Args:
        param: The parameter, of any type.
        state: Its state in any format, or its entries from a file.

    Returns:
        exp_avg and exp_avg_sq as float32; "master", the float32 weight, if the state has one; all
        other entries as they were. "scales" stay, and convert the moments back bit for bit.
    """
    portable = {key: value for key, value in state.items() if key != "remainder"}
    if "remainder" in state:
        remainder = _as(state["remainder"], param, torch.int16)
        portable["master"] = _C.join_master(param.detach().to(remainder.device), remainder)
    if all(key in state for key in _MOMENTS):
        exp_avg, exp_avg_sq = (state[key] for key in _MOMENTS)
        if exp_avg.dtype == torch.uint8:
            exp_avg, exp_avg_sq = _C.load_moments(
                "split_int8",
                _as(exp_avg, param, torch.uint8),
                _as(exp_avg_sq, param, torch.uint8),
                state["scales"].contiguous(),
            )
        portable["exp_avg"], portable["exp_avg_sq"] = exp_avg.float(), exp_avg_sq.float()
    return portable


def from_portable(param: torch.Tensor, state: dict[str, Any], state_format: str) -> dict[str, Any]:
    """Converts a parameter's state from the layout of torch.optim.AdamW to a format.

    The parameter itself is the upper half of its master, and is not written: load the model too, in
    any order.

    Args:
        param: The parameter.
        state: A state of to_portable, or torch's; any entry may be missing.
        state_format: One of STATE_FORMATS.

    Returns:
        Copies; no entry shares memory with `state`.

    Raises:
        ValueError: exp_avg_sq has a negative element.
    """
    own = {
        key: value.detach().clone() if isinstance(value, torch.Tensor) else value
        for key, value in state.items()
        if key not in _OWN and key != "master" and key not in _MOMENTS
    }
    moments = {key: _as(state[key], param, torch.float32) for key in _MOMENTS if key in state}
    master = _as(state["master"], param, torch.float32) if "master" in state else None
    if state_format == "fp32":
        return own | moments | ({} if master is None else {"master": master})
    if master is None and len(moments) < len(_MOMENTS):
        return own
    fresh = new_state(param, state_format)
    if master is not None:
        fresh["remainder"] = _C.split_master(master)
    if len(moments) == len(_MOMENTS):
        scales = fresh.get("scales")
        if scales is not None and "scales" in state:
            scales.copy_(state["scales"])
        _C.store_moments(
            state_format,
            fresh["exp_avg"],
            fresh["exp_avg_sq"],
            scales,
            moments["exp_avg"],
            moments["exp_avg_sq"],
        )
    return own | fresh


def fill_rounded(
    param: torch.Tensor,
    states: dict[str, torch.Tensor],
    portable: dict[str, Any],
    state_format: str,
) -> None:
    """Fills the states of a format that rounds from torch's layout, or with zeros.

    Args:
        param: The parameter.
        states: States to write: exp_avg and exp_avg_sq, and with split_int8 "scales".
        portable: A state of to_portable; any entry may be missing.
        state_format: One of ROUNDING_FORMATS.

    Raises:
        ValueError: exp_avg_sq has a negative element.
    """
    if not any(name in portable for name in _MOMENTS):
        for state in states.values():
            state.zero_()
        return
    exact = [
        torch.empty_like(param, dtype=torch.float32, device="cpu").copy_(portable[name])
        if name in portable
        else torch.zeros_like(param, dtype=torch.float32, device="cpu")
        for name in _MOMENTS
    ]
    scales = states.get("scales")
    if scales is not None:
        if "scales" in portable:
            scales.copy_(portable["scales"])
        else:
            scales.zero_()  # no scales to keep
    exp_avg, exp_avg_sq = (states[name] for name in _MOMENTS)
    _C.store_moments(state_format, exp_avg, exp_avg_sq, scales, exact[0], exact[1])


def _as(value: torch.Tensor, param: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Copies values into the parameter's shape and strides, on the device of the values."""
    return torch.empty_like(param, dtype=dtype, device=value.device).copy_(value)
