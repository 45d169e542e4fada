"""Logits in tiles where ranks divide the vocabulary; moments in blocks where they divide all."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import parallel_cases
from castor import _C
from castor.distributed.shard_spec import ShardSpec
from parallel_cases import IN_BLOCKS, INT8, STEPS, TILED, adam
from rank_processes import found, of_sizes
from tensor_cases import LOSS
from test_sharded_rules import assert_same_files


@pytest.fixture(scope="module")
def tiled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return of_sizes(parallel_cases.tiles, tmp_path_factory)


@pytest.mark.parametrize("name", TILED)
def test_losses_in_tiles_are_plain_pytorchs(name: str, tiled: Any) -> None:
    way = TILED[name]
    losses, expected = tiled(way.ranks)[name]
    assert losses == pytest.approx(expected, rel=LOSS)
    assert max(tiled(way.ranks)[f"{name}, tiles"]) > 1  # of a stage with the output embedding
    in_one, whole = tiled(way.ranks)[f"{name}, one tile"]
    assert in_one == pytest.approx(whole, rel=1e-6)


def test_tiles_are_close_in_reduced_precision(tiled: Any) -> None:
    in_tiles, whole = tiled(2)["bf16"]
    assert in_tiles == pytest.approx(whole, rel=1e-3)


def test_a_rank_never_has_all_rows_of_its_logits(tiled: Any) -> None:
    rows, columns = 8 * 24, 8192 // 2
    assert tiled(2)["peak 8"] < tiled(2)["peak False"] - 4 * (rows - 8) * columns


@pytest.fixture(scope="module")
def in_blocks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def of(size: int) -> tuple[Path, Any]:
        directory = tmp_path_factory.mktemp(f"int8-{size}")
        return directory, found(parallel_cases.int8, size, directory)

    return of


@pytest.mark.parametrize("name", IN_BLOCKS)
def test_sharded_moments_of_8_bits(name: str, in_blocks: Any, tmp_path: Path) -> None:
    way = IN_BLOCKS[name]
    directory, seen = in_blocks(way.ranks)
    losses, expected = seen[name]
    assert losses == pytest.approx(expected, rel=5e-3)
    alone = way.boost(adam, whole=True, **INT8)
    assert alone.booster.load(directory / name, alone.model, alone.optimizer).step == STEPS
    alone.booster.save(tmp_path / "again", alone.model, alone.optimizer)
    assert_same_files(tmp_path / "again", directory / name)


def test_shards_that_are_no_full_blocks_are_named(in_blocks: Any) -> None:
    for said in in_blocks(2)[1]["narrow"]:
        assert said.startswith("NotImplementedError: optim_state_format='split_int8' rounds")
        assert "'model.layers.0.self_attn.q_proj.weight' on 2 ranks, (24, 48) of (48, 48)" in said


SHAPES = (
    *(((6, 256), 0), ((9, 256), 0), ((6, 1536), 1), ((6, 1530), 1), ((7, 200), 0)),
    *(((2, 9, 512), 1), ((3, 128), 0), ((256 * 7,), 0), ((4, 1024, 3), 1)),
)
CUTS = [
    (shape, dim, pieces, size)
    for shape, dim in SHAPES
    for pieces in (1, 3)
    for size in (2, 3, 4)
    if shape[dim] % pieces == 0 and shape[dim] // pieces >= size
]


@pytest.mark.parametrize(("shape", "dim", "pieces", "size"), CUTS)
def test_blocks_of_a_shard_are_those_of_the_full_tensor(
    shape: tuple[int, ...], dim: int, pieces: int, size: int
) -> None:
    numel = torch.Size(shape).numel()
    numbers = torch.arange(numel).view(shape)
    cut = ShardSpec(dim=dim, shape=shape, pieces=pieces)
    parts = [cut.local_shard(numbers, rank, size).flatten() for rank in range(size)]
    whole = all(
        (block % _C.MOMENT_BLOCK).equal(torch.arange(len(block)))
        and bool((block.diff() == 1).all())
        and (len(block) == _C.MOMENT_BLOCK or block[-1] == numel - 1)
        for part in parts
        for block in part.split(_C.MOMENT_BLOCK)
    )
    pieces_of = torch.arange(cut.length_of_piece).tensor_split(size)
    ranges = [range(int(own[0]), int(own[-1]) + 1) for own in pieces_of]
    found = [cut.blocks_of(own) for own in ranges]
    assert all(blocks is not None for blocks in found) == whole
    if whole:
        scales = torch.randn((-(-numel // _C.MOMENT_BLOCK), 2))
        joined = torch.full_like(scales, torch.nan)
        for own, part, blocks in zip(ranges, parts, found, strict=True):
            assert blocks is not None
            assert blocks.equal(part[:: _C.MOMENT_BLOCK] // _C.MOMENT_BLOCK)
            begin = 0
            values = scales[blocks].flatten()
            runs = cut.runs(own).in_blocks(_C.MOMENT_BLOCK, width=2)
            for place, count in runs.of(0, len(values)):
                joined.view(-1)[place : place + count] = values[begin : begin + count]
                begin += count
        assert joined.equal(scales)
