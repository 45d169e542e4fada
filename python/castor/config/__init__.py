"""Settings, units, and the memory that castor finds on the machine."""

from castor.config.block_choice import BlockChoice, offloads
from castor.config.names import (
    SCALAR_TYPES,
    Activations,
    NonFinite,
    Overlap,
    PlacementPolicy,
    Precision,
    StateFormat,
    TileLogits,
    ZeroStage,
    did_you_mean,
)
from castor.config.settings import (
    ChunkArguments,
    GeminiArguments,
    GeminiConfig,
    LossScalerConfig,
    check_format_of_precision,
)
from castor.config.units import parse_bandwidth, parse_bytes, parse_paths

__all__ = [
    "SCALAR_TYPES",
    "Activations",
    "BlockChoice",
    "ChunkArguments",
    "GeminiArguments",
    "GeminiConfig",
    "LossScalerConfig",
    "NonFinite",
    "Overlap",
    "PlacementPolicy",
    "Precision",
    "StateFormat",
    "TileLogits",
    "ZeroStage",
    "check_format_of_precision",
    "did_you_mean",
    "offloads",
    "parse_bandwidth",
    "parse_bytes",
    "parse_paths",
]
