"""Ranks that share key-value heads, where there are fewer heads than ranks."""

from pathlib import Path
from typing import Any

import pytest

import shared_head_cases
from adapter_cases import adam
from rank_processes import found
from shared_head_cases import CASES, COPIES, SAVED, SOME_STEPS, with_lora
from tensor_cases import LOSS, boost, plain, train

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Could not find a config file in:UserWarning"),
]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("shared_heads")
    return directory, found(shared_head_cases.shared_heads, 4, directory)


@pytest.mark.parametrize("name", list(CASES))
def test_losses_and_norms_are_plain_pytorchs(name: str, seen: Any) -> None:
    losses, norm = seen[1][name]
    alone = boost(CASES[name])
    assert losses == pytest.approx(train(CASES[name], alone, steps=SOME_STEPS), rel=LOSS)
    assert norm == pytest.approx(alone.report().gradient_norm, rel=1e-4)


@pytest.mark.parametrize("name", list(COPIES))
def test_replicas_have_one_norm(name: str, seen: Any) -> None:
    close = 1e-3 if COPIES[name] else LOSS
    expected = pytest.approx(plain(CASES[name], SOME_STEPS), rel=close)
    assert seen[1][f"{name} copies"] == expected


@pytest.mark.parametrize("name", SAVED)
def test_files_are_those_of_one_process(name: str, seen: Any, tmp_path: Path) -> None:
    alone = boost(CASES[name])
    written = seen[0] / name / f"step-{SOME_STEPS:08}"
    alone.booster.load(seen[0] / name, alone.model, alone.optimizer)
    alone.booster.save(tmp_path, alone.model, alone.optimizer)
    for part in ("model/model", "optimizer/optimizer"):
        again = tmp_path / written.name / f"{part}.safetensors"
        assert again.read_bytes() == (written / f"{part}.safetensors").read_bytes()


def test_adapters_beside_shared_heads_train_as_in_one_process(seen: Any, tmp_path: Path) -> None:
    alone = boost(with_lora(), optimizer=adam)
    losses = train(CASES["llama"], alone, steps=SOME_STEPS)
    assert seen[1]["lora"] == pytest.approx(losses, rel=LOSS)
    alone.booster.load_model(alone.model, seen[0] / "lora")
    alone.booster.save_model(alone.model, tmp_path / "lora")
    mine, theirs = (
        (path / "lora" / "adapter_model.safetensors").read_bytes() for path in (tmp_path, seen[0])
    )
    assert mine == theirs
