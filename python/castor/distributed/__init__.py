"""Layers and sequences that several ranks divide among themselves."""

from castor.distributed.layout import RankLayout, data_rank_and_size
from castor.distributed.sequence_parallel import SequenceParallel
from castor.distributed.tensor_parallel import TensorParallel
from castor.distributed.tensor_plan import Plan, find_plan
from castor.distributed.tensor_ranks import TensorRanks

__all__ = [
    "Plan",
    "RankLayout",
    "SequenceParallel",
    "TensorParallel",
    "TensorRanks",
    "data_rank_and_size",
    "find_plan",
]
