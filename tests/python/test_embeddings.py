"""gather_embeddings: forward looks rows up on the host, and nothing brings the other rows in."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import castor
from castor.runtime.engine import engine_of
from helpers import (
    Boosted,
    assert_boost_fails,
    assert_equal,
    boost,
    exact_state,
    param_bytes,
    train_on,
)
from simulated import Simulation
from zoo import CASES

CHUNK = 4096


def embedding_bytes(model: nn.Module) -> int:
    return sum(
        param_bytes(module) for module in model.modules() if isinstance(module, nn.Embedding)
    )


def trained(boosted: Boosted, name: str) -> list[Any]:
    return [*train_on(boosted, CASES[name], steps=4), *exact_state(boosted)]


def assert_same(actual: list[Any], expected: list[Any]) -> None:
    tensors = [torch.as_tensor(value) for value in actual]
    assert_equal(tensors, [torch.as_tensor(value) for value in expected])


@pytest.mark.parametrize("overlap", ["none", "forward", "backward"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "opt", "bert"])
def test_same_bits(name: str, overlap: str) -> None:
    settings: dict[str, Any] = {"overlap": overlap, "chunk_bytes": CHUNK}
    if overlap == "backward":
        settings |= {"enable_gradient_accumulation": False, "nonfinite": "ignore"}
    expected = trained(boost(CASES[name].model(), **settings), name)
    gathering = boost(CASES[name].model(), 2**21, gather_embeddings=True, **settings)
    assert_same(trained(gathering, name), expected)


@pytest.mark.parametrize("state_format", ["fp32", "split", "split_int8"])
def test_same_bits_in_bf16_and_inside_a_tight_budget(state_format: str) -> None:
    settings: dict[str, Any] = {
        "precision": "bf16",
        "optim_state_format": state_format,
        "max_norm": 1.0,
        "chunk_bytes": CHUNK,
    }
    expected = trained(boost(CASES["llama"].model(), **settings), "llama")
    ample = boost(CASES["llama"].model(), gather_embeddings=True, **settings)
    train_on(ample, CASES["llama"], steps=2)
    tight = ample.report().peak_nonmodel_bytes + 4 * CHUNK * 6
    gathering = boost(CASES["llama"].model(), tight, gather_embeddings=True, **settings)
    assert_same(trained(gathering, "llama"), expected)
    assert gathering.report().evictions > 0


@pytest.mark.parametrize("overlap", ["none", "forward"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_same_bits_on_a_simulated_device(simulated: Simulation, name: str, overlap: str) -> None:
    settings: dict[str, Any] = {"overlap": overlap, "chunk_bytes": CHUNK, "max_norm": 1.0}
    reference = boost(CASES[name].model(), **settings)
    losses = train_on(reference, CASES[name])
    boosted = simulated.boost(CASES[name].model(), 2**22, gather_embeddings=True, **settings)
    assert train_on(boosted, CASES[name]) == losses
    assert_equal(simulated.state(boosted), simulated.state(reference))


def test_same_bits_with_everything_on_nvme(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"chunk_bytes": CHUNK}
    reference = boost(CASES["llama"].model(), **settings)
    losses = train_on(reference, CASES["llama"])
    host = reference.report().host_bytes // 3
    boosted = boost(
        CASES["llama"].model(),
        gather_embeddings=True,
        host_memory=host,
        nvme_path=tmp_path,
        **settings,
    )
    assert train_on(boosted, CASES["llama"]) == losses
    assert boosted.report().nvme_weight_bytes > 0


@pytest.mark.parametrize("policy", ["auto", "cpu"])
def test_the_embedding_never_comes_to_the_device(policy: str) -> None:
    def moved(**settings: Any) -> int:
        model = CASES["llama"].model()
        boosted = boost(model, chunk_bytes=CHUNK, placement_policy=policy, **settings)
        train_on(boosted, CASES["llama"], steps=2)
        return boosted.report().h2d_bytes

    saved = moved() - moved(gather_embeddings=True)
    assert saved > 0
    assert saved % embedding_bytes(CASES["llama"].model()) == 0
    model = CASES["llama"].model()
    boosted = boost(model, gather_embeddings=True, chunk_bytes=CHUNK, placement_policy=policy)
    train_on(boosted, CASES["llama"], steps=6)
    engine = engine_of(model)
    tiers_of = {
        tuple(engine.names[i] for i in chunk["params"]): {t for t, _ in chunk["payloads"].values()}
        for chunk in engine.session.chunks()
    }
    assert tiers_of.pop(("model.embed_tokens.weight",)) == {"host"}
    assert set.union(*tiers_of.values()) == ({"device"} if policy == "auto" else {"host"})


def test_a_frozen_embedding_larger_than_the_device() -> None:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(20_000, 32)
            self.words.weight.requires_grad_(False)
            self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.words(tokens)
            for layer in self.layers:
                x = x + torch.tanh(layer(x))
            return x.square().mean()

    def model() -> nn.Module:
        torch.manual_seed(0)
        return Classifier()

    memory = 2**20
    assert embedding_bytes(model()) > 2 * memory
    with pytest.raises(castor.OutOfMemoryError, match="'words'"):
        boost(model(), memory)
    tokens = torch.randint(0, 20_000, (4, 8), generator=torch.Generator().manual_seed(1))
    expected, actual = [], []
    for losses, boosted in (
        (expected, boost(model())),
        (actual, boost(model(), memory, gather_embeddings=True)),
    ):
        losses += [boosted.step(boosted.model(tokens)) for _ in range(4)]
    assert actual == expected
    assert boosted.report().peak_device_bytes <= memory


def test_rows_that_user_code_writes_are_looked_up() -> None:
    results = []
    for gather in (False, True):
        model = CASES["llama"].model()
        boosted = boost(model, gather_embeddings=gather, overlap="forward")
        losses = train_on(boosted, CASES["llama"], steps=2)
        with torch.no_grad():
            model.model.embed_tokens.weight[5].fill_(0.5)
            model.model.embed_tokens.weight.mul_(0.9)
        results.append([*losses, *trained(boosted, "llama")])
    assert_same(results[1], results[0])


def test_refusals() -> None:
    assert_boost_fails(castor.UsageError, "Tower has no module with", gather_embeddings=True)
    for policy in ("cuda", "static"):
        with pytest.raises(ValueError, match="placement_policy='" + policy):
            castor.GeminiPlugin(device="cpu", gather_embeddings=True, placement_policy=policy)
    with pytest.raises(TypeError, match="give True or False"):
        castor.GeminiPlugin(device="cpu", gather_embeddings=1)  # type: ignore[arg-type]
