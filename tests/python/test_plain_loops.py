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
from data_parallel_cases import torchs_own as kept
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
BF16 = {"precision": "bf16"}
SETTINGS = {"device": "cpu", "device_memory": "2MiB", "host_memory": "64MiB"}


@pytest.fixture(name="torchs_own")
def _torchs_own() -> Iterator[None]:
    with kept():
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


def layers(seed: int, width: int = 8) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, width))


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step))


def one_optimizer_of_two_models_and_their_losses() -> tuple[list[float], list[Any]]:
    class Scaled:
        """A loss that is no module, with a parameter."""

        def __init__(self) -> None:
            self.weight = nn.Parameter(torch.tensor(0.2))

        def __call__(self, output: torch.Tensor) -> torch.Tensor:
            return output.float().square().mean() * self.weight.exp()

    first, second, judge, scaled = layers(0), layers(1), nn.Linear(8, 1), Scaled()
    held = [*first.parameters(), *second.parameters(), *judge.parameters(), scaled.weight]
    optimizer = torch.optim.AdamW(held, lr=1e-2)
    losses = []
    for step in range(4):
        output = second(first(batch(step)))
        loss = judge(output).float().square().mean() + scaled(second(first(batch(step + 9))))
        loss.backward()
        nn.utils.clip_grad_norm_(held, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [optimizer]


def parts_of_a_model() -> tuple[list[float], list[Any]]:
    model = nn.ModuleDict({"encoder": layers(0), "decoder": layers(1)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(4):
        loss = model["decoder"](model["encoder"](batch(step))).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [optimizer]


def two_optimizers_that_share_a_model() -> tuple[list[float], list[Any]]:
    first, second = layers(0), layers(1)
    made = [
        torch.optim.Adam([*first.parameters(), *second[0].parameters()], lr=1e-2),
        torch.optim.SGD(second[2].parameters(), lr=1e-2),
    ]
    losses = []
    for step in range(4):
        loss = second(first(batch(step))).float().square().mean()
        loss.backward()
        for one in made:
            one.step()
            one.zero_grad()
        losses.append(loss.item())
    return losses, made


def later_optimizers() -> tuple[list[float], list[Any]]:
    """A head first, then all, then others; gradients of the last step are there when they come."""
    model, losses = nn.Sequential(layers(0).requires_grad_(False), layers(1)), []

    def train(optimizer: Any) -> Any:
        for step in range(3):
            loss = model(batch(step)).float().square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return optimizer

    made = [train(torch.optim.AdamW(model[1].parameters(), lr=1e-2))]
    model.requires_grad_(True)
    made.append(train(torch.optim.AdamW(model.parameters(), lr=1e-2)))
    made.append(train(torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)))
    if boosted(made[-1]):
        with pytest.raises(castor.UsageError, match=r"this AdamW is to step .* a \w+ since"):
            made[0].step()
    return losses, made[-1:]


def later_optimizer_of_two_models() -> tuple[list[float], list[Any]]:
    first, second, losses = layers(0), layers(1), []
    for kind in (torch.optim.AdamW, torch.optim.RMSprop):
        optimizer = kind([*first.parameters(), *second.parameters()], lr=1e-3)
        for step in range(3):
            loss = second(first(batch(step))).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, [optimizer]


def later_optimizer_of_a_model_and_a_new_head() -> tuple[list[float], list[Any]]:
    """The body by itself, a head over the frozen body, both of them, and the body once more."""
    body, head, losses = layers(0), layers(1), []

    def train(optimizer: Any, *parts: nn.Module) -> Any:
        for step in range(3):
            output = batch(step)
            for part in parts:
                output = part(output)
            loss = output.float().square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return optimizer

    train(torch.optim.AdamW(body.parameters(), lr=1e-2), body)
    both: list[dict[str, Any]] = [
        {"params": body.parameters()},
        {"params": head.parameters(), "lr": 2e-2},
    ]
    body.requires_grad_(False)
    train(torch.optim.AdamW(both, lr=1e-2), body, head)
    body.requires_grad_(True)
    train(torch.optim.AdamW([*body.parameters(), *head.parameters()], lr=1e-2), body, head)
    return losses, [train(torch.optim.AdamW(body.parameters(), lr=1e-2), body)]


def later_optimizer_of_two_boosted_models() -> tuple[list[float], list[Any]]:
    """Each model by itself, then both with one optimizer, within a third module."""
    first, second, losses = layers(0), layers(1), []

    def train(model: nn.Module) -> Any:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for step in range(3):
            loss = model(batch(step)).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return optimizer

    train(first)
    train(second)
    return losses, [train(nn.Sequential(first, nn.LayerNorm(8), second))]


def generators_before_frozen_discriminators() -> tuple[list[float], list[Any]]:
    """The loop of CycleGAN: discriminators are frozen when they are first called."""
    makers, judges, losses = [layers(0), layers(1)], [layers(2, 1), layers(3, 1)], []
    held = [[p for one in parts for p in one.parameters()] for parts in (makers, judges)]
    made = [torch.optim.Adam(params, lr=1e-2, betas=(0.5, 0.999)) for params in held]
    for step in range(4):
        real = batch(step)
        for param in held[1]:
            param.requires_grad_(False)
        fakes = [makers[0](real), makers[1](real)]
        loss = (makers[1](fakes[0]).float() - real).abs().mean()
        for judge, fake in zip(judges, fakes, strict=True):
            loss = loss + judge(fake).float().sub(1).square().mean()
        made[0].zero_grad()
        loss.backward()
        made[0].step()
        losses.append(loss.item())
        for param in held[1]:
            param.requires_grad_(True)
        made[1].zero_grad()
        for judge, fake in zip(judges, fakes, strict=True):
            loss = judge(real).float().sub(1).square().mean()
            loss = loss + judge(fake.detach()).float().square().mean()
            loss.backward()
            losses.append(loss.item())
        made[1].step()
    return losses, made


def layers_that_thaw() -> tuple[list[float], list[Any]]:
    """One optimizer of all: the head trains first, then all, then all but some."""
    model, losses = nn.Sequential(layers(0), layers(1)), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for thawed in ([model[1]], [model[0][2], model[1]], [model], [model[1]]):
        model.requires_grad_(False)
        for one in thawed:
            one.requires_grad_(True)
        for step in range(2):
            loss = model(batch(step)).float().square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, [optimizer]


class CalledByItself(nn.Module):
    """As GPyTorch's modules: its __call__ does not come to nn.Module's."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1, 8))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def module_with_a_call_of_its_own() -> tuple[list[float], list[Any]]:
    return train_alone(CalledByItself())


def parameters_that_the_first_call_makes() -> tuple[list[float], list[Any]]:
    torch.manual_seed(3)
    return train_alone(nn.Sequential(nn.LazyLinear(32), nn.GELU(), nn.Linear(32, 8)))


def train_alone(model: nn.Module) -> tuple[list[float], list[Any]]:
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=1e-2), []
    for step in range(4):
        optimizer.zero_grad()
        loss = model(batch(step)).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [optimizer]


@pytest.mark.filterwarnings("ignore:the optimizer does not hold")
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize(
    "train",
    [
        layers_that_thaw,
        module_with_a_call_of_its_own,
        parameters_that_the_first_call_makes,
        generators_before_frozen_discriminators,
        one_optimizer_of_two_models_and_their_losses,
        parts_of_a_model,
        two_optimizers_that_share_a_model,
        later_optimizers,
        later_optimizer_of_two_models,
        later_optimizer_of_a_model_and_a_new_head,
        later_optimizer_of_two_boosted_models,
    ],
)
def test_optimizers_over_several_modules_and_later_ones(train: Any, torchs_own: None) -> None:
    expected, made = train()
    assert not any(map(boosted, made))
    for settings, rel in (({}, 1e-5), ({"device_memory": "24KiB"}, 1e-5), (BF16, 8e-2)):
        with kept():
            Loops(SETTINGS | settings).watch()
            found, made = train()
            assert all(map(boosted, made))
            assert found == pytest.approx(expected, rel=rel)
            assert nn.Module.__call__.__name__ == "_wrapped_call_impl"
            assert not hasattr(CalledByItself.__call__, "__wrapped__")


def test_modules_of_16_bits_take_inputs_of_their_type_in_fp32(torchs_own: None) -> None:
    Loops(SETTINGS | {"precision": "fp32"}).watch()
    first, second = layers(0).bfloat16(), layers(1).bfloat16()
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    second(first(batch(0).bfloat16())).sum().backward()
    assert boosted(optimizer)
    assert second[2].weight.dtype == torch.float32


def test_a_later_optimizer_of_other_parameters_is_refused_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, torchs_own: None
) -> None:
    compute_on_gpu(monkeypatch)
    Loops(SETTINGS | {"device": "cuda"}).watch()
    first, second = layers(0), layers(1)
    x = batch(0).to(torch.device(simulated_gpu.NAME, 0))
    made = [torch.optim.SGD(first.parameters(), lr=0.1)]
    first(x).sum().backward()
    made.append(torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1))
    with pytest.raises(castor.UsageError, match="over 8 parameters, and 4 of them are not of the"):
        first(x)


@pytest.mark.parametrize(
    ("forward", "error", "message"),
    [
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


@pytest.mark.whole
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
