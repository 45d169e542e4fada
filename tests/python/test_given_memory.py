"""Parameters and gradients that their user gives other memory: `p.data = values`, `p.set_(values)`.

What plain PyTorch makes of them is taken up at the next use: a forward, a step, a save.
"""

import copy
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters

import castor

WIDTH = 16
AMPLE, TIGHT = "1MiB", "7KiB"

Optimizer = Callable[[Any], torch.optim.Optimizer]


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-4)


def rmsprop(params: Any) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(params, lr=1e-3, eps=1e-3)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*itertools.chain.from_iterable(layers))


def boosted(
    optimizer: Optimizer = sgd, **settings: Any
) -> tuple[Any, torch.optim.Optimizer, castor.Booster]:
    model = network()
    own = optimizer(model.parameters())
    given = {"device": "cpu", "device_memory": AMPLE, "host_memory": "1MiB"} | settings
    booster = castor.Booster(castor.GeminiPlugin(**given))
    booster.boost(model, own)
    return model, own, booster


def batch(seed: int, param: torch.Tensor) -> torch.Tensor:
    """Inputs of the parameter's dtype, on its device."""
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed)).to(param)


def loss_of(model: Any, seed: int) -> torch.Tensor:
    out: torch.Tensor = model(batch(seed, model[0].weight))
    return out.float().square().mean()


# --- editors: each gives some parameters other memory, or the same one in another way -------------


def by_vector(model: Any) -> None:
    vector_to_parameters(
        parameters_to_vector(model.parameters()).detach() * 0.5, model.parameters()
    )


def by_data(model: Any) -> None:
    for param in model.parameters():
        param.data = param.data * 0.9


def by_set(model: Any) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.set_(param * 0.9)


def by_swapping(model: Any) -> None:
    one, other = model[0].weight, model[4].weight
    one.data, other.data = other.data, one.data


def by_transposing(model: Any) -> None:
    model[2].weight.data = model[2].weight.data.t()


def by_strided(model: Any) -> None:
    wide = model[4].weight.new_zeros(WIDTH, 2 * WIDTH)
    wide[:, ::2] = model[4].weight.detach() * 0.5
    model[4].weight.data = wide[:, ::2]


def by_average(model: Any) -> None:
    """An average is swapped in for an evaluation, and out again."""
    shadow = [param.data.clone() * 0.5 for param in model.parameters()]
    backup = [param.data for param in model.parameters()]
    for param, value in zip(model.parameters(), shadow, strict=True):
        param.data = value
    with torch.no_grad():
        averaged = loss_of(model, 3).item()
    for param, value in zip(model.parameters(), backup, strict=True):
        param.data = value
    with torch.no_grad():
        assert loss_of(model, 3).item() != averaged
    assert torch.equal(shadow[0], backup[0] * 0.5)  # nobody wrote the average


def by_alias(model: Any) -> None:
    """Writes to the tensor that was assigned are writes to the parameter."""
    value = model[6].weight.data.clone()
    model[6].weight.data = value
    with torch.no_grad():
        loss_of(model, 4)
    value.mul_(0.5)
    assert torch.equal(model[6].weight, value)


def by_itself(model: Any) -> None:
    for param in model.parameters():
        param.data = param.data


def by_apply(model: Any) -> None:
    model._apply(lambda tensor: tensor * 0.9)


def by_sam(model: Any) -> None:
    """The second half of sharpness-aware minimisation: weights go back to what they were."""
    old = {param: param.data.clone() for param in model.parameters()}
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.05)
    for param in model.parameters():
        param.data = old[param]


def by_grad_mode(model: Any) -> None:
    with torch.inference_mode():
        value = model[0].bias * 0.5
    model[0].bias.data = value.clone()


EDITORS: Sequence[Callable[[Any], None]] = (
    by_vector,
    by_data,
    by_set,
    by_swapping,
    by_transposing,
    by_strided,
    by_average,
    by_alias,
    by_itself,
    by_apply,
    by_sam,
    by_grad_mode,
)
PHASES = ("before forward", "after backward", "after step")


def train(
    model: Any, own: torch.optim.Optimizer, edit: Callable[[Any], None], phase: str, steps: int = 3
) -> list[float]:
    losses = []
    for seed in range(steps):
        if phase == "before forward":
            edit(model)
        loss = loss_of(model, seed)
        losses.append(loss.item())
        loss.backward()
        if phase == "after backward":
            edit(model)
        own.step()
        own.zero_grad()
        if phase == "after step":
            edit(model)
    return losses


def in_place(edit: Callable[[Any], None]) -> Callable[[Any], None]:
    """The same edit of an ordinary copy, whose values are written into the model."""

    def edit_in_place(model: Any) -> None:
        ordinary = copy.deepcopy(model)
        edit(ordinary)
        with torch.no_grad():
            for param, value in zip(model.parameters(), ordinary.parameters(), strict=True):
                param.copy_(value)

    return edit_in_place


@pytest.mark.parametrize("edit", EDITORS)
def test_sixteen_bits_take_up_what_an_edit_in_place_gives(edit: Callable[[Any], None]) -> None:
    settings = itertools.cycle(
        (
            {"device_memory": AMPLE},
            {"device_memory": "6KiB"},
            {"device_memory": "6KiB", "overlap": "forward"},
        )
    )
    # _apply changes gradients as well, which copies of a model have none of.
    for phase in PHASES if edit is not by_apply else (PHASES[0], PHASES[2]):
        given: dict[str, Any] = {"precision": "bf16", **next(settings)}
        reference, own, _ = boosted(adamw, **given)
        expected = train(reference, own, in_place(edit), phase)
        model, own, _ = boosted(adamw, **given)
        assert train(model, own, edit, phase) == pytest.approx(expected, rel=1e-2)
        for param, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(param, theirs, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("content", ["states"])
@pytest.mark.parametrize("edit", [by_vector, by_set, by_swapping, by_average, by_transposing])
def test_what_is_on_nvme_takes_it_up(
    edit: Callable[[Any], None], content: str, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {
        "states": {"host_memory": "24KiB"},
    }[content]
    plain = network()
    expected = train(plain, adamw(plain.parameters()), edit, "after step")
    model, own, _ = boosted(adamw, nvme_path=tmp_path, device_memory=AMPLE, **settings)
    assert train(model, own, edit, "after step") == pytest.approx(expected, rel=1e-5)


# --- who uses it next -----------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_saves_have_what_was_given(precision: Any, tmp_path: Path) -> None:
    model, own, booster = boosted(precision=precision)
    train(model, own, by_itself, "after step", 1)
    before = model[0].weight.detach().clone()
    by_vector(model)
    booster.save_model(model, tmp_path / "model")
    written = load_file(next((tmp_path / "model").glob("*.safetensors")))["0.weight"]
    assert torch.equal(written, before * 0.5)
    by_vector(model)
    assert torch.equal(model.state_dict()["0.weight"], before * 0.25)
    booster.save(tmp_path / "run", model, own)
    other, theirs, booster = boosted(precision=precision)
    booster.load(tmp_path / "run", other, theirs)
    assert torch.equal(other[0].weight, before * 0.25)


def test_a_part_of_the_model_that_is_called_takes_it_up() -> None:
    model, _, _ = boosted(device_memory=TIGHT)
    x = batch(0, torch.float32)
    plain = network()
    for one in (model, plain):
        one[2].weight.data = one[2].weight.data * 2
    with torch.no_grad():
        assert torch.equal(model[2](x), plain[2](x))
    assert torch.equal(model[2].weight, plain[2].weight)


def test_state_dicts_follow_what_they_were_taken_of() -> None:
    model, own, _ = boosted(device_memory=TIGHT)
    by_data(model)
    state = model.state_dict()
    train(model, own, by_itself, "after step")
    assert all(torch.equal(state[name], param) for name, param in model.named_parameters())


def test_a_graph_is_as_valid_as_it_was() -> None:
    plain, (model, _, _) = network(), boosted(device_memory="10KiB")
    for one in (plain, model):
        loss = loss_of(one, 0)
        by_data(one)
        with torch.no_grad():
            loss_of(one, 1)  # it is taken up
        loss.backward()
    for param, theirs in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(param.grad, theirs.grad)


@pytest.mark.parametrize("way", ["another tensor", "other data", "set_"])
def test_a_gradient_that_somebody_keeps_stays_the_parameters(way: str) -> None:
    """What it becomes later is seen by whoever keeps it, as in plain PyTorch."""
    seen = []
    for given in (None, {"device_memory": AMPLE}, {"device_memory": TIGHT, "overlap": "forward"}):
        if given is None:
            model: Any = network()
            own = sgd(model.parameters())
        else:
            model, own, _ = boosted(**given)
        param = model[2].weight
        loss_of(model, 0).backward()
        if way == "another tensor":
            param.grad = param.grad * 2
        elif way == "other data":
            param.grad.data = param.grad.data * 2
        else:
            param.grad.set_((param.grad * 2).detach())
        kept, values = param.grad, []
        for seed in (1, 2):
            loss_of(model, seed).backward()
            values.append(kept.clone())
        assert kept is param.grad
        own.step()
        own.zero_grad(set_to_none=False)
        values.append(kept.clone())
        loss_of(model, 3).backward()
        values.append(kept.clone())
        own.zero_grad()
        loss_of(model, 4).backward()
        values.append(kept.clone())
        seen.append(torch.stack([value.detach() for value in values]))
    for other in seen[1:]:
        torch.testing.assert_close(other, seen[0])


@pytest.mark.parametrize("when", ["before backward", "after backward"])
def test_updates_in_backward(when: str) -> None:
    """Chunks that backward has updated are between two steps: nothing can be written there."""
    model, own, booster = boosted(
        overlap="backward", enable_gradient_accumulation=False, nonfinite="ignore",
        chunk_bytes=1024,
    )  # fmt: skip
    plain = network()
    reference = sgd(plain.parameters())
    for seed in range(2):
        for one, stepped in ((plain, reference), (model, own)):
            loss = loss_of(one, seed)
            if when == "before backward" and seed:
                one[2].bias.data = one[2].bias.detach().clone() * 0.5
            booster.backward(loss, stepped) if one is model else loss.backward()
            if when == "after backward" and one is model and seed:
                with pytest.raises(castor.UsageError, match="step"):
                    one[2].bias.data = torch.zeros(WIDTH)
                return
            stepped.step()
            stepped.zero_grad()
    for param, theirs in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(param, theirs, rtol=1e-5, atol=1e-6)


# --- what cannot be the chunk's -------------------------------------------------------------------

OTHERS: list[Any] = []
"""Models that have to live as long as a test."""


def of_another(model: Any) -> None:
    OTHERS[:] = boosted()
    model[0].weight.data = OTHERS[0][0].weight.data


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "half": (lambda model: model.half(), "float32|Float"),
    "double": (lambda model: model.double(), "Float"),
    "meta": (lambda model: model.to("meta"), "replaced"),
    "shape": (lambda model: setattr(model[0].weight, "data", torch.zeros(3, 3)), "3, 3"),
    "tied": (lambda model: setattr(model[0].weight, "data", model[2].weight.data), "2.weight"),
    "another": (of_another, "another boosted"),
    "shared": (
        lambda model: setattr(model[0].weight, "data", torch.zeros(WIDTH, WIDTH).share_memory_()),
        "processes share",
    ),
    "replaced": (
        lambda model: model[0]._parameters.update(weight=nn.Parameter(torch.ones(WIDTH, WIDTH))),
        "replaced",
    ),
    "removed": (lambda model: model[0]._parameters.pop("bias"), "replaced"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("use", ["step", "save_model"])
def test_what_cannot_be_is_named(case: str, use: str, tmp_path: Path) -> None:
    model, own, booster = boosted()
    loss_of(model, 0).backward()
    edit, said = REFUSED[case]
    edit(model)
    with pytest.raises(castor.UsageError, match=said) as error:
        own.step() if use == "step" else booster.save_model(model, tmp_path / "model")
    assert "0." in str(error.value)


def test_what_was_refused_is_taken_up_when_it_is_right() -> None:
    plain, (model, own, _) = network(), boosted()
    model.double()
    with pytest.raises(castor.UsageError, match="Double"):
        loss_of(model, 0)
    model.float()
    expected = train(plain, sgd(plain.parameters()), by_itself, "after step")
    assert train(model, own, by_itself, "after step") == pytest.approx(expected, rel=1e-5)


def test_assigned_parameters_are_refused_at_the_place() -> None:
    model, _, _ = boosted()
    with pytest.raises(castor.UsageError, match="parameter 'weight'"):
        model[0].weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))
    with pytest.raises(RuntimeError, match="boosted model"):
        model.load_state_dict(network().state_dict(), assign=True)
    with pytest.raises(RuntimeError, match=r"references|weakref"):
        torch.utils.swap_tensors(model[0].weight, nn.Parameter(torch.zeros(WIDTH, WIDTH)))
    assert torch.equal(model[0].weight, network()[0].weight)


# --- gradients ------------------------------------------------------------------------------------


def grad_by_data(param: Any) -> None:
    param.grad.data = param.grad.data * 0.5


def grad_by_set(param: Any) -> None:
    param.grad.set_(param.grad * 0.5)


def grad_by_assignment(param: Any) -> None:
    param.grad = param.grad * 0.5


def grad_of_zeros(param: Any) -> None:
    param.grad.data = torch.zeros_like(param.grad)


def grad_kept(param: Any) -> None:
    kept = param.grad.data
    param.grad.data = kept * 2
    assert kept.data_ptr() != param.grad.data_ptr()


def grad_transposed(param: Any) -> None:
    if param.dim() == 2:
        param.grad.data = param.grad.data.t()


GRADS = (
    grad_by_data,
    grad_by_set,
    grad_by_assignment,
    grad_of_zeros,
    grad_kept,
    grad_transposed,
)


def train_on(
    model: Any, own: torch.optim.Optimizer, change: Callable[[Any], None], *, clip: bool
) -> None:
    for seed in range(2):
        for micro in range(2):
            loss_of(model, 2 * seed + micro).backward()
            with torch.no_grad():
                for param in model.parameters():
                    change(param)
        if clip:
            clip_grad_norm_(model.parameters(), 0.01)
        own.step()
        own.zero_grad(set_to_none=seed == 0)


@pytest.mark.filterwarnings("ignore:grad and param do not obey:UserWarning")  # plain's as well
@pytest.mark.parametrize("change", GRADS)
def test_gradients_that_are_given_other_memory_are_stepped_with(
    change: Callable[[Any], None],
) -> None:
    for optimizer, clip, budget in zip(
        (sgd, adamw, rmsprop), (False, True, True), (TIGHT, AMPLE, TIGHT), strict=True
    ):
        plain = network()
        train_on(plain, optimizer(plain.parameters()), change, clip=clip)
        overlap = "forward" if optimizer is adamw else "none"
        model, own, _ = boosted(optimizer, device_memory=budget, overlap=overlap)
        train_on(model, own, change, clip=clip)
        for param, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(param, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("change", [grad_by_data, grad_by_set, grad_of_zeros])
def test_gradients_in_sixteen_bits(change: Callable[[Any], None]) -> None:
    stepped = []
    for one in (change, grad_by_assignment if change is not grad_of_zeros else change):
        model, own, _ = boosted(sgd, precision="bf16")
        train_on(model, own, one, clip=False)
        stepped.append([param.detach().clone() for param in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*stepped, strict=True))
    if change is grad_of_zeros:
        model, own, _ = boosted(sgd, precision="bf16")
        before = model[0].weight.detach().clone()
        assert torch.equal(before, stepped[0][0])


def test_gradients_of_another_type_are_named() -> None:
    model, own, _ = boosted(precision="bf16")
    loss_of(model, 0).backward()
    model[0].weight.grad.data = model[0].weight.grad.float()
    with pytest.raises(castor.UsageError, match=r"'0\.weight'.*Float"):
        own.step()


def test_scaled_gradients_are_not_taken_for_unscaled_ones() -> None:
    model, own, booster = boosted(precision="fp16")
    booster.backward(loss_of(model, 0), own)
    model[0].weight.grad.data = model[0].weight.grad.data * 0.5
    with pytest.raises(castor.UsageError, match="loss scale"):
        own.step()
