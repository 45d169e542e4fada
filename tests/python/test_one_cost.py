"""castor estimate, castor plan and castor scaling give the same step the same seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from castor.estimate import Estimator, Workload, machine
from castor.planner.cluster import Cluster
from castor.planner.data_parallel import estimate_ranks
from castor.planner.layout_search import LayoutSearch
from castor.planner.layouts import Layout, LayoutActivations
from castor.planner.scaling import scaling
from castor.runtime.parallel_dims import ParallelDims
from estimating import SMALL, write

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}
T5: dict[str, Any] = {
    "model_type": "t5",
    "architectures": ["T5ForConditionalGeneration"],
    "vocab_size": 512,
    "d_model": 128,
    "d_ff": 256,
    "d_kv": 16,
    "num_heads": 8,
    "num_layers": 4,
}
MODELS = {"gpt2": SMALL | {"n_embd": 256}, "llama": LLAMA, "t5": T5}
GPU = {"device": "rtx3090", "device_memory": "16MiB"}
MACHINES: dict[str, dict[str, Any]] = {
    "cpu": {
        "device": "cpu", "device_memory": "16MiB", "host_memory": "1GiB", "dram": "40GB/s",
        "flops": "200G",
    },
    "rtx3090": GPU,
    "states on NVMe": GPU | {"host_memory": "40MiB", "nvme": "3GB/s"},
    "weights on NVMe": GPU | {"host_memory": "12MiB", "nvme": "3GB/s"},
}  # fmt: skip


def workload(batch: int, **changes: Any) -> Workload:
    return Workload(batch=batch, sequence=64, **changes)


def cluster(ranks: int, figures: dict[str, Any]) -> Cluster:
    settings = {"ranks_per_node": ranks, **figures}
    if "nvme" in figures:
        settings["nvme_path"] = "."
    if figures["device"] == "cpu" and ranks > 1:
        settings["link"] = "10GB/s"
    return Cluster.of(settings, "bf16")


@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("on", MACHINES)
@pytest.mark.parametrize("model", MODELS)
def test_a_step_on_one_rank_costs_the_same(
    model: str, on: str, activations: LayoutActivations, tmp_path: Path
) -> None:
    config, figures = write(tmp_path, MODELS[model]), MACHINES[on]
    of_step = workload(2, activations=activations)
    estimator = Estimator(config, of_step)
    of_rank = cluster(1, figures)
    given = {k: v for k, v in figures.items() if k != "device"}
    assert machine(figures["device"], **given) == of_rank.machine
    estimated = estimator.simulate(estimator.step(2), of_rank.machine)
    planned = LayoutSearch(config, of_step).cost(Layout(rows=2, activations=activations), of_rank)
    assert planned.seconds == pytest.approx(estimated["step_seconds"], rel=1e-9)
    for name, needed in (
        ("device_bytes", estimated["smallest_budget_bytes"]),
        ("host_bytes", estimated["host_bytes"]),
        ("nvme_bytes", estimated["nvme_bytes"]),
        ("nvme_weight_bytes", estimated["nvme_weight_bytes"]),
    ):
        assert getattr(planned, name) == needed, name
    assert sum(planned.busy.values()) == pytest.approx(planned.seconds)


@pytest.mark.parametrize("ranks", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("on", ["cpu", "rtx3090"])
def test_replicas_cost_what_a_plan_and_a_curve_of_scaling_say(
    on: str, ranks: int, tmp_path: Path
) -> None:
    few_layouts = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    config, of_ranks = write(tmp_path, LLAMA | few_layouts), cluster(ranks, MACHINES[on])
    search = LayoutSearch(config, workload(ranks))
    replicas = Layout(dims=ParallelDims(dp=ranks))
    for cost in (search.cost(replicas, of_ranks), *search.search(of_ranks).fitting):
        if cost.layout.dims == replicas.dims and cost.layout.microbatches == 1:
            of_each = workload(cost.layout.rows, activations=cost.layout.activations)
            assert estimate_ranks(config, of_each, of_ranks).step_time_s == cost.seconds
    point = scaling(search, of_ranks, most=ranks).weak[-1]
    assert point.ranks == ranks
    assert point.cost == search.search(of_ranks).fitting[0]


@pytest.mark.parametrize("on", ["rtx3090", "states on NVMe"])
def test_updates_beside_the_first_forward_delay_a_step_once(on: str, tmp_path: Path) -> None:
    """More micro-batches take as many more seconds as with updates after all passes."""
    config, of_rank = write(tmp_path, LLAMA), cluster(1, MACHINES[on])

    def of_more(**changes: Any) -> float:
        search = LayoutSearch(config, workload(16, **changes))
        few, many = (search.cost(Layout(microbatches=count), of_rank) for count in (2, 16))
        return many.seconds - few.seconds

    assert of_more() == pytest.approx(of_more(overlap="none"))
