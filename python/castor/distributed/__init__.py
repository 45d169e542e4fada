"""Parts of a model on several ranks: tensor parallelism."""

from castor.distributed.layout import RankLayout, data_rank_and_size
from castor.distributed.tensor_parallel import TensorParallel
from castor.distributed.tensor_plan import Plan, find_plan
from castor.distributed.tensor_ranks import TensorRanks

__all__ = [
    "Plan",
    "RankLayout",
    "TensorParallel",
    "TensorRanks",
    "data_rank_and_size",
    "find_plan",
]
