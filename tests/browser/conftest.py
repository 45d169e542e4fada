"""A headless Chromium, and pages to look at with it."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import castor
from chromium import Chromium, find

GIB = 2**30


class Chain(nn.Module):
    """Residual linear layers; with token ids it embeds them and returns its loss."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = x + layer(x) / len(self.layers)
        return {"loss": x.square().mean()}


class Silent(nn.Module):
    """Tells neither tokens nor a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def run(
    model: nn.Module, batch: torch.Tensor, steps: int, memory: int, **settings: object
) -> nn.Module:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plugin = castor.GeminiPlugin(device="cpu", device_memory=memory, host_memory=GIB, **settings)
    castor.Booster(plugin=plugin).boost(model, optimizer)
    for _ in range(steps):
        output = model(batch)
        loss = output["loss"] if isinstance(output, dict) else output.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Reports by name: streaming, many chunks, a long step, one silent step."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("pages")
    ids = torch.randint(64, (2, 8))
    layer = 4 * (48 * 48 + 48)
    models = {
        "streaming": run(Chain(12, 48), ids, 6, 6 * layer, chunk_bytes=layer + 64),
        "chunks": run(Chain(399, 16), ids, 2, 2**20, chunk_bytes=1152),
        "long": run(Chain(6700, 4), ids, 2, GIB),
        "silent": run(Silent(), torch.ones(2, 8), 1, GIB, placement_policy="cuda"),
    }
    return {
        name: castor.report.write_html(folder / f"{name}.html", model)
        for name, model in models.items()
    }


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    """A browser for the tests of a file: Playwright's event loop runs in this thread until its end,
    and later tests could not run one of their own."""
    executable = find()
    if executable is None:
        message = "no Chromium: apt-get install chromium"
        if os.environ.get("CASTOR_REQUIRE_BROWSER") == "1":
            pytest.fail(f"{message} (CASTOR_REQUIRE_BROWSER=1)")
        pytest.skip(message)
    with Chromium(executable) as chromium:
        yield chromium
