"""`castor run` of loops that plain PyTorch trains in: no Trainer, no castor in the script."""

import copy
import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import castor
import simulated_gpu
from castor.integrations.common import boosted
from castor.integrations.loop import Loops
from castor.runtime.engine import engines_holding
from data_parallel_cases import torchs_own
from simulated import compute_on_gpu

LOOP = """
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(2)
config = GPT2Config(vocab_size=64, n_positions=16, n_embd=64, n_layer=6, n_head=4, eos_token_id=0)
device = torch.device("cpu")
model = GPT2LMHeadModel(config).to(device)
teacher = GPT2LMHeadModel(config).eval()
measure = nn.KLDivLoss(reduction="batchmean", log_target=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
tokens = torch.randint(0, 64, (16, 2, 12), generator=torch.Generator().manual_seed(1))
losses = []


@torch.no_grad()
def evaluate():
    model.eval()
    losses.append(model(input_ids=tokens[0], labels=tokens[0]).loss.item())
    model.train()


evaluate()
if begin:
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    schedule.load_state_dict(saved["schedule"])
    torch.set_rng_state(saved["random"])
for step in range(begin, end):
    for batch in tokens[2 * step : 2 * step + 2]:
        found = model(input_ids=batch, labels=batch)
        with torch.no_grad():
            wanted = teacher(input_ids=batch).logits.log_softmax(-1)
        loss = found.loss + measure(found.logits.log_softmax(-1), wanted) / 100
        (loss / 2).backward()
        losses.append(loss.item())
    losses.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
evaluate()
kept = {
    "model": model.state_dict(), "optimizer": optimizer.state_dict(),
    "schedule": schedule.state_dict(), "random": torch.get_rng_state(), "losses": losses,
}
"""
SETTINGS = {"device": "cpu", "device_memory": "2MiB", "host_memory": "64MiB"}


@pytest.fixture(name="torchs_own")
def _torchs_own() -> Iterator[None]:
    with torchs_own():
        yield


@pytest.fixture
def watched(torchs_own: None) -> None:
    """As in a process of `castor run`."""
    Loops(SETTINGS).watch()


def trained(begin: int = 0, end: int = 6, saved: dict[str, Any] | None = None) -> dict[str, Any]:
    """What the loop holds at its end, with what went before it."""
    own: dict[str, Any] = {"begin": begin, "end": end, "saved": saved}
    exec(LOOP, own)
    assert nn.Module.__call__.__name__ == "_wrapped_call_impl"
    return copy.deepcopy(own["kept"]) | {"boosted": hasattr(own["optimizer"], "_castor")}


def assert_close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name in ("model", "optimizer", "schedule", "losses"):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    return trained()


@pytest.fixture(scope="module")
def half() -> dict[str, Any]:
    return trained(end=3)


def test_a_loop_trains_as_in_plain_pytorch(plain: Any, half: Any, watched: None) -> None:
    found = trained()
    assert (plain["boosted"], found["boosted"]) == (False, True)
    assert_close(found, plain)
    for saved in (half, trained(end=3)):  # plain PyTorch's, and what castor has saved
        rest = trained(begin=3, saved=saved)
        assert_close(rest, plain | {"losses": plain["losses"][:1] + plain["losses"][10:]})


@pytest.mark.parametrize(
    ("forward", "error", "message"),
    [
        (lambda model, x: model[1](model[0](x)), castor.UsageError, "which has 2 of the 4"),
        (
            lambda model, x: nn.DataParallel(model)(x),
            NotImplementedError,
            "in one process or in Distributed.* calls a torch.*DataParallel",
        ),
    ],
)
def test_a_model_that_is_not_called_as_a_whole_is_refused(
    forward: Any, error: type[Exception], message: str, watched: None
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(error, match=message):
        forward(model, torch.ones(2, 4))
    assert not boosted(optimizer)


def test_a_model_that_is_moved_waits_on_the_cpu_and_others_move(
    monkeypatch: pytest.MonkeyPatch, torchs_own: None
) -> None:
    compute_on_gpu(monkeypatch)
    Loops(SETTINGS | {"device": "cuda"}).watch()
    device = torch.device(simulated_gpu.NAME, 0)
    model, teacher = nn.Linear(4, 4).to(device), nn.Sequential(nn.Linear(4, 4)).to(device)
    norm = nn.BatchNorm1d(4, affine=False).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    assert norm.running_mean is not None
    places = [one.device.type for one in (model.weight, teacher[0].weight, norm.running_mean)]
    assert places == ["cpu", "cpu", device.type]
    x = torch.ones(2, 4, device=device)
    with torch.no_grad():
        wanted = teacher[0](x)
    assert teacher[0].weight.device == device
    assert not boosted(optimizer)
    (model(x) - wanted).square().sum().backward()
    assert boosted(optimizer)
    assert nn.Module.__call__.__name__ == "_wrapped_call_impl"
    optimizer.step()
    simulated_gpu.rest()


def test_an_evaluation_before_the_first_step_is_in_the_budget(watched: None) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    with torch.no_grad():
        model[0](torch.ones(2, 4))
        assert not boosted(optimizer)
        model(torch.ones(2, 4))
    assert boosted(optimizer)


def test_each_model_of_a_loop_has_its_optimizer(watched: None) -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    own = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (first, second)]
    for one in (first, second):
        one(torch.ones(2, 4)).sum().backward()
    assert all(map(boosted, own))
    assert nn.Module.__call__.__name__ == "_wrapped_call_impl"


def test_an_optimizer_that_is_gone_waits_for_nothing(watched: None) -> None:
    model = nn.Linear(4, 4)
    torch.optim.SGD(model.parameters(), lr=0.1)
    gc.collect()
    model(torch.ones(2, 4)).sum().backward()
    assert not engines_holding(model)


def test_a_script_of_ones_own_runs_under_castor_run(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(
        f"begin, end, saved = 0, 2, None\n{LOOP}\nprint(hasattr(optimizer, '_castor'))\n"
    )
    command = ("-m", "castor", "run", "--set", "device=cpu", "--device-memory", "2MiB", "loop.py")
    done = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True\n"
