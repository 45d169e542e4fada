"""A model that is born lazily on NVMe takes no more than the budgets, however large it is."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import born_on_nvme
from castor import LazyInitContext
from castor.lazy import Materialisation

PARAMETERS = sum(
    p.numel() for p in born_on_nvme.LlamaForCausalLM(born_on_nvme.config()).to("meta").parameters()
)
LARGEST = born_on_nvme.VOCABULARY * born_on_nvme.WIDTH
SLACK = 48 * 2**20  # of Python and the allocators


def born(folder: Path, building: str) -> dict[str, Any]:
    command = [sys.executable, str(Path(born_on_nvme.__file__)), str(folder), building]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    "building", [pytest.param("config", marks=pytest.mark.whole), "bf16", "from_pretrained"]
)
def test_a_model_born_on_nvme_takes_no_more_than_the_budgets(building: str, tmp_path: Path) -> None:
    eager = born_on_nvme.build("bf16" if building == "bf16" else "config", tmp_path)
    if building == "from_pretrained":
        eager.save_pretrained(tmp_path / "pretrained", max_shard_size="20MB")
        torch.manual_seed(3)
    found = born(tmp_path, building)
    assert found["nvme_weight_bytes"] >= 2 * 2 * PARAMETERS  # all weights and gradients
    bound = born_on_nvme.HOST_MEMORY + 3 * 4 * LARGEST + SLACK
    assert bound < 4 * PARAMETERS, "the fp32 values alone have to be more"
    assert found["peak_bytes"] <= bound
    for name, param in eager.named_parameters():
        expected = hashlib.sha256(param.detach().float().numpy().tobytes()).hexdigest()
        assert found["checksums"][name] == expected, name
    assert found["next_random"] == torch.rand(3).tolist()


# --- what a run of the recorded operations holds ------------------------------------------------


class TwiceInitialised(torch.nn.Module):
    """As transformers does: each layer when it is made, and all of them at the end."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(layers))
        self.register_buffer("scale", torch.ones(4))
        with torch.no_grad():
            for layer in self.layers:
                layer.weight.normal_(0, 0.02)
                layer.bias.zero_()
            self.layers[0].weight[3].uniform_()  # in part: keeps the rest
            self.scale.mul_(self.layers[1].weight.sum())


def test_a_parameter_is_finished_before_the_next_is_made() -> None:
    torch.manual_seed(0)
    with LazyInitContext():
        model = TwiceInitialised(8)
    alive: list[int] = []
    held: set[int] = set()

    def finish(param: torch.nn.Parameter, values: torch.Tensor) -> None:
        held.discard(id(param))
        alive.append(len(held))
        param.data = values.clone()

    def place(param: torch.nn.Parameter, dtype: torch.dtype) -> torch.Tensor:
        held.add(id(param))
        return torch.empty(param.shape, dtype=dtype)

    Materialisation(model).run(place, finish)
    torch.manual_seed(0)
    eager = TwiceInitialised(8)
    for name, value in eager.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    assert len(alive) == 16
    # Those of the two layers that something is done to in the end; all others come one by one.
    assert max(alive) <= 4
