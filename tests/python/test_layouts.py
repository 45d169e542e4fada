"""Simulated layouts: a rank's part is recorded as training divides it, and plans reach plugins."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from transformers import GptOssConfig, LlamaConfig, LlamaForCausalLM, MixtralConfig, T5Config
from typer.testing import CliRunner

import grids
from castor import _C, HybridParallelPlugin
from castor.cli import app
from castor.config.event_names import GRAD_READY
from castor.config.files import ENVIRONMENT, read_plan
from castor.config.names import SPLIT_GATHER
from castor.distributed import Mode
from castor.errors import UsageError
from castor.estimate.metatrace import Sent
from castor.estimate.workload import Workload
from castor.planner.cluster import Cluster, Link
from castor.planner.layout_bounds import least_lacking
from castor.planner.layout_cost import LayoutCost
from castor.planner.layout_report import arguments_of
from castor.planner.layout_search import LayoutSearch
from castor.planner.layouts import Layout, layouts
from castor.planner.replicas import ReplicaSeconds, dram_of_replicas
from castor.planner.simulated_rank import SimulatedModel, StagePass
from castor.runtime.parallel_dims import ParallelDims
from rank_processes import run_python

BLOCKS, WIDTH, VOCAB, TOKENS = 6, 64, 512, 32
FIGURES: dict[str, Any] = {
    "ranks_per_node": 4, "device_memory": "1GiB", "host_memory": "64GiB", "h2d": "20GB/s",
    "dram": "100GB/s", "flops": "50T", "device_bandwidth": "500GB/s", "link": "100GB/s",
    "link_latency_us": 5, "transport": "nccl", "communicator_memory": "1KiB",
}  # fmt: skip


def config_file(directory: Path, **changes: Any) -> Path:
    config = LlamaConfig(
        **{
            "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH,
            "num_hidden_layers": BLOCKS, "num_attention_heads": 4, "num_key_value_heads": 4,
            "tie_word_embeddings": False, "architectures": ["LlamaForCausalLM"],
        }
        | changes
    )  # fmt: skip
    path = directory / "config.json"
    config.to_json_file(path, use_diff=False)
    return path


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return config_file(tmp_path)


def cluster(**changes: Any) -> Cluster:
    figures = {"reduce_on": "host"} | FIGURES | changes
    if figures.get("device") == "cpu":  # its ranks share memory
        del figures["transport"], figures["communicator_memory"]
    return Cluster.of(figures, "fp32")


def search(config: Path, batch: int = 8) -> LayoutSearch:
    return LayoutSearch(
        config, Workload(batch=batch, sequence=TOKENS, precision="fp32", state_format="fp32")
    )


def simulated_model(config: Path, **changes: Any) -> SimulatedModel:
    given: dict[str, Any] = {"precision": "fp32", "state_format": "fp32"}
    return SimulatedModel(config, **given | changes)


def fastest(costs: Iterable[LayoutCost]) -> list[float]:
    """The least seconds of each division, in order."""
    best: dict[Layout, float] = {}
    for cost in costs:
        division = cost.layout.division()
        best[division] = min(cost.seconds, best.get(division, cost.seconds))
    return sorted(best.values())


def recorded(
    model: SimulatedModel, rank: int = 0, ranks: int = 1, each: int = 1, **settings: Any
) -> Any:
    own = range(rank, ranks * each, ranks)
    return model.record(own, ranks * each, rows=2, sequence=TOKENS, tile=0, **settings)


# What a rank does.


def test_tensor_parallel_ranks_do_their_share_of_the_work_and_send_what_megatron_does(
    config: Path,
) -> None:
    whole = recorded(simulated_model(config)).passes[0]
    part = recorded(simulated_model(config, dims=ParallelDims(tp=2))).passes[0]
    assert part.flops == whole.flops // 2
    sums = [sent for event in part.forward for sent in event.sent if sent.operation == "all_reduce"]
    hidden = 2 * TOKENS * WIDTH * 4
    # Two of each block, and one of the embedding (Shoeybi et al. 2019, section 3).
    assert [one.num_bytes for one in sums] == [hidden] * (2 * BLOCKS + 1)


def test_context_parallel_ranks_do_their_share_of_the_work(config: Path) -> None:
    whole = recorded(simulated_model(config)).passes[0]
    part = recorded(simulated_model(config, dims=ParallelDims(cp=2))).passes[0]
    assert part.flops == pytest.approx(whole.flops / 2, rel=0.05)
    exchanged = [s for m in part.forward for s in m.sent if s.operation == "all_to_all"]
    assert len(exchanged) == 4 * BLOCKS  # queries, keys, values and what comes of them


@pytest.mark.parametrize("mode", ["all_gather", "ring_attn"])
def test_ranks_that_share_sequences_send_keys_and_values(config: Path, mode: Any) -> None:
    """Those of two ranks: gathered, or passed on, and once more in backward with their sums."""
    whole = recorded(simulated_model(config)).passes[0]
    part = recorded(simulated_model(config, dims=ParallelDims(cp=2), sequence_mode=mode)).passes[0]
    gathers = mode == "all_gather"
    # The ring leaves out what no token sees: one of the four blocks of a rank's two pieces.
    assert part.flops <= whole.flops / 2
    assert part.flops == pytest.approx(whole.flops / 2, rel=0.001 if gathers else 0.1)
    keys = 2 * TOKENS // 2 * WIDTH * 4
    operation, of_forward, of_backward = (
        ("all_gather", [keys, keys], ["all_to_all", "all_to_all"])
        if gathers
        else ("ring_shift", [2 * keys], ["ring_shift", "ring_shift", "ring_shift"])
    )
    sent = [s for m in part.forward for s in m.sent if s.operation == operation]
    assert [one.num_bytes for one in sent] == of_forward * BLOCKS
    back = [s for m in part.backward for s in m.sent]
    assert [one.operation for one in back if one.num_bytes >= keys] == of_backward * BLOCKS


def test_rings_with_dropout_are_recorded(tmp_path: Path) -> None:
    path = config_file(tmp_path, attention_dropout=0.1)
    assert (
        recorded(simulated_model(path, dims=ParallelDims(cp=2), sequence_mode="ring_attn"))
        .passes[0]
        .flops
    )


@pytest.mark.parametrize("each", [1, 3])
def test_stages_together_are_the_model(config: Path, each: int) -> None:
    model = simulated_model(config)
    whole = recorded(model)
    ranks = [recorded(model, rank, 2, each) for rank in range(2)]
    passes = [one for rank in ranks for one in rank.passes.values()]
    assert sum(one.flops for one in passes) == whole.passes[0].flops
    assert sum(rank.param_bytes for rank in ranks) == whole.param_bytes
    sent = sorted(one.sent_bytes for one in passes)
    assert sent == [0] + [2 * TOKENS * WIDTH * 4] * (2 * each - 1)
    again = recorded(model)  # all modules are back
    assert again.passes[0].flops == whole.passes[0].flops


@pytest.mark.parametrize("mode", get_args(Mode))
def test_stages_of_context_parallel_ranks_are_the_model(config: Path, mode: Any) -> None:
    """Hidden states of a rank's tokens go from stage to stage, and the loss is the last one's."""
    model = simulated_model(config, dims=ParallelDims(cp=2), sequence_mode=mode)
    whole = recorded(model).passes[0]
    passes = [one for rank in range(2) for one in recorded(model, rank, 2).passes.values()]
    assert sum(one.flops for one in passes) == whole.flops
    assert [one.sent_bytes for one in passes] == [2 * TOKENS // 2 * WIDTH * 4, 0]
    assert sum(len(exchanges(one)) for one in passes) == len(exchanges(whole))


def exchanges(one: StagePass) -> list[Sent]:
    return [sent for event in (*one.forward, *one.backward) for sent in event.sent]


def two_blocks(model: SimulatedModel, **settings: Any) -> tuple[StagePass, StagePass]:
    """The third block of the model, and it with the fourth, each a stage with others around."""
    given: dict[str, Any] = {"rows": 2, "sequence": TOKENS, "tile": 0} | settings
    return tuple(  # type: ignore[return-value]
        model.record((2,), len(layers), layers=layers, **given).passes[2]
        for layers in ([1, 1, 1, 3], [1, 1, 2, 2])
    )


@pytest.mark.parametrize(("recomputes", "more"), [(False, 5 / 4), (True, 11 / 10)])
def test_tensor_parallel_ranks_may_be_sequence_parallel(
    config: Path, recomputes: bool, more: float
) -> None:
    """A block keeps half. What it exchanges is five quarters (0048-sequence-parallelism.md).

    Where it runs again, its last sum does not; what it keeps is its input, which is gathered then.
    """
    link = Link(bytes_per_second=1e9)

    def of_a_block(**divided: Any) -> tuple[int, float]:
        """What it keeps, and seconds of what it exchanges but for gradients of norms."""
        seconds = []
        one, two = two_blocks(simulated_model(config, **divided), recomputes=recomputes)
        for passed in (one, two):
            sent = [sent for sent in exchanges(passed) if sent.num_bytes > WIDTH * 4]
            seconds.append(sum(link.collective(of.operation, of.num_bytes, 2) for of in sent))
        return two.kept_bytes - one.kept_bytes, seconds[1] - seconds[0]

    kept, _ = of_a_block()
    kept_of_layers, exchanged = of_a_block(dims=ParallelDims(tp=2))
    kept_of_tokens, exchanged_of_tokens = of_a_block(
        dims=ParallelDims(tp=2), sequence_parallel=True
    )
    random_state = 0 if recomputes else 16  # which attention keeps
    assert kept_of_tokens - random_state == (kept - random_state) / 2
    assert kept_of_layers > kept_of_tokens
    assert exchanged_of_tokens == pytest.approx(more * exchanged)


def test_stages_of_sequence_parallel_layers_are_the_model(config: Path) -> None:
    """All tokens go from stage to stage, whichever stages of the model were recorded before."""
    model = simulated_model(config, dims=ParallelDims(tp=2), sequence_parallel=True)
    whole = recorded(model).passes[0]
    for each in (1, 3):
        ranks = [recorded(model, rank, 2, each) for rank in range(2)]
        passes = [one for rank in ranks for one in rank.passes.values()]
        assert sum(one.flops for one in passes) == whole.flops
        sent = sorted(one.sent_bytes for one in passes)
        assert sent == [0] + [2 * TOKENS * WIDTH * 4] * (2 * each - 1)
        # Where a stage begins and ends tokens are gathered, in forward or backward.
        more = sum(len(exchanges(one)) for one in passes) - len(exchanges(whole))
        assert more == 2 * (2 * each - 1)
    again = recorded(model).passes[0]
    assert exchanges(again) == exchanges(whole)
    assert again.kept_bytes == whole.kept_bytes


def test_halves_of_a_backward_are_the_whole(config: Path) -> None:
    """Of a V's stages; of the first all gradients are weights', and come later."""
    model = simulated_model(config)
    for rank in range(2):
        stages = [rank, 3 - rank]
        whole = model.record(stages, 4, rows=2, sequence=TOKENS, tile=0).passes
        halves = model.record(stages, 4, rows=2, sequence=TOKENS, tile=0, splits=True).passes
        for stage in stages:
            one, two = whole[stage], halves[stage]
            assert two.flops == one.flops
            assert two.kept_bytes == one.kept_bytes
            weights, inputs = (
                sum(flops for event in moments for flops, _ in event.work)
                for moments in (two.of_weights, two.backward)
            )
            assert not one.of_weights
            if stage:
                # Products with weights are as many for inputs as for weights; attention has none.
                assert 0 < weights < inputs
                # What weights were multiplied with, and the gradients of the products.
                assert 0 < two.kept_for_weights < 2 * one.kept_bytes
            else:
                assert inputs == 0
                assert two.kept_for_weights == one.kept_bytes + one.sent_bytes  # as its gradient
            kinds = [event.kind for event in two.of_weights]
            assert kinds.count(GRAD_READY) == [m.kind for m in one.backward].count(GRAD_READY) - (
                [m.kind for m in two.backward].count(GRAD_READY)
            )


def test_recomputed_blocks_keep_their_inputs(config: Path) -> None:
    kept = recorded(simulated_model(config)).passes[0]
    again = recorded(simulated_model(config), recomputes=True).passes[0]
    assert again.kept_bytes < kept.kept_bytes / 2
    assert again.flops > kept.flops


def mixture_file(directory: Path, **changes: Any) -> Path:
    config = MixtralConfig(
        **{
            "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH,
            "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4,
            "num_local_experts": 4, "num_experts_per_tok": 2,
            "architectures": ["MixtralForCausalLM"],
        }
        | changes
    )  # fmt: skip
    path = directory / "config.json"
    config.to_json_file(path, use_diff=False)
    return path


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("count", [4, 5])
def test_experts_are_chosen_the_same_way(tmp_path: Path, count: int, precision: Any) -> None:
    """A rank has some of them, and their choices of both ranks' samples; else it does its own."""
    path = mixture_file(tmp_path, num_local_experts=count)
    whole = recorded(simulated_model(path, precision=precision))
    part = recorded(
        simulated_model(path, precision=precision, dims=ParallelDims.of_one_replica(ep=2))
    )
    own, element = -(-count // 2), 4 if precision == "fp32" else 2
    of_an_expert = 3 * WIDTH * 2 * WIDTH
    assert whole.param_bytes - part.param_bytes == 3 * (count - own) * of_an_expert * element
    choices = 2 * 2 * TOKENS
    more = -(-2 * choices * own // count) - choices
    # Three products of a choice, forward, and twice as many backward.
    assert part.passes[0].flops - whole.passes[0].flops == 3 * more * of_an_expert * 2 * 3
    # Of a rank's tokens those that choose one of an other's experts; routing weights are in fp32.
    rows = math.ceil(2 * TOKENS * (1 - math.comb(count - own, 2) / math.comb(count, 2)))
    sent = [sent for event in part.passes[0].forward for sent in event.sent]
    states = 2 * rows * WIDTH * element
    assert [(one.operation, one.num_bytes) for one in sent] == [
        ("all_to_all", states + 2 * rows * 2 * (4 + 4)), ("all_to_all", states)
    ] * 3  # fmt: skip
    assert part.settled_bytes == part.param_bytes - 3 * own * of_an_expert * element
    assert (
        whole.settled_bytes
        == recorded(simulated_model(path, dims=ParallelDims(tp=2))).settled_bytes
        == 0
    )


def test_expert_parallel_ranks_take_other_samples() -> None:
    on = cluster(ranks_per_node=4)
    some = layouts(on, batch=8, sequence=TOKENS, blocks=0, heads=4, experts=4)
    for one in some:
        takers = one.dims.dp
        assert one.rows * one.microbatches * takers == 8, one


def test_experts_are_sharded_with_layers_or_alone(tmp_path: Path) -> None:
    found = LayoutSearch(
        mixture_file(tmp_path, num_hidden_layers=2),
        Workload(batch=2, sequence=TOKENS, precision="bf16", state_format="fp32"),
    )
    on = cluster(ranks_per_node=2)
    kinds = {(one.dims.tp, one.dims.ep) for one in found.layouts(on)}
    assert kinds == {(1, 1), (2, 1), (1, 2), (2, 2)}
    shown = found.search(on, shown=100)
    every = [found.cost(layout, on) for layout in found.layouts(on)]
    assert [cost.seconds for cost in shown.fitting] == fastest(every)
    few = found.search(on, shown=3)
    assert few.fitting == shown.fitting[:3]


def test_a_rank_is_that_of_training(config: Path) -> None:
    """Its parameters are those that TensorParallel leaves on a rank: sizes, to the byte."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(config))
    whole = sum(p.numel() for p in model.parameters()) * 4
    norms = sum(p.numel() for p in model.parameters() if p.ndim == 1) * 4
    part = recorded(simulated_model(config, dims=ParallelDims(tp=2))).param_bytes
    assert part == (whole - norms) // 2 + norms


# Schedules.


@pytest.mark.parametrize(("ranks", "each", "count"), [(2, 2, 4), (4, 2, 8), (4, 3, 16), (2, 4, 2)])
def test_interleaved_order_is_torchs(ranks: int, each: int, count: int) -> None:
    """Of torch.distributed.pipelining, which runs it."""
    from torch.distributed.pipelining.schedules import _get_1f1b_rank_ops

    names = {"FORWARD": "forward", "FULL_BACKWARD": "backward"}
    turns = max(1, count // ranks)
    of_a_turn = count // turns
    for rank in range(ranks):
        ahead = min((each - 1) * of_a_turn + 2 * (ranks - 1 - rank), count * each)
        both = count * each - ahead

        def forward(step: int, rank: int = rank) -> int:
            return (step // of_a_turn) % each * ranks + rank

        def backward(step: int, rank: int = rank, ahead: int = ahead) -> int:
            return (each - 1 - (step - ahead) // of_a_turn % each) * ranks + rank

        theirs = _get_1f1b_rank_ops(each, ranks, ahead, both, ahead, rank, forward, backward)
        expected = [
            (op.stage_index, op.microbatch_index, names[op.computation_type.name])
            for op in theirs
            if op is not None
        ]
        assert _C.pipeline_order("interleaved", ranks, each, count, rank) == expected


@pytest.mark.parametrize(("ranks", "count"), [(1, 1), (2, 1), (2, 8), (3, 4), (4, 7), (4, 16)])
def test_zero_bubble_order_is_torchs(ranks: int, count: int) -> None:
    from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble

    schedule: Any = object.__new__(ScheduleZBVZeroBubble)  # of no stages: nothing is run
    schedule.pp_group_size, schedule.num_stages, schedule._n_microbatches = ranks, 2 * ranks, count
    names = {"FORWARD": "forward", "BACKWARD_INPUT": "of_inputs", "BACKWARD_WEIGHT": "of_weights"}
    for rank in range(ranks):
        expected = [
            (op.stage_index, op.microbatch_index, names[op.computation_type.name])
            for op in schedule._calculate_single_rank_operations(rank)
            if op is not None
        ]
        assert _C.pipeline_order("zbv", ranks, 2, count, rank) == expected


# Collectives and clusters.


def test_collectives_take_what_their_bytes_do() -> None:
    link = Link(bytes_per_second=1e9, latency=1e-6)
    assert link.collective("all_reduce", 1e6, 1) == 0
    assert link.collective("all_reduce", 1e6, 4) == pytest.approx(2 * (1e-6 + 0.75e-3))
    assert link.collective("all_to_all", 1e6, 4) == pytest.approx(1e-6 + 0.75e-3)
    assert link.collective("all_gather", 1e6, 4) == pytest.approx(1e-6 + 3e-3)
    assert link.collective("ring_shift", 1e6, 4) == pytest.approx(1e-6 + 1e-3)


def test_what_gpus_exchange_through_the_host_is_copied_there_and_back() -> None:
    """A rank gives what it has, and gets a sum of that size, or what all others have."""
    link = Link(bytes_per_second=1e9, d2h=10e9, h2d=20e9)
    down, up = 1e6 / 10e9, 1e6 / 20e9
    assert link.seconds(1e6) == pytest.approx(1e-3 + down + up)
    assert link.seconds_on_host(1e6) == pytest.approx(1e-3)
    assert link.collective("all_reduce", 1e6, 4) == pytest.approx(2 * 0.75e-3 + down + up)
    assert link.collective("all_to_all", 1e6, 4) == pytest.approx(0.75e-3 + down + up)
    assert link.collective("all_gather", 1e6, 4) == pytest.approx(3e-3 + down + 3 * up)
    assert link.collective("ring_shift", 1e6, 4) == pytest.approx(1e-3 + down + up)


def through_host(**changes: Any) -> Cluster:
    of_nccl = ("transport", "link", "communicator_memory")
    figures = {name: of for name, of in FIGURES.items() if name not in of_nccl}
    return Cluster.of(figures | changes, "fp32")


def test_gpus_exchange_through_host_memory_unless_asked_otherwise(config: Path) -> None:
    on = through_host()
    assert on.link.bytes_per_second == on.machine.dram / 2  # written, and read
    assert (on.link.d2h, on.link.h2d) == (20e9, 20e9)
    assert on.remark() == "Ranks exchange through host memory."
    assert "by NCCL, which has not run on several GPUs yet" in cluster().remark()
    assert cluster().replica_link == replace(cluster().link, bytes_per_second=on.machine.dram / 2)
    assert through_host(ranks_per_node=1).remark() == ""
    found = search(config)
    for layout in (
        Layout(dims=ParallelDims(tp=4), rows=8),
        Layout(dims=ParallelDims(cp=4), mode="ring_attn", rows=8),
    ):
        host, nccl = (found.cost(layout, of) for of in (on, cluster()))
        assert host.busy["exchange"] > nccl.busy["exchange"] > 0
        assert host.seconds > nccl.seconds


def test_communicators_take_memory_of_the_device(config: Path) -> None:
    """One of the tensor-parallel ranks, two of replicas where these reduce on their GPUs."""
    found = search(config)
    layout = Layout(dims=ParallelDims(tp=2, dp=2), rows=4)
    for reduce_on, count in (("host", 1), ("device", 3)):
        small, large = (
            found.cost(layout, cluster(reduce_on=reduce_on, communicator_memory=memory))
            for memory in ("8MiB", "24MiB")
        )
        assert large.device_bytes - small.device_bytes == count * (16 << 20)
    # "auto" reduces on GPUs where all of it is an eighth of their memory.
    for memory, place in (("8MiB", "device"), ("64MiB", "host")):
        auto = cluster(reduce_on="auto", communicator_memory=memory)
        assert found.cost(layout, auto).reduced_on == place


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"nodes": 0}, "nodes is 0"),
        ({"ranks_per_node": "two"}, "ranks_per_node is 'two'"),
        ({"nodes": 2}, "network is missing"),
        ({"nvlink": "300GB/s"}, "'nvlink' is nothing that castor knows"),
        ({"link_latency_us": -1}, "link_latency_us is -1"),
        ({"link": "fast"}, "link is 'fast'"),
        ({"at_once": 2}, "at_once is of ranks that compute on the host"),
        ({"device": "cpu", "at_once": 0}, "at_once is 0"),
        ({"device": "abacus"}, "unknown preset 'abacus'"),
        ({"transport": None}, "leave it out, or give transport: nccl"),
        ({"transport": "host"}, "link has no use with transport: host"),
        ({"transport": "pigeon"}, "transport is 'pigeon'; give one of host, nccl"),
        ({"reduction": "fast"}, "reduction is 'fast'; give one of ordered, backend, auto"),
        ({"reduction": "backend", "device": "cpu"}, "between GPUs: give transport: nccl as well"),
        ({"reduce_on": "gpu"}, "reduce_on is 'gpu'; give one of auto, device, host"),
        ({"reduce_on": "device", "device": "cpu"}, "exchange gradients: give transport: nccl"),
        ({"communicator_memory": "0B"}, "communicator_memory is '0B'"),
    ],
)
def test_a_cluster_that_makes_no_sense_is_named(changes: dict[str, Any], says: str) -> None:
    with pytest.raises((UsageError, ValueError), match=says):
        cluster(**changes)


def test_ranks_of_the_cpu_device_have_one_transport() -> None:
    with pytest.raises(UsageError, match="ranks of device: cpu share memory"):
        Cluster.of(FIGURES | {"device": "cpu"}, "fp32")


def test_ranks_of_a_node_share_its_host() -> None:
    machine = cluster().machine
    assert machine.host_bytes == 16 * 2**30
    assert machine.dram == 25e9


# Layouts.


def test_layouts_use_all_ranks_and_all_samples() -> None:
    found = list(layouts(cluster(nodes=2, network="10GB/s"), batch=16, sequence=TOKENS,
                         blocks=BLOCKS, heads=4))  # fmt: skip
    assert len(set(found)) == len(found)
    for one in found:
        assert one.dims.world_size == 8
        assert one.rows * one.microbatches * one.dims.edp == 16
        assert one.style in ("gpipe", "zbv") or one.microbatches >= one.dims.pp
        assert one.style != "zbv" or (one.stages_per_rank, one.activations) == (2, "keep")
    kinds = {(one.dims.tp, one.dims.cp, one.dims.pp) for one in found}
    assert {(4, 1, 2), (1, 4, 1), (2, 2, 2), (1, 2, 4), (1, 1, 4), (1, 1, 1)} <= kinds


@pytest.mark.parametrize("heads", [0, 6])
def test_heads_that_do_not_divide_are_not_sharded(heads: int) -> None:
    found = list(layouts(cluster(), batch=8, sequence=TOKENS, blocks=BLOCKS, heads=heads))
    assert {one.dims.tp for one in found} == ({1, 2} if heads else {1})
    by_heads = {one.dims.tp * one.dims.cp for one in found if one.mode == "all_to_all"}
    assert by_heads == ({1, 2} if heads else {1})
    modes = {one.mode for one in found if one.dims.cp == 4}
    assert modes == ({"all_gather", "ring_attn"} if heads else set())


def test_sequence_parallel_ranks_shard_tokens_evenly_and_nothing_else() -> None:
    for sequence, sizes in ((TOKENS, {2, 4}), (30, {2}), (31, set())):
        found = layouts(cluster(), batch=8, sequence=sequence, blocks=BLOCKS, heads=4, experts=4)
        of = [one for one in found if one.sequence_parallel]
        assert {one.dims.tp for one in of} == sizes
        assert {one.dims.cp for one in of} <= {1}
        assert {one.dims.ep == one.dims.tp for one in of} == ({True, False} if of else set())


def test_rings_need_two_pieces_of_a_sequence_each() -> None:
    found = list(layouts(cluster(), batch=8, sequence=20, blocks=BLOCKS, heads=4))
    of = {(one.dims.cp, one.mode) for one in found if one.dims.cp > 1}
    assert of == {(4, "all_to_all"), (4, "all_gather"), *((2, mode) for mode in get_args(Mode))}


def test_each_layout_makes_a_plugin() -> None:
    for one in layouts(cluster(), batch=8, sequence=TOKENS, blocks=BLOCKS, heads=4):
        HybridParallelPlugin(**one.arguments(), device="cpu", device_memory="64MiB")


# Costs.


def test_more_ranks_take_less_time_and_memory(config: Path) -> None:
    found = search(config)
    on = cluster(link_latency_us=0, link="1000GB/s", dram="8000GB/s")
    one = found.cost(Layout(rows=8), replace(on, ranks_per_node=1))
    for layout in (
        Layout(dims=ParallelDims(tp=2), rows=8),
        Layout(dims=ParallelDims(pp=2), microbatches=4, rows=2),
        Layout(dims=ParallelDims(dp=2), rows=4),
        Layout(dims=ParallelDims(cp=2), rows=8),
    ):
        cost = found.cost(layout, on)
        assert cost.seconds < one.seconds
        assert cost.host_bytes < one.host_bytes


def test_a_slower_link_takes_longer_where_ranks_exchange(config: Path) -> None:
    found = search(config)
    layout = Layout(dims=ParallelDims(tp=2), rows=8)
    fast, slow = (found.cost(layout, cluster(link=link)) for link in ("100GB/s", "1GB/s"))
    assert slow.seconds > fast.seconds
    assert slow.bound == "exchange"
    assert slow.device_bytes == fast.device_bytes


def test_what_is_passed_on_in_a_ring_travels_while_ranks_compute(config: Path) -> None:
    """But on the host, where both need the same processors; and not more than computing takes."""
    found = search(config)
    layout = Layout(dims=ParallelDims(cp=4), mode="ring_attn", rows=8)

    def exchange(**changes: Any) -> float:
        return found.cost(layout, cluster(link_latency_us=0, **changes)).busy["exchange"]

    # Sums for the loss are waited for; keys and values are not.
    hidden, slow = exchange(link="1000GB/s"), exchange(link="10MB/s")
    on_host = exchange(link="1000GB/s", device="cpu")
    assert hidden < on_host / 100
    assert slow > 1000 * on_host


@pytest.mark.parametrize(
    ("gradients", "weights", "forward", "exposed"),
    [
        (4.0, 0.0, 4.0, 1.0),  # the last of four chunks
        (8.0, 0.0, 4.0, 2.0),  # as quick as backward, for the last chunk
        (12.0, 0.0, 4.0, 6.0),  # they are reduced one after the other, from the first on
        (0.0, 4.0, 4.0, 1.0),  # the first chunk is waited for
        (0.0, 8.0, 4.0, 5.0),  # each is, and the last one's modules run then
        (0.0, 4.0, 0.0, 4.0),  # before the forward
        (0.0, 0.0, 4.0, 0.0),
    ],
)
def test_what_computing_does_not_hide_of_exchanges_is_exposed(
    gradients: float, weights: float, forward: float, exposed: float
) -> None:
    seconds = ReplicaSeconds(gradients=gradients, weights=weights)
    found = seconds.exposed(backward=8.0, forward=forward, chunks=4)
    assert found == pytest.approx(exposed)


def test_ordered_sums_on_gpus_cost_what_a_backends_cost(config: Path) -> None:
    """The bytes of both are those of a ring. "auto" takes an eighth of device_memory at most."""
    found = search(config)
    layout = Layout(dims=ParallelDims(dp=8), rows=1)
    buffers = found._rank(layout, 0, 2**60, 8).simulator.gradient_buffer_bytes
    least = 8 * ((16 << 20) + buffers + 2 * (1 << 10))  # two communicators
    for memory, auto in ((least, "device"), (least - 8, "host")):
        on = {"ranks_per_node": 8, "device_memory": memory}
        backend, on_gpus, on_host, chosen = (
            found.cost(layout, cluster(**on, **how))
            for how in (
                {"reduction": "backend"}, {"reduce_on": "device"}, {}, {"reduce_on": "auto"},
            )
        )  # fmt: skip
        assert replace(on_gpus, reduction="backend") == backend
        assert on_gpus.exposed < on_host.exposed
        assert (on_gpus.reduced_on, on_host.reduced_on) == ("device", "host")
        assert chosen == (on_gpus if auto == "device" else on_host)
        assert arguments_of(on_gpus, cluster(reduce_on="device"))["reduce_on"] == "device"
        assert "reduce_on" not in arguments_of(chosen, cluster(reduce_on="auto"))


def test_a_backends_sums_of_replicas_are_hidden_and_planned(config: Path) -> None:
    found = search(config)
    layout = Layout(dims=ParallelDims(dp=4), rows=2)
    ordered, backend = (
        found.cost(layout, cluster(dram="16GB/s", reduction=of)) for of in ("ordered", "backend")
    )
    assert 0 < backend.exposed < ordered.exposed / 2
    assert backend.seconds < ordered.seconds
    assert backend.exposed_share == backend.exposed / backend.seconds
    assert ordered.exposed == ordered.busy["exchange"] + ordered.busy["reduce"]
    assert arguments_of(backend, cluster(reduction="backend"))["reduction"] == "backend"
    assert "reduction" not in arguments_of(ordered, cluster())
    nodes = {"nodes": 2, "ranks_per_node": 2, "network": "1GB/s"}  # through the hosts either way
    apart, same = (found.cost(layout, cluster(**nodes, reduction=of)).exposed
                   for of in ("ordered", "backend"))  # fmt: skip
    assert apart == same


@pytest.mark.parametrize(
    ("reduction", "resident", "gigabytes"),
    [
        ("ordered", 0.0, 9.0),  # 8 GB read of eight gradients, 1 GB of means written
        ("backend", 0.0, 0.0),  # reduced on the GPUs, before they go to the host
        ("ordered", 1.0, 33.0),  # gradients down, read and their means up, weights in and out: 4 P
        ("backend", 1.0, 1.0),  # a shard of the weights
        ("ordered", 0.5, 21.0),
        ("backend", 0.5, 0.5),
    ],
)
def test_what_replicas_of_8_gpus_move_through_host_memory(
    reduction: str, resident: float, gigabytes: float
) -> None:
    on = cluster(ranks_per_node=8, reduction=reduction)
    layout = Layout(dims=ParallelDims(dp=8))
    assert dram_of_replicas(layout, on, int(8e9), resident) == pytest.approx(gigabytes * 1e9)
    alone = Layout(dims=ParallelDims(tp=8))
    assert dram_of_replicas(alone, on, int(8e9), resident) == 0


def test_sums_of_several_micro_batches_come_from_the_host() -> None:
    """8 GB to the GPU, and 1 GB of means back, where one micro-batch is reduced before that."""
    on = cluster(ranks_per_node=16, reduction="backend")
    several = Layout(dims=ParallelDims(dp=8, pp=2), microbatches=4)
    assert dram_of_replicas(several, on, int(8e9), 0.0) == pytest.approx(9e9)


def test_of_gradients_that_gpus_reduce_a_shard_goes_to_the_host(config: Path) -> None:
    """Of P a rank P / 8, and none is read there to be added up: 2 P less than in order.

    But for the weights of the buffers' size that are fetched again.
    """
    found = search(config)
    layout = Layout(dims=ParallelDims(dp=8), rows=1)
    on = {"ranks_per_node": 8, "updates": "1TB/s"}
    backend = cluster(**on, reduction="backend")
    least = found.cost(layout, backend).device_bytes
    ordered, reduced = (
        found.cost(layout, cluster(**on, device_memory=least, reduction=of)).dram_bytes
        for of in ("ordered", "backend")
    )
    weights = 4 * found.parameters  # fp32
    assert 1.75 * weights <= (ordered - reduced) / 8 <= 2 * weights
    # Down once or twice, an eighth of gradients to the host, Adam and the norm as above.
    assert (1 + 1 / 8 + 28 / 4 / 8) * weights <= reduced / 8
    assert reduced / 8 <= (2 + 1 / 8 + 28 / 4 / 8 + 1) * weights


def test_host_memory_is_a_wall_for_8_gpus(config: Path) -> None:
    """Of resident chunks 33 P pass in order, P by the backend; of streamed ones copies and Adam."""
    found = search(config)
    layout = Layout(dims=ParallelDims(dp=8), rows=1)
    weights = 4 * found.parameters  # fp32
    of_8 = {"ranks_per_node": 8, "dram": "8GB/s", "link_latency_us": 0}
    for reduction, passed in (("ordered", 33), ("backend", 1)):
        cost = found.cost(layout, cluster(**of_8, reduction=reduction))
        assert cost.dram_bytes == pytest.approx(passed * weights)
        assert cost.dram_seconds == pytest.approx(passed * weights / 8e9)
        # Ordered sums come behind the passes, and have their own time; the others run beside.
        others = sum(cost.busy.values()) - cost.busy["dram"]
        wall = cost.dram_seconds if reduction == "backend" else 0.0
        assert cost.seconds == pytest.approx(max(others, wall))
    least = found.cost(layout, cluster(**of_8)).device_bytes
    tight = of_8 | {"device_memory": least, "h2d": "100GB/s", "d2h": "100GB/s", "flops": "1000T"}
    fast, slow = (
        found.cost(layout, cluster(**tight | {"dram": dram, "updates": "1TB/s"}))
        for dram in ("10TB/s", "1GB/s")
    )
    assert fast.dram_bytes == slow.dram_bytes
    # Down once or twice, gradients to the host, 28 bytes of Adam and 4 of the norm by shards.
    beside = slow.dram_bytes / 8 - 9 / 8 * weights
    assert (1 + 1 + 28 / 4 / 8) * weights <= beside <= (2 + 1 + 28 / 4 / 8 + 1) * weights
    assert (fast.busy["dram"], fast.bound == "dram") == (0, False)
    wall = 8 * beside / 1e9
    assert slow.seconds == pytest.approx(wall + slow.busy["reduce"])
    assert slow.busy["dram"] > fast.seconds
    assert sum(slow.busy.values()) == pytest.approx(slow.seconds)
    assert slow.bound == "dram"


@pytest.mark.slow
def test_the_reduction_that_is_faster_is_planned(config: Path) -> None:
    """Host memory that 8 GPUs share decides against their link."""
    found = search(config)
    layout = Layout(dims=ParallelDims(dp=8), rows=1)
    for link, dram, chosen in (
        ("100GB/s", "16GB/s", "backend"), ("1MB/s", "160GB/s", "ordered"),
    ):  # fmt: skip
        on = {"ranks_per_node": 8, "link": link, "dram": dram}
        of_each = {
            of: found.cost(layout, cluster(**on, reduction=of)) for of in ("ordered", "backend")
        }
        planned = cluster(**on, reduction="auto")
        cost = found.cost(layout, planned)
        assert cost == min(of_each.values(), key=lambda one: one.seconds)
        assert cost.reduction == chosen
        assert arguments_of(cost, planned).get("reduction", "ordered") == chosen
        fastest = found.search(planned, shown=1).fitting[0]
        assert fastest.seconds <= cost.seconds


def test_who_waits_leaves_processors_to_others(config: Path) -> None:
    """Twice the ranks on as many processors take no less time, and bubbles cost nothing there."""
    found = search(config)
    layout = Layout(dims=ParallelDims(pp=2), microbatches=2, rows=4)
    own, shared, one = (
        found.cost(layout, cluster(device="cpu", ranks_per_node=ranks, at_once=at_once))
        for ranks, at_once in ((2, 2), (2, 1), (1, 1))
    )
    assert own.busy["bubble"] > 0
    assert own.busy["processors"] == 0
    assert own.seconds < shared.seconds < 2 * own.seconds
    assert shared.seconds >= own.seconds + shared.busy["processors"] * 0.99
    assert one.busy["processors"] == 0


def test_who_waits_for_a_sum_leaves_processors_to_others(config: Path) -> None:
    """What a sum takes to begin is no work: on shared processors others compute meanwhile."""
    found = search(config)
    layout = Layout(dims=ParallelDims(dp=2, tp=2), rows=4)
    on = {"device": "cpu", "ranks_per_node": 4, "link": "1GB/s"}
    soon, late = (
        found.cost(layout, cluster(at_once=2, link_latency_us=latency, **on))
        for latency in (0, 0.1)
    )
    assert soon.busy["processors"] > 0
    waits = late.busy["exchange"] - soon.busy["exchange"]
    # Gradients are reduced once, whoever waits.
    assert 0 <= late.seconds - soon.seconds < 0.1 * waits
    alone = found.cost(layout, cluster(link_latency_us=0.1, **on))
    assert alone.seconds > found.cost(layout, cluster(link_latency_us=0, **on)).seconds


def test_machines_exchange_sums_means_and_parts(config: Path) -> None:
    """On two of two ranks each half of the weights crosses as sums or means, and a quarter new."""
    found = search(config)
    layout = Layout(dims=ParallelDims(dp=4), rows=2)
    on = {"device": "cpu", "link_latency_us": 0, "network_latency_us": 0, "link": "1GB/s"}
    one, two, four = (
        found.cost(layout, cluster(nodes=nodes, ranks_per_node=4 // nodes, network="1GB/s", **on))
        for nodes in (1, 2, 4)
    )
    weights = one.busy["reduce"] / (3 / 4)  # that each reads of the others, once
    assert two.busy["reduce"] == pytest.approx((1 / 2 + 1 / 2 + 1 / 4) * weights)
    assert four.busy["reduce"] == pytest.approx(3 * 3 / 4 * weights)
    assert one.host_bytes < two.host_bytes < four.host_bytes


def test_gpus_of_one_machine_have_weights_and_gradients_once(config: Path) -> None:
    """Those of several have their own, and exchange all there is; states are in shards on both."""
    found = search(config)
    layout = Layout(dims=ParallelDims(dp=4), rows=2)
    on = {"dram": "16GB/s", "network": "1GB/s", "network_latency_us": 0, "link_latency_us": 0}
    alone = found.cost(Layout(rows=8), cluster(ranks_per_node=1))
    one, two = (
        found.cost(layout, cluster(nodes=nodes, ranks_per_node=4 // nodes, **on))
        for nodes in (1, 2)
    )
    weights = alone.host_bytes / 4  # fp32, with gradients and two states
    window, pages = 2**20, 2**18
    assert 0 <= one.host_bytes - 4 * weights / 4 <= window + pages
    assert 0 <= two.host_bytes - (2 + 2 / 4) * weights <= window + pages
    each = 1e9  # of memory that four ranks write and read, each 2e9 bytes a second
    assert one.busy["reduce"] == pytest.approx(3 / 4 * weights / (2 * each), rel=1e-3)
    assert two.busy["reduce"] == pytest.approx(3 * 3 / 4 * weights / each, rel=1e-3)


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[LayoutSearch, list[LayoutCost]]:
    """A search, and what each layout takes on NARROW."""
    file = config_file(tmp_path_factory.mktemp("model"), num_hidden_layers=4)
    found = search(file, batch=4)
    return found, [found.cost(layout, NARROW) for layout in found.layouts(NARROW)]


SHORT: dict[str, Any] = {
    "device_memory": "700KiB", "ranks_per_node": 4 if grids.WHOLE else 2,
}  # fmt: skip
NARROW = cluster(**SHORT)


def test_a_zero_bubble_waits_less_and_keeps_more(config: Path) -> None:
    found = search(config)
    folded, interleaved = (
        found.cost(
            Layout(dims=ParallelDims(pp=2), microbatches=4, rows=2, style=style, stages_per_rank=2),  # type: ignore[arg-type]
            cluster(),
        )
        for style in ("zbv", "interleaved")
    )
    assert folded.busy["bubble"] < interleaved.busy["bubble"]
    assert folded.busy["compute"] == pytest.approx(interleaved.busy["compute"], rel=0.3)
    assert folded.device_bytes > interleaved.device_bytes


@pytest.mark.slow
def test_the_search_finds_what_comparing_all_does(
    compared: tuple[LayoutSearch, list[LayoutCost]],
) -> None:
    """Bounds leave out no layout that is among the fastest."""
    found, every = compared
    fitting = [cost for cost in every if cost.fits(NARROW.machine)]
    simulated: list[int] = []
    shown = found.search(NARROW, shown=4, told=lambda done, _: simulated.append(done))
    assert len(simulated) < len(every) / 2
    assert [cost.seconds for cost in shown.fitting] == fastest(fitting)[:4]
    assert len(fitting) < len(every)
    assert {cost.layout.mode for cost in every} == set(get_args(Mode))
    assert any(cost.layout.sequence_parallel for cost in every)
    assert {cost.layout.style for cost in every} >= {"1f1b", "interleaved", "zbv"}


def test_no_layout_takes_less_than_its_bounds(
    compared: tuple[LayoutSearch, list[LayoutCost]],
) -> None:
    found, every = compared
    slow = cluster(**SHORT, link="1GB/s", device_bandwidth="5000GB/s")
    for cost in every:
        layout = cost.layout
        for on, seconds in ((NARROW, cost.seconds), (slow, found.cost(layout, slow).seconds)):
            for like in (layout.undivided(), layout):
                bounds = [*found._bound(like, layout, on), *found._own_bound(layout, on)]
                assert all(bound <= seconds for bound in bounds), layout
                assert bounds or not cost.fits(on.machine)


@pytest.mark.whole
def test_where_no_host_has_room_those_that_lack_least_are_found_soon(
    compared: tuple[LayoutSearch, list[LayoutCost]],
) -> None:
    """Without bounds of what hosts lack every layout was recorded, for minutes."""
    found, every = compared
    host_bytes = min(cost.host_bytes for cost in every) // 2
    on = cluster(**SHORT, host_memory=NARROW.ranks_per_node * host_bytes)
    costs = [cost for cost in every if [*found._own_bound(cost.layout, on)]]
    for cost in costs:
        least = least_lacking(found._divided(cost.layout, cost.layout, on))
        assert least <= cost.lacking(on.machine), cost.layout
    simulated: list[int] = []
    shown = found.search(on, shown=4, told=lambda done, _: simulated.append(done))
    assert not shown.fitting
    lacking: dict[Layout, int] = {}
    for cost in costs:
        lacks, division = cost.lacking(on.machine), cost.layout.division()
        lacking[division] = min(lacks, lacking.get(division, lacks))
    assert len({cost.layout.division() for cost in shown.others}) == 4
    for cost, lacks in zip(shown.others, sorted(lacking.values()), strict=False):
        assert lacks <= cost.lacking(on.machine) <= 1.05 * lacks
    assert len(simulated) < len(every) / 2


@pytest.mark.slow
def test_bounds_have_copies_of_chunks_and_leave_out_no_layout_that_is_faster(
    tmp_path: Path,
) -> None:
    """Where weights and gradients come and go, and blocks are larger than the largest chunk."""
    file = config_file(tmp_path, hidden_size=4096, intermediate_size=16384, num_attention_heads=2,
                       num_key_value_heads=2, num_hidden_layers=4)  # fmt: skip
    workload = Workload(batch=2, sequence=2048, precision="bf16")
    found = LayoutSearch(file, workload)
    on = cluster(ranks_per_node=2, device_memory="3GiB", flops="400T",
                 device_bandwidth="3000GB/s", dram="2000GB/s")  # fmt: skip
    costs = (found.cost(layout, on) for layout in found.layouts(on))
    fitting = [cost for cost in costs if cost.fits(on.machine)]
    tightened = 0
    for cost in fitting:
        layout = cost.layout
        (plain,), (own,) = found._bound(layout, layout, on), found._own_bound(layout, on)
        assert plain <= own <= cost.seconds, layout
        tightened += own > 1.02 * plain
    assert tightened > 10
    simulated: list[int] = []
    again = LayoutSearch(file, workload)
    shown = again.search(on, shown=2, told=lambda done, _: simulated.append(done))
    assert [cost.seconds for cost in shown.fitting] == fastest(fitting)[:2]
    assert shown.fitting == [found.cost(cost.layout, on) for cost in shown.fitting]
    assert len(again._ranks) < len(found._ranks)


def test_what_attention_refuses_is_said(tmp_path: Path) -> None:
    """Sinks have a value for each head, which ranks that exchange heads do not divide."""
    settings = {
        "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": WIDTH, "head_dim": 16,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4,
        "num_local_experts": 4, "num_experts_per_tok": 2,
    }  # fmt: skip
    path = tmp_path / "config.json"
    config = GptOssConfig(**settings, architectures=["GptOssForCausalLM"])
    config._attn_implementation = "eager"
    config.to_json_file(path, use_diff=False)
    workload = Workload(batch=1, sequence=TOKENS, precision="bf16", state_format="fp32")
    found = LayoutSearch(path, workload).search(cluster(ranks_per_node=2), shown=100)
    assert "a value for each head (s_aux)" in found.refused["sequences among 2 (all_to_all)"]
    modes = {cost.layout.mode for cost in found.fitting if cost.layout.dims.cp > 1}
    assert modes == {"all_gather", "ring_attn"}


def test_models_whose_blocks_castor_does_not_know_have_no_sequence_parallel_layouts(
    tmp_path: Path,
) -> None:
    sizes = {"d_model": WIDTH, "d_kv": 16, "d_ff": WIDTH, "num_layers": 2, "num_heads": 4}
    path = tmp_path / "config.json"
    T5Config(**sizes, vocab_size=VOCAB, architectures=["T5ForConditionalGeneration"]).to_json_file(
        path, use_diff=False
    )
    found = search(path, batch=1).search(cluster(ranks_per_node=2), shown=9)
    assert "no row of blocks of a T5" in found.refused["layers among 2 (split_gather)"]
    assert any(cost.layout.dims.tp == 2 for cost in found.fitting)
    assert not any(cost.layout.sequence_parallel for cost in found.fitting)


def test_what_a_model_does_not_take_is_said(tmp_path: Path) -> None:
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3}
    path = config_file(tmp_path, hidden_size=96, num_hidden_layers=2, **heads)
    found = search(path, batch=4).search(cluster(ranks_per_node=2))
    assert "layers among 2" in found.refused
    assert all(cost.layout.dims.tp == 1 for cost in found.fitting)


def test_ranks_that_share_a_key_value_head_are_a_layout(tmp_path: Path) -> None:
    path = config_file(tmp_path, num_attention_heads=4, num_key_value_heads=1, num_hidden_layers=2)
    found = search(path, batch=4).search(cluster(ranks_per_node=2))
    assert "layers among 2" not in found.refused


def test_a_batch_that_cannot_be_divided_is_named(tmp_path: Path) -> None:
    path = config_file(tmp_path, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1)
    workload = Workload(batch=3, sequence=31, precision="fp32", state_format="fp32")
    with pytest.raises(UsageError, match="3 samples cannot be sharded over 4 ranks"):
        LayoutSearch(path, workload).search(cluster())


# Plans.


def run_plan(config: Path, directory: Path, *more: str, **changes: Any) -> Any:
    """On two ranks: few layouts, so that a search takes a second."""
    described = directory / "cluster.json"
    described.write_text(json.dumps(FIGURES | {"ranks_per_node": 2} | changes))
    asked = ["plan", str(config), "--cluster", str(described), "--batch", "4", "--seq", str(TOKENS),
             "--precision", "fp32", *more]  # fmt: skip
    return CliRunner().invoke(app, asked)


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of a model of two blocks."""
    return config_file(tmp_path_factory.mktemp("short"), num_hidden_layers=2)


@pytest.fixture(scope="module")
def plan_file(short: Path) -> Path:
    """What `castor plan --output` writes."""
    file = short.with_name("plan.json")
    done = run_plan(short, short.parent, "--output", str(file))
    assert done.exit_code == 0, done.output
    assert "layouts; a rank has" in done.output
    return file


def test_a_plan_reaches_the_plugin(plan_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = plan_file
    plan = read_plan(file)
    assert plan["ranks_per_node"] == 2
    monkeypatch.setenv(ENVIRONMENT, str(file))
    expected = HybridParallelPlugin(**plan["layout"], device="cpu", device_memory="64MiB")
    for given in ("auto", file):
        plugin = HybridParallelPlugin(given, device="cpu", device_memory="64MiB")
        assert plugin._parallel_config == expected._parallel_config
        assert plugin.config.activations == plan["layout"]["activations"]


def test_figures_as_json(short: Path, tmp_path: Path) -> None:
    done = run_plan(short, tmp_path, "--json", "--shown", "2")
    figures = json.loads(done.output)
    assert len(figures["fitting"]) == 2
    assert figures["fitting"][0]["step_time_s"] <= figures["fitting"][1]["step_time_s"]


def test_where_nothing_fits_the_least_need_is_shown(short: Path, tmp_path: Path) -> None:
    done = run_plan(short, tmp_path, device_memory="50KiB")
    assert done.exit_code == 1
    assert "No layout fits" in done.output


def test_how_context_parallel_ranks_communicate_is_shown(short: Path, tmp_path: Path) -> None:
    asked = ("--shown", "20", "--batch", "1")
    done = run_plan(short, tmp_path, *asked)
    assert done.exit_code == 0, done.output
    assert all(mode in done.output for mode in (*get_args(Mode), SPLIT_GATHER))
    figures = json.loads(run_plan(short, tmp_path, *asked, "--json").output)
    arguments = [one["arguments"] for one in figures["fitting"]]
    of_modes = [one.get("sequence_parallelism_mode") for one in arguments if one["sp_size"] > 1]
    assert set(of_modes) == set(get_args(Mode))
    tokens = [one for one in arguments if one.get("sequence_parallelism_mode") == SPLIT_GATHER]
    assert {(one["tp_size"], one["sp_size"]) for one in tokens} == {(2, 1)}


def test_auto_without_a_plan_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    with pytest.raises(UsageError, match=r"castor run --plan FILE.*castor plan CONFIG"):
        HybridParallelPlugin("auto")


def test_what_a_plan_says_is_not_given_twice(plan_file: Path) -> None:
    file = plan_file
    with pytest.raises(ValueError, match="tp_size is given beside a plan"):
        HybridParallelPlugin(file, tp_size=8)
    with pytest.raises(ValueError, match="ep_size is given beside a plan"):
        HybridParallelPlugin(file, ep_size=2)
    with pytest.raises(ValueError, match="sequence_parallelism_mode is given beside a plan"):
        HybridParallelPlugin(file, sequence_parallelism_mode="ring_attn")
    with pytest.raises(ValueError, match="activations is given beside a plan"):
        HybridParallelPlugin(file, activations="keep")


@pytest.mark.parametrize("text", ["[]", '{"layout": 3}', '{"layout": {"zp_size": 2}}',
                                  '{"layout": {}, "nodes": 1}'])  # fmt: skip
def test_another_file_is_no_plan(tmp_path: Path, text: str) -> None:
    file = tmp_path / "plan.json"
    file.write_text(text)
    with pytest.raises(UsageError, match="plan"):
        HybridParallelPlugin(file)


def test_run_takes_the_ranks_of_a_plan(plan_file: Path, tmp_path: Path) -> None:
    file, script = plan_file, tmp_path / "script.py"
    script.write_text(
        "import os\n"
        f"assert os.environ[{ENVIRONMENT!r}] == {str(file)!r}\n"
        "if os.environ['RANK'] == '1':  # imports take 5 s\n"
        "    from castor import HybridParallelPlugin\n"
        "    HybridParallelPlugin('auto', device='cpu', device_memory='64MiB')\n"
        f"open({str(tmp_path)!r} + '/rank' + os.environ['RANK'], 'w').write('done')\n"
    )
    command = ("-m", "castor", "run", "--plan", file)
    done = run_python(*command, script, timeout=120)
    assert done.returncode == 0, done.stderr
    assert sorted(one.name for one in tmp_path.glob("rank*")) == ["rank0", "rank1"]
    refused = run_python(*command, "--nproc", "4", script, timeout=60)
    assert refused.returncode != 0
    assert "--nproc is 4" in refused.stderr
    assert "is for 2" in refused.stderr
