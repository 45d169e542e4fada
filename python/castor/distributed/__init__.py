"""Tensor, expert, context and pipeline parallelism."""

from castor.distributed.adapters import beneath_adapters
from castor.distributed.context_parallel import ContextParallel
from castor.distributed.expert_parallel import ExpertParallel
from castor.distributed.microbatches import (
    Accumulation,
    Asked,
    Criterion,
    Microbatches,
    Schedule,
    schedule_of,
)
from castor.distributed.parallel_groups import (
    ModelParallelGroup,
    ParallelGroups,
    data_rank_and_size,
)
from castor.distributed.pipeline_parallel import PipelineParallel
from castor.distributed.pipeline_plan import find_pipeline_plan
from castor.distributed.rank_rng import Generators
from castor.distributed.sequence_attention import Mode
from castor.distributed.shard_spec import check_blocks
from castor.distributed.tensor_parallel import TensorParallel
from castor.distributed.tensor_plan import Plan, find_plan, with_expert_parallel

__all__ = [
    "Accumulation",
    "Asked",
    "ContextParallel",
    "Criterion",
    "ExpertParallel",
    "Generators",
    "Microbatches",
    "Mode",
    "ModelParallelGroup",
    "ParallelGroups",
    "PipelineParallel",
    "Plan",
    "Schedule",
    "TensorParallel",
    "beneath_adapters",
    "check_blocks",
    "data_rank_and_size",
    "find_pipeline_plan",
    "find_plan",
    "schedule_of",
    "with_expert_parallel",
]
