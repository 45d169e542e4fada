"""The optimizer beside what follows step: the same bits, whoever reads whatever whenever."""

import copy
import io
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import castor
import grids
from helpers import (
    FORMATS,
    LR,
    ON_THE_CPU_DEVICE,
    Boosted,
    assert_boost_fails,
    assert_same_weights,
    boost,
    copies,
    equal,
)
from rank_processes import run_python
from zoo import CASES, Case, tower, tower_batch

WIDTH, ROWS = 1536, 2


class Wide(nn.Module):
    """12 million weights: an update takes milliseconds, and a test that reads at once reads early.
    The second layer's weight is used by the first one as well, outside its module."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x + 0.01 * nn.functional.linear(x, self.layers[4].weight)
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        loss: torch.Tensor = hidden.square().mean()
        return loss


def wide() -> Wide:
    torch.manual_seed(7)
    return Wide()


def data(seed: int) -> torch.Tensor:
    return torch.randn((ROWS, WIDTH), generator=torch.Generator().manual_seed(seed))


def stepped(overlap: str, steps: int = 1, **settings: Any) -> Boosted:
    """Right after a step, updates under way if there are any."""
    boosted = boost(wide(), overlap=overlap, **settings)
    for seed in range(steps):
        boosted.optimizer.zero_grad()
        boosted.booster.backward(boosted.model(data(seed)), boosted.optimizer)
        boosted.optimizer.step()
    return boosted


OF_THE_CPU_DEVICE = pytest.mark.cpu_device("a GPU's weights are watched whether pending or not")


def pending(tensor: torch.Tensor) -> bool:
    return "DeferredInit" in repr(torch._C._dispatch_keys(tensor))


Reading = Callable[[Boosted], Any]
READINGS: dict[str, Reading] = {
    "parameters": lambda b: [p.clone() for p in b.model.parameters()],
    "named_parameters": lambda b: {name: p + 0 for name, p in b.model.named_parameters()},
    "held_before": lambda b: [p.mul(2) for p in b.held],
    "data": lambda b: [p.data.clone() for p in b.model.parameters()],
    "numpy": lambda b: [torch.from_numpy(p.detach().cpu().numpy()) for p in b.model.parameters()],
    "list": lambda b: torch.tensor(list(b.model.parameters())[-1][:2].tolist()),
    "foreach": lambda b: torch._foreach_norm(list(b.model.parameters())),
    "vector": lambda b: torch.nn.utils.parameters_to_vector(b.model.parameters()),
    "state_dict": lambda b: b.model.state_dict(),
    "state_dict_of_vars": lambda b: saved(b.model.state_dict(keep_vars=True)),
    "deepcopy": lambda b: copy.deepcopy(list(b.model.parameters())),
    "moments": lambda b: [e["exp_avg"] + e["exp_avg_sq"] for e in b.optimizer.state.values()],
    "optimizer_state_dict": lambda b: saved(b.optimizer.state_dict()),
    "gradients": lambda b: [p.grad.clone() for p in b.model.parameters()],
    "evaluation": lambda b: evaluated(b.model),
    "another_forward": lambda b: b.model(data(9)).detach(),
    "alias": lambda b: [alias + 0 for alias in b.aliases],
    "state_dict_of_before": lambda b: [value + 0 for value in b.state.values()],
    "part": lambda b: saved(b.model.layers[2].state_dict(keep_vars=True)),
    "ema": lambda b: [e.lerp_(p, 0.1) for e, p in zip(b.average, b.held, strict=True)],
}


def saved(values: Any) -> Any:
    """As torch.save sees them: bytes of storages, no operator."""
    file = io.BytesIO()
    torch.save(values, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@torch.no_grad()
def evaluated(model: nn.Module) -> torch.Tensor:
    model.eval()
    loss: torch.Tensor = model(data(3))
    return loss


def flat(values: Any) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    if isinstance(values, list | tuple) or hasattr(values, "__iter__"):
        return [tensor for value in values if not isinstance(value, str) for tensor in flat(value)]
    return []


@pytest.mark.parametrize(
    "name",
    grids.some(
        tuple(READINGS),
        *(name for name in READINGS if name not in ("named_parameters", "vector", "part")),
    ),
)
def test_reading_right_after_step_sees_the_new_values(name: str) -> None:
    read = {}
    for overlap in ("none", "forward"):
        boosted = boost(wide(), overlap=overlap)
        boosted.held = list(boosted.model.parameters())  # type: ignore[attr-defined]
        boosted.average = [p.detach().clone() for p in boosted.held]  # type: ignore[attr-defined]
        if name == "alias":
            boosted.aliases = [p.detach() for p in boosted.held]  # type: ignore[attr-defined]
        if name == "state_dict_of_before":
            boosted.state = boosted.model.state_dict()  # type: ignore[attr-defined]
        for seed in range(3):
            boosted.optimizer.zero_grad()
            boosted.booster.backward(boosted.model(data(seed)), boosted.optimizer)
            boosted.optimizer.step()
        # Where somebody holds other tensors over the memory, step() has waited.
        awaited = overlap == "none" or name in ("alias", "state_dict_of_before")
        if ON_THE_CPU_DEVICE:
            assert pending(next(iter(boosted.model.parameters()))) != awaited
        read[overlap] = flat(READINGS[name](boosted))
    assert len(read["none"]) == len(read["forward"]) > 0
    for early, late in zip(read["forward"], read["none"], strict=True):
        assert equal(early, late)


def clamped_by_hand(bound: float, **settings: Any) -> list[torch.Tensor]:
    boosted = boost(wide(), **settings)
    for seed in range(2):
        boosted.booster.backward(boosted.model(data(seed)), boosted.optimizer)
        for p in boosted.model.parameters():
            p.grad = p.grad.clamp(-bound, bound)
        boosted.optimizer.step()
        boosted.optimizer.zero_grad()
    return copies(boosted.model.parameters())


def test_gradients_that_the_user_assigns_are_the_ones_that_count() -> None:
    expected, unclamped = clamped_by_hand(1e-7), clamped_by_hand(1.0)
    assert not equal(expected[0], unclamped[0])
    ways = tuple(itertools.product(("none", "forward"), (None, "200MB/s")))
    for overlap, link in grids.some(ways, ("none", "200MB/s"), ("forward", "200MB/s")):
        clamped = clamped_by_hand(1e-7, overlap=overlap, link_bandwidth=link)
        assert all(equal(a, b) for a, b in zip(clamped, expected, strict=True))


@pytest.mark.parametrize("write", ["zero_grad", "weights", "moments", "gradients"])
def test_writing_right_after_step_happens_after_the_update(write: str) -> None:
    weights = {}
    for overlap in ("none", "forward"):
        boosted = stepped(overlap)
        if write == "zero_grad":
            boosted.optimizer.zero_grad(set_to_none=False)
        elif write == "weights":
            with torch.no_grad():
                for p in boosted.model.parameters():
                    p[:, 5].zero_()
        elif write == "moments":
            for entry in boosted.optimizer.state.values():
                entry["exp_avg"].mul_(0.5)
        else:
            for p in boosted.model.parameters():
                p.grad.zero_()
        boosted.booster.backward(boosted.model(data(5)), boosted.optimizer)
        boosted.optimizer.step()
        weights[overlap] = copies(boosted.model.parameters())
    assert all(equal(a, b) for a, b in zip(*weights.values(), strict=True))


# --- the equality test ------------------------------------------------------------------


def train(case: Case, *, accumulate: int, steps: int = 4, **settings: Any) -> Boosted:
    model = case.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    boosted = boost(model, optimizer=optimizer, **settings)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    seeds = itertools.count()
    for _ in range(steps):
        for _ in range(accumulate):
            batch = case.batch(next(seeds))
            loss = case.loss(boosted.model(**batch), batch)
            boosted.booster.backward(loss / accumulate, boosted.optimizer)
        boosted.optimizer.step()
        scheduler.step()
        boosted.optimizer.zero_grad()
    return boosted


def budgets_and_links(tight: int) -> tuple[tuple[int, str | None], ...]:
    """Device budgets and link bandwidths of runs that must end with the same weights."""
    ways = tuple(itertools.product((tight, 2**30), (None, "200MB/s")))
    return grids.some(ways, (tight, "200MB/s"), (2**30, None))  # type: ignore[no-any-return]


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("max_norm", [0.0, 0.1])
@pytest.mark.parametrize("precision_and_format", FORMATS)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_every_mode_gives_the_same_weights(
    name: str, precision_and_format: tuple[str, str], max_norm: float, accumulate: int
) -> None:
    case = CASES[name]
    precision, state_format = precision_and_format
    settings: dict[str, Any] = {
        "precision": precision,
        "optim_state_format": state_format,
        "max_norm": max_norm,
    }
    expected = train(case, accumulate=accumulate, overlap="none", **settings)
    weights = copies(expected.model.parameters())
    moments = flat(expected.optimizer.state_dict()["state"])
    tight = int(expected.report().peak_device_bytes * 0.75)
    window = max(weight.nbytes for weight in weights)  # of gradients on their way
    for memory, link in budgets_and_links(tight):
        boosted = train(
            case,
            accumulate=accumulate,
            overlap="forward",
            memory=memory + (window if link else 0),
            link_bandwidth=link,
            **settings,
        )
        assert_same_weights(boosted.model, weights)
        mine = flat(boosted.optimizer.state_dict()["state"])
        assert all(equal(a, b) for a, b in zip(mine, moments, strict=True))


BACKWARD: dict[str, Any] = {
    "overlap": "backward",
    "nonfinite": "ignore",
    "enable_gradient_accumulation": False,
}


@pytest.mark.parametrize(
    ("name", "precision", "state_format"),
    [("gpt2", *each) for each in FORMATS if each[0] != "fp16"]
    + [(name, "fp32", "fp32") for name in ("llama", "t5", "mixtral")],
)
def test_updating_in_backward_gives_the_same_weights(
    name: str, precision: str, state_format: str
) -> None:
    case = CASES[name]
    settings: dict[str, Any] = {"precision": precision, "optim_state_format": state_format}
    expected = train(case, accumulate=1, overlap="none", **settings)
    weights = copies(expected.model.parameters())
    tight = int(expected.report().peak_device_bytes * 0.9)
    window = max(weight.nbytes for weight in weights)
    for memory, link in budgets_and_links(tight):
        boosted = train(
            case,
            accumulate=1,
            memory=memory + (window if link else 0),
            link_bandwidth=link,
            **settings,
            **BACKWARD,
        )
        assert_same_weights(boosted.model, weights)


def backward_twice(boosted: Boosted) -> None:
    for seed in range(2):
        boosted.booster.backward(boosted.model(data(seed)), boosted.optimizer)


def clip(boosted: Boosted) -> None:
    boosted.booster.backward(boosted.model(data(0)), boosted.optimizer)
    torch.nn.utils.clip_grad_norm_(boosted.model.parameters(), 1e-3)
    boosted.optimizer.step()


def clamp_through_data(boosted: Boosted) -> None:
    boosted.booster.backward(boosted.model(data(0)), boosted.optimizer)
    for p in boosted.model.parameters():
        p.grad.data.clamp_(-1e-4, 1e-4)


def assign_gradient(boosted: Boosted) -> None:
    boosted.booster.backward(boosted.model(data(0)), boosted.optimizer)
    weight = boosted.model.layers[3].weight
    weight.grad = torch.zeros(weight.shape, device=weight.device)
    boosted.optimizer.step()


def evaluate_before_step(boosted: Boosted) -> None:
    boosted.booster.backward(boosted.model(data(0)), boosted.optimizer)
    evaluated(boosted.model)


def read_before_step(boosted: Boosted) -> None:
    boosted.booster.backward(boosted.model(data(0)), boosted.optimizer)
    boosted.model.layers[3].weight.clone()


def change_lr(boosted: Boosted) -> None:
    boosted.booster.backward(boosted.model(data(0)), boosted.optimizer)
    boosted.optimizer.param_groups[0]["lr"] *= 0.5
    boosted.optimizer.step()


def drop_gradient(boosted: Boosted) -> None:
    boosted.booster.backward(boosted.model(data(0)), boosted.optimizer)
    boosted.model.layers[3].weight.grad = None
    boosted.optimizer.step()


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (backward_twice, "the next forward began after a backward that updated"),
        (clip, "a gradient was read or changed after a backward that updated"),
        (clamp_through_data, "a gradient was read or changed after a backward that updated"),
        (assign_gradient, "a gradient was read or changed after a backward that updated"),
        (evaluate_before_step, "after a backward that updated"),
        (read_before_step, "a weight or moment was read after a backward that updated"),
        (change_lr, "an option of its parameter group was changed between"),
        (drop_gradient, "its gradient was changed between backward and step"),
    ],
)
def test_what_comes_too_late_for_an_update_in_backward_is_refused(
    misuse: Callable[[Boosted], None], message: str
) -> None:
    with pytest.raises(castor.UsageError, match=message):
        misuse(boost(wide(), **BACKWARD))


def test_a_backward_that_fails_halfway_saves_nothing_until_a_checkpoint_is_loaded(
    tmp_path: Path,
) -> None:
    boosted = boost(wide(), **BACKWARD)
    boosted.step(boosted.model(data(0)))
    boosted.booster.save_model(boosted.model, tmp_path / "model")
    boosted.booster.save_optimizer(boosted.optimizer, tmp_path / "optimizer")
    expected = boosted.step(boosted.model(data(1)))
    weights = copies(boosted.model.parameters())

    def fail(_: torch.Tensor) -> None:
        raise KeyboardInterrupt

    boosted = boost(wide(), **BACKWARD)
    handle = boosted.model.layers[0].weight.register_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        boosted.step(boosted.model(data(0)))
    handle.remove()
    for use in (
        lambda: boosted.model(data(1)),
        lambda: evaluated(boosted.model),
        lambda: boosted.model.state_dict(),
        lambda: boosted.optimizer.state_dict(),
        lambda: boosted.booster.save_model(boosted.model, tmp_path / "mixed"),
        lambda: boosted.booster.save_optimizer(boosted.optimizer, tmp_path / "mixed"),
    ):
        with pytest.raises(castor.UsageError, match="load a checkpoint"):
            use()
    boosted.optimizer.zero_grad()
    boosted.booster.load_model(boosted.model, tmp_path / "model")
    boosted.booster.load_optimizer(boosted.optimizer, tmp_path / "optimizer")
    assert boosted.step(boosted.model(data(1))) == expected
    assert_same_weights(boosted.model, weights)


@pytest.mark.parametrize(
    "setting", [{"max_norm": 1.0}, {"nonfinite": "skip"}, {"precision": "fp16"}]
)
def test_updating_in_backward_is_refused_where_it_is_not_exact(setting: dict[str, Any]) -> None:
    assert_boost_fails(
        ValueError, "overlap='backward' updates chunks before the norm", **(BACKWARD | setting)
    )


def test_updating_in_backward_asks_for_a_loop_that_does_not_accumulate() -> None:
    assert_boost_fails(
        ValueError, "enable_gradient_accumulation=False", overlap="backward", nonfinite="ignore"
    )


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_after_step_loses_nothing(error: type[BaseException]) -> None:
    expected = copies(stepped("none", steps=2).model.parameters())
    boosted = stepped("forward", steps=1)

    def fail(*_: Any) -> None:
        raise error

    boosted.optimizer.zero_grad()
    handle = boosted.model.layers[2].register_forward_pre_hook(fail)
    with pytest.raises(error):
        boosted.model(data(1))
    handle.remove()
    boosted.booster.backward(boosted.model(data(1)), boosted.optimizer)
    boosted.optimizer.step()
    assert_same_weights(boosted.model, expected)


def test_a_checkpoint_right_after_step_holds_the_step(tmp_path: Path) -> None:
    for overlap in ("none", "forward"):
        boosted = stepped(overlap)
        boosted.booster.save_model(boosted.model, tmp_path / overlap)
        boosted.booster.save_optimizer(boosted.optimizer, tmp_path / f"{overlap}-optimizer")
    for name in ("{}", "{}-optimizer"):
        saves = [tmp_path / name.format(overlap) for overlap in ("none", "forward")]
        for first, second in zip(*(sorted(save.rglob("*")) for save in saves), strict=True):
            if first.suffix == ".safetensors":
                assert first.read_bytes() == second.read_bytes()


@pytest.mark.cpu_device("a GPU refuses such an optimizer anyway")
def test_overlap_needs_a_fused_rule() -> None:
    model = tower()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=LR)
    with pytest.raises(NotImplementedError, match="overlap='forward' needs a step of castor's own"):
        boost(model, optimizer=optimizer, overlap="forward")
    model(**tower_batch(0)).backward()  # untouched


def test_an_unknown_mode_is_refused() -> None:
    assert_boost_fails(ValueError, "overlap is 'sideways'", overlap="sideways")


def test_a_model_may_go_while_copies_wait_for_its_updates() -> None:
    """A copy that the link has not come to asks for its update when the model is on its way out."""
    run = run_python(Path(__file__).with_name("dropped_model.py"), timeout=120)
    assert run.returncode == 0, run.stderr
