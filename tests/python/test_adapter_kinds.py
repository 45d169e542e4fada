"""PEFT's kinds of adapters where ranks divide a model."""

from pathlib import Path
from typing import Any

import pytest

import adapter_kind_cases
from adapter_cases import adam
from adapter_kind_cases import KINDS, STEPS
from parallel_cases import STAGES, Way, plain
from rank_processes import found
from tensor_cases import LOSS

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Could not find a config file in:UserWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning"),
]
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def in_stages(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("in_stages")
    return directory, found(adapter_kind_cases.in_stages, 2, directory)


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_trains_and_is_saved_in_stages(
    name: str, in_stages: Any, tmp_path: Path
) -> None:
    directory, losses = in_stages
    way = Way(KINDS[name], STAGES)
    assert losses[name] == pytest.approx(plain(way, adam, STEPS), rel=LOSS)
    alone = way.boost(adam, whole=True)
    # The files of one process that has these weights are the same, byte for byte.
    alone.booster.load_model(alone.model, directory / name)
    alone.booster.save_model(alone.model, tmp_path / "model")
    written = (directory / name / WEIGHTS).read_bytes()
    assert (tmp_path / "model" / WEIGHTS).read_bytes() == written
    assert (directory / f"{name} again" / WEIGHTS).read_bytes() == written
