"""Names of choices, and the known name that an unknown one probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Literal

# --- Suggests the known name that an unknown one probably meant -----------------------------------


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns ": did you mean 'OTHER'?", or nothing where no known name is like the given one.

    Args:
        name: An unknown name.
        known: The names that there are.
    """
    alike = difflib.get_close_matches(name.replace("-", "_").lower(), list(known), n=1)
    return f": did you mean {alike[0]!r}?" if alike else ""


# --- Names of choices, as users write them and as castor._C takes and gives them ------------------

# tests/python/test_config.py compares them with the C++ enums (csrc/python/names.h). The names of a
# trace's events are in event_names.py.

PlacementPolicy = Literal["auto", "cpu", "cuda", "static"]
Precision = Literal["fp32", "bf16", "fp16"]
ScalarType = Literal["float32", "bfloat16", "float16"]
Reduction = Literal["ordered", "backend"]
ReduceOn = Literal["auto", "device", "host"]
ReducedOn = Literal["device", "host"]
Overlap = Literal["none", "forward", "backward"]
NonFinite = Literal["skip", "raise", "ignore"]
StateFormat = Literal["fp32", "split", "split_bf16", "split_int8"]
TileLogits = Literal["auto"] | bool | int
UpdateFraction = Literal["auto"] | float
GatherExperts = Literal["auto"] | bool
PipelineStyle = Literal["1f1b", "gpipe", "interleaved", "zbv"]
PipelinePass = Literal["forward", "backward", "of_inputs", "of_weights"]
"""A pass of a micro-batch in a stage; the last two are the halves of a backward."""
SPLIT_GATHER = "split_gather"
"""The sequence_parallelism_mode that shards the tokens between tensor-parallel layers."""
NUMBERS_OF_TOKENS = ("max_position_embeddings", "n_positions", "max_sequence_length")
"""Names by which configs of transformers say how many tokens a sample has at most."""
ZeroStage = Literal["auto", 1, 2, 3]
Activations = str | Mapping[str, str]
LoadedWeights = Literal["none", "some", "all"]

SCALAR_TYPES: dict[Precision, ScalarType] = {
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
}
"""Types of the parameters, by precision."""
