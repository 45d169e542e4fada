"""transformers' weight conversions of a model, which determine the names in its files.

transformers is never imported here: a model of its classes has imported it already.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from castor.runtime.peft_model import is_peft_model

LOADING = "transformers.core_model_loading"
"""The module of transformers that has the conversions; version 4 has none."""


@dataclass(frozen=True, kw_only=True)
class FileLayout:
    """The facts of a full model that save_pretrained needs besides its tensors."""

    transforms: Sequence[Any] | None
    """transformers' WeightTransforms, from files to the model; None: there are none."""
    num_parameters: int
    """Number of elements of all parameters, for the index of a checkpoint in several files."""
    left_out: Sequence[str]
    """Keys of the state_dict that no file has."""


def is_transformers_model(model: nn.Module) -> bool:
    """Whether save_pretrained of transformers writes the full model; False for a PeftModel."""
    modeling: Any = sys.modules.get("transformers.modeling_utils")
    return (
        modeling is not None
        and isinstance(model, modeling.PreTrainedModel)
        and not is_peft_model(model)
    )


def file_layout(model: nn.Module, num_parameters: int | None = None) -> FileLayout | None:
    """Returns the layout of a model's files; None: the model is not one of transformers.

    Args:
        model: Model with all of its layers; parameters may be sharded.
        num_parameters: Number of elements of the full parameters, if they are sharded.
    """
    if not is_transformers_model(model):
        return None
    if num_parameters is None:
        num_parameters = sum(param.numel() for param in model.parameters())
    ignored: Any = getattr(model, "_keys_to_ignore_on_save", None)
    return FileLayout(
        transforms=_transforms_of(model),
        num_parameters=num_parameters,
        left_out=tuple(ignored or ()),
    )


def _transforms_of(model: Any) -> list[Any] | None:
    """Returns the conversions that from_pretrained has used, or else those of the model's class.

    revert_weight_conversion takes the latter for a model that was not loaded from files.
    """
    loading: Any = sys.modules.get(LOADING)
    if not hasattr(loading, "revert_weight_conversion"):
        return None
    used = getattr(model, "_weight_conversions", None)
    if used is not None:
        return list(used)
    mapping: Any = sys.modules["transformers.conversion_mapping"]
    known = mapping.get_model_conversion_mapping(model, add_legacy=False)
    return [one for one in known if not isinstance(one, loading.PrefixChange)] or None
