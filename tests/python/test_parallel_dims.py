"""The numbers of ranks along each dimension, and a rank's place among them."""

from __future__ import annotations

import itertools

import pytest
import torch

from castor import UsageError
from castor.runtime.parallel_dims import ONE_RANK, Dimension, ParallelDims

SOME = [
    ParallelDims(dp=dp, cp=cp, tp=tp, pp=pp, ep=ep)
    for dp, cp, tp, pp in itertools.product((2, 4, 8), (1, 3), (1, 2), (1, 2))
    for ep in (1, 2)
]


@pytest.mark.parametrize("dims", SOME)
def test_every_rank_is_in_one_group_of_each_dimension(dims: ParallelDims) -> None:
    assert dims.world_size == dims.dp * dims.cp * dims.tp * dims.pp
    sizes: dict[Dimension, int] = {
        "dp": dims.same_shard, "pp": dims.pp, "cp": dims.cp, "layers": dims.layer_shards
    }  # fmt: skip
    for dimension, size in sizes.items():
        groups = dims.groups(dimension)
        assert sorted(itertools.chain(*groups)) == list(range(dims.world_size))
        assert {len(group) for group in groups} == {size}
        assert all(group == sorted(group) for group in groups)


@pytest.mark.parametrize("dims", SOME)
def test_groups_are_rows_of_a_mesh(dims: ParallelDims) -> None:
    """The order of ranks is that of a DeviceMesh of (edp, pp, cp, tp or ep)."""
    mesh = torch.arange(dims.world_size).view(dims.edp, dims.pp, dims.cp, dims.layer_shards)
    assert dims.groups("layers") == mesh.reshape(-1, dims.layer_shards).tolist()
    assert dims.groups("cp") == mesh.transpose(2, 3).reshape(-1, dims.cp).tolist()
    assert dims.groups("pp") == mesh.permute(0, 2, 3, 1).reshape(-1, dims.pp).tolist()
    assert dims.groups("dp") == mesh.permute(1, 3, 0, 2).reshape(-1, dims.same_shard).tolist()


@pytest.mark.parametrize("dims", SOME)
def test_coordinates_are_places_in_groups(dims: ParallelDims) -> None:
    where = [dims.coordinates(rank) for rank in range(dims.world_size)]
    for dimension, found in (("pp", [one.pp for one in where]), ("cp", [one.cp for one in where])):
        for group in dims.groups(dimension):  # type: ignore[arg-type]
            assert [found[rank] for rank in group] == list(range(len(group)))
    for group in dims.groups("layers"):
        for size, found in ((dims.tp, [where[r].tp for r in group]),
                            (dims.ep, [where[r].ep for r in group])):  # fmt: skip
            assert found == (list(range(size)) if size > 1 else [0] * len(group))
    # As many ranks as train one replica take the same samples.
    samples = [one.dp for one in where]
    assert set(samples) == set(range(dims.dp))
    assert {samples.count(dp) for dp in set(samples)} == {dims.non_data_parallel_size}


def test_expert_parallel_ranks_take_data_parallel_places_without_tensor_parallelism() -> None:
    alone = ParallelDims.of_one_replica(ep=4, cp=2)
    assert (alone.dp, alone.edp, alone.ep_of_dp, alone.world_size) == (4, 1, 4, 8)
    assert [alone.coordinates(rank).dp for rank in range(8)] == [0, 1, 2, 3] * 2
    beside = ParallelDims.of_one_replica(ep=4, tp=4, cp=2)
    assert (beside.dp, beside.edp, beside.ep_of_dp, beside.world_size) == (1, 1, 1, 8)


def test_the_number_of_ranks_gives_the_data_parallel_ones() -> None:
    one = ParallelDims.of_one_replica(tp=2, pp=2)
    assert one.in_world(12) == ParallelDims(dp=3, tp=2, pp=2)
    assert ParallelDims.of_one_replica(ep=3).in_world(6).dp == 6
    assert ONE_RANK.in_world(5).dp == 5
    with pytest.raises(UsageError, match="tp_size=2, pp_size=2 needs a multiple of 4 ranks"):
        one.in_world(6)
    with pytest.raises(UsageError, match="this process is alone: start them"):
        one.in_world(1)


def test_arguments_are_those_of_the_plugin() -> None:
    dims = ParallelDims.of_one_replica(tp=2, cp=3, pp=4, ep=2)
    given = {"tp_size": 2, "ep_size": 2, "sp_size": 3, "pp_size": 4}
    assert dims.arguments() == given
    assert ParallelDims.of_arguments(given | {"activations": "keep"}) == dims
    assert ParallelDims.of_arguments({}) == ONE_RANK


def test_sizes_that_are_none() -> None:
    with pytest.raises(ValueError, match="cp is 0; give 1 or more"):
        ParallelDims(cp=0)
    with pytest.raises(TypeError, match="tp is True; give a whole number"):
        ParallelDims(tp=True)
    with pytest.raises(ValueError, match="ep=3 is neither 1 nor tp=2"):
        ParallelDims(tp=2, ep=3)
    with pytest.raises(ValueError, match="dp=2 is no multiple of ep=3"):
        ParallelDims(dp=2, ep=3)
    with pytest.raises(ValueError, match="rank 4 is none of 4 ranks"):
        ParallelDims(tp=4).coordinates(4)
