"""SGD and Lion where ranks divide layers, experts, sequences and stages."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

import parallel_cases
from parallel_cases import RULED, RULES, STEPS
from rank_processes import found
from tensor_cases import LOSS

FILES = ("model/model", "optimizer/optimizer")
CASES = [(way, rule) for way in RULED for rule in RULES]


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def of(size: int) -> tuple[Path, Any]:
        directory = tmp_path_factory.mktemp(f"rules{size}")
        return directory, found(parallel_cases.rules, size, directory)

    return of


@pytest.mark.parametrize(("name", "rule"), CASES)
def test_losses_are_plain_pytorchs(name: str, rule: str, divided: Any) -> None:
    losses, expected = divided(RULED[name].ranks)[1][f"{name}: {rule}"]
    # Lion steps by signs: a sum in another order moves a weight the other way.
    assert losses == pytest.approx(expected, rel=1e-4 if rule == "lion" else LOSS)


@pytest.mark.parametrize("name", RULED)
def test_files_are_those_of_one_process(name: str, divided: Any, tmp_path: Path) -> None:
    way = RULED[name]
    directory, _ = divided(way.ranks)
    for rule in ("momentum", "lion"):
        alone = way.boost(RULES[rule], whole=True)
        run = directory / f"{name}-{rule}"
        assert alone.booster.load(run, alone.model, alone.optimizer).step == STEPS
        alone.booster.save(tmp_path / rule, alone.model, alone.optimizer)
        assert_same_files(tmp_path / rule, run)


@pytest.mark.parametrize("size", sorted({way.ranks for way in RULED.values()}))
def test_a_run_of_one_process_goes_on_sharded(size: int, tmp_path: Path) -> None:
    ways = {name: way for name, way in RULED.items() if way.ranks == size}
    for name, way in ways.items():
        for rule in ("momentum", "lion"):
            alone = way.boost(RULES[rule], whole=True)
            for step in range(STEPS):
                for part in way.batches(step)[:1]:
                    alone.step(way.case.loss(alone.model(**part), part))
            alone.booster.save(tmp_path / f"one-{name}-{rule}", alone.model, alone.optimizer)
    losses = found(parallel_cases.rules_loaded, size, tmp_path)
    for name in ways:
        for rule in ("momentum", "lion"):
            assert len(losses[f"{name}: {rule}"]) == 2
            first, again = (tmp_path / f"{of}-{name}-{rule}" for of in ("one", "again"))
            assert_same_files(again, first)


def assert_same_files(written: Path, expected: Path) -> None:
    for part in FILES:
        first, second = (
            (run / f"step-{STEPS:08d}" / f"{part}.safetensors").read_bytes()
            for run in (written, expected)
        )
        assert first == second
