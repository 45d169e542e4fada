"""LoRA of PEFT where ranks divide layers, experts, sequences and stages."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

import adapter_cases
from adapter_cases import WAYS, adam
from rank_processes import found
from tensor_cases import LOSS, STEPS

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Could not find a config file in:UserWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning"),
]


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def of(size: int) -> tuple[Path, Any]:
        directory = tmp_path_factory.mktemp(f"adapters{size}")
        return directory, found(adapter_cases.trained, size, directory)

    return of


@pytest.mark.parametrize("name", WAYS)
def test_losses_are_plain_pytorchs(name: str, divided: Any) -> None:
    losses, expected = divided(WAYS[name].ranks)[1][name]
    assert losses == pytest.approx(expected, rel=LOSS)


@pytest.mark.parametrize("name", WAYS)
def test_files_are_those_of_one_process(name: str, divided: Any, tmp_path: Path) -> None:
    way = WAYS[name]
    directory, _ = divided(way.ranks)
    alone = way.boost(adam, whole=True)
    run = directory / name
    assert alone.booster.load(run, alone.model, alone.optimizer).step == STEPS
    alone.booster.save(tmp_path / "run", alone.model, alone.optimizer)
    alone.booster.save_model(alone.model, tmp_path / "model")
    step = f"step-{STEPS:08d}"
    for mine, theirs in (
        (directory / f"{name}-model", tmp_path / "model"),
        (run / step / "model", tmp_path / "run" / step / "model"),
        (run / step / "optimizer", tmp_path / "run" / step / "optimizer"),
    ):
        files = sorted(path.name for path in theirs.glob("*.safetensors"))
        assert files
        for file in files:
            assert (mine / file).read_bytes() == (theirs / file).read_bytes()


def test_ranks_drop_out_alike_what_all_have_and_their_own_parts_apart(tmp_path: Path) -> None:
    seen = found(adapter_cases.masks, 2, tmp_path)
    width, own_heads, own_units = 48, 24, 48
    # In front of q, k, v and o, gate, up and down of each of two blocks.
    assert seen["widths"] == 2 * [width, width, width, own_heads, width, width, own_units]
    assert seen["alike"] == 2 * [True, True, True, False, True, True, False]
    assert seen["same state"]
    kept, recomputed = seen["losses"]
    assert kept == recomputed


REFUSED = {
    "tokens": "split_gather",
    "dora": "use_dora=False",
    "embedding": "target_modules",
    "copied": "modules_to_save",
    "prompts": "prompts",
}


def test_what_ranks_cannot_shard_is_named(tmp_path: Path) -> None:
    said = found(adapter_cases.refused, 2, tmp_path)
    assert said.keys() == REFUSED.keys()
    for name, words in REFUSED.items():
        assert len(said[name]) == 2
        for message in said[name]:
            assert message.startswith("NotImplementedError"), message
            assert words in message
