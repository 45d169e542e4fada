"""Several models of one plugin: one budget, in which the idle ones give way to the active one."""

import copy
import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import log_softmax, logsigmoid

import castor
from helpers import (
    LR,
    ON_THE_CPU_DEVICE,
    Boosted,
    assert_close_losses,
    assert_same_weights,
    beside_gradients,
    boost,
    copies,
    equal,
    losses_of_plain,
    param_bytes,
    plugin,
    train_on,
)
from zoo import CASES, gpt2, llama, tower, tower_batch, tower_loss

BETA = 0.1
MAX_NORM = 0.5
OF_A_RELEASE = pytest.mark.cpu_device("booster.release refuses models on a GPU")
Step = Callable[[nn.Module, nn.Module, int], torch.Tensor]
"""(the one that trains, the one that does not, seed of the batch) -> loss."""


def tokens(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    chosen, rejected = torch.randint(3, 256, (2, 2, 20), generator=generator)
    return chosen, rejected


def log_probs(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Of each sequence, as the sum over its tokens (Rafailov et al. 2023)."""
    logits = model(input_ids=ids).logits[:, :-1]
    labels = ids[:, 1:, None].to(logits.device)
    return log_softmax(logits, -1).gather(-1, labels).sum((1, 2))


def reference_log_probs(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return log_probs(model, ids)


def of_ratios(policy: list[torch.Tensor], reference: list[torch.Tensor]) -> torch.Tensor:
    margin = (policy[0] - reference[0]) - (policy[1] - reference[1])
    return -logsigmoid(BETA * margin).mean()


def policy_first(policy: nn.Module, reference: nn.Module, seed: int) -> torch.Tensor:
    pair = tokens(seed)
    own = [log_probs(policy, ids) for ids in pair]
    return of_ratios(own, [reference_log_probs(reference, ids) for ids in pair])


def reference_first(policy: nn.Module, reference: nn.Module, seed: int) -> torch.Tensor:
    pair = tokens(seed)
    other = [reference_log_probs(reference, ids) for ids in pair]
    return of_ratios([log_probs(policy, ids) for ids in pair], other)


def in_turn(policy: nn.Module, reference: nn.Module, seed: int) -> torch.Tensor:
    own, other = [], []
    for ids in tokens(seed):
        own.append(log_probs(policy, ids))
        other.append(reference_log_probs(reference, ids))
    return of_ratios(own, other)


def frozen(model: nn.Module) -> nn.Module:
    return model.eval().requires_grad_(False)


def policy_and_reference(build: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(7)
    policy, reference = build(), build()
    return policy, frozen(reference)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """One whose steps are torch's own, to the bit, where castor takes it."""
    if not ON_THE_CPU_DEVICE:
        return torch.optim.AdamW(model.parameters(), lr=LR)
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def clipped_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    optimizer.zero_grad()
    return norm.item()


def train(
    pair: tuple[nn.Module, nn.Module],
    optimizer: torch.optim.Optimizer,
    step: Step,
    steps: int = 5,
    after_forward: Callable[[], None] = lambda: None,
) -> list[tuple[float, float]]:
    """Losses and norms of clipped steps."""
    seen = []
    for seed in range(steps):
        loss = step(*pair, seed)
        after_forward()
        loss.backward()
        after_forward()
        value = loss.item()
        del loss
        seen.append((value, clipped_step(pair[0], optimizer)))
    return seen


class Shared:
    """Models of one plugin."""

    def __init__(self, memory: int | str, **settings: Any) -> None:
        self.booster = castor.Booster(plugin(memory, **settings))
        self.budget = self.booster.plugin.config.device_bytes  # type: ignore[attr-defined]
        self.models: list[nn.Module] = []
        self.held = 0

    def boost(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        self.booster.boost(model, optimizer)
        self.models.append(model)

    def device_bytes(self) -> int:
        held = [self.booster.memory(model) for model in self.models]
        total = sum(memory.device_bytes for memory in held)
        # On a GPU nobody can tell whose an activation is.
        return total if ON_THE_CPU_DEVICE else total - sum(m.nonmodel_bytes for m in held[1:])

    def note(self) -> None:
        """All of them together, now."""
        self.held = max(self.held, self.device_bytes())
        assert self.held <= self.budget

    def check(self) -> None:
        for model in self.models:
            report = self.booster.report(model)
            assert self.held <= report.peak_device_bytes <= report.device_budget_bytes
            assert report.device_budget_bytes == self.budget
            assert report.divergent_steps == 0


def nonmodel_bytes(build: Callable[[], tuple[nn.Module, nn.Module]], step: Step) -> int:
    """Of both models, measured with room for all."""
    shared, pair = Shared("1GiB"), build()
    optimizer = optimizer_of(pair[0])
    shared.boost(pair[0], optimizer)
    shared.boost(pair[1])
    train(pair, optimizer, step, steps=2)
    return sum(shared.booster.report(model).peak_nonmodel_bytes for model in pair)


def assert_trains_in(
    fraction: float,
    build: Callable[[], tuple[nn.Module, nn.Module]],
    step: Step,
    **settings: Any,
) -> tuple[Shared, tuple[nn.Module, nn.Module]]:
    """In that share of both models' parameters, and non-model memory: plain PyTorch's bits."""
    plain = build()
    expected = train(plain, optimizer_of(plain[0]), step)
    both = sum(param_bytes(model) for model in plain)
    memory = int(fraction * both) + nonmodel_bytes(build, step)
    shared = Shared(beside_gradients(memory, plain[0]), **settings)
    pair = build()
    optimizer = optimizer_of(pair[0])
    shared.boost(pair[0], optimizer)
    shared.boost(pair[1])
    actual = train(pair, optimizer, step, after_forward=shared.note)
    if ON_THE_CPU_DEVICE:
        assert actual == expected
        assert_same_weights(pair[0], copies(plain[0].parameters()))
    for mine, theirs in zip(actual, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4)
    shared.check()
    return shared, pair


@pytest.mark.parametrize("step", [policy_first, reference_first, in_turn])
@pytest.mark.parametrize("build", [gpt2, llama])
def test_preferences_are_learned_in_six_tenths_of_both(
    build: Callable[[], nn.Module], step: Step
) -> None:
    def pair() -> tuple[nn.Module, nn.Module]:
        return policy_and_reference(lambda: build(layers=4))  # type: ignore[call-arg]

    shared, (policy, reference) = assert_trains_in(0.6, pair, step)
    assert shared.held > param_bytes(policy), "the budget is used"
    assert shared.booster.report(policy).steps == 5
    assert shared.booster.report(reference).steps == 0


@pytest.mark.parametrize("policy", ["auto", "cpu"])
@pytest.mark.parametrize("fraction", [0.3, 0.45])
def test_preferences_are_learned_in_less(policy: str, fraction: float) -> None:
    def pair() -> tuple[nn.Module, nn.Module]:
        return policy_and_reference(lambda: llama(layers=4))

    shared, models = assert_trains_in(fraction, pair, policy_first, placement_policy=policy)
    if ON_THE_CPU_DEVICE:  # elsewhere the room is larger the later streams free what they used
        assert all(shared.booster.report(model).evictions > 0 for model in models)


def test_where_there_is_room_both_stay() -> None:
    """What one fetched is there for its next pass."""
    _, shared_pair = shared_towers("1GiB")
    shared, (policy, reference) = shared_pair
    for seed in range(3):
        tower_loss(reference, seed)
    fetched = shared.booster.report(reference).h2d_bytes
    for seed in range(3):
        shared_step(shared, policy, seed)
        with torch.no_grad():
            tower_loss(reference, seed)
    assert shared.booster.report(reference).h2d_bytes == fetched


def shared_towers(
    memory: int | str, **settings: Any
) -> tuple[list[nn.Module], tuple[Shared, tuple[nn.Module, nn.Module]]]:
    """A tower that trains with AdamW and one that does not, and copies of them."""
    torch.manual_seed(3)
    plain: list[nn.Module] = [tower(), frozen(tower())]
    pair = (copy.deepcopy(plain[0]), copy.deepcopy(plain[1]))
    shared = Shared(memory, **settings)
    optimizer = torch.optim.AdamW(pair[0].parameters(), lr=LR)
    shared.boost(pair[0], optimizer)
    shared.boost(pair[1])
    shared.optimizer = optimizer  # type: ignore[attr-defined]
    return plain, (shared, pair)


def shared_step(shared: Any, model: nn.Module, seed: int) -> float:
    loss = tower_loss(model, seed)
    shared.booster.backward(loss, shared.optimizer)
    value = loss.item()
    del loss
    shared.optimizer.step()
    shared.optimizer.zero_grad()
    shared.note()
    return value


def test_an_evaluation_between_the_steps_of_the_other() -> None:
    plain, (shared, (policy, reference)) = shared_towers("40KiB")
    expected = losses_of_plain(plain[0], tower_loss)
    seen = []
    for seed in range(6):
        seen.append(shared_step(shared, policy, seed))
        with torch.no_grad():
            for other in range(2):
                value = tower_loss(reference, other)
                assert equal(value, tower_loss(plain[1], other))
                shared.note()
    assert_close_losses(seen, expected)
    shared.check()
    if ON_THE_CPU_DEVICE:
        assert shared.booster.memory(reference).nonmodel_bytes <= 64


def test_an_evaluation_between_forward_and_backward() -> None:
    """What the idle model keeps for backward stays, and counts."""
    plain, (shared, (policy, reference)) = shared_towers("40KiB")
    expected = losses_of_plain(plain[0], tower_loss)
    seen = []
    for seed in range(6):
        loss = tower_loss(policy, seed)
        kept = shared.booster.memory(policy).nonmodel_bytes
        assert kept > 0
        with torch.no_grad():
            assert equal(tower_loss(reference, seed), tower_loss(plain[1], seed))
        assert shared.booster.memory(policy).nonmodel_bytes == kept
        shared.note()
        shared.booster.backward(loss, shared.optimizer)  # type: ignore[attr-defined]
        seen.append(loss.item())
        del loss
        shared.optimizer.step()  # type: ignore[attr-defined]
        shared.optimizer.zero_grad()  # type: ignore[attr-defined]
    assert_close_losses(seen, expected)
    shared.check()


def test_two_that_train_through_each_other() -> None:
    def run(pair: list[nn.Module], steps: list[Any], note: Callable[[], None]) -> list[float]:
        losses = []
        for seed in range(6):
            batch = tower_batch(seed)
            hidden = pair[0](batch["x"])
            loss = nn.functional.cross_entropy(
                pair[1](hidden.repeat(1, 8)), batch["labels"].to(hidden.device)
            )
            note()
            loss.backward()
            note()
            losses.append(loss.item())
            del loss, hidden
            for optimizer in steps:
                optimizer.step()
                optimizer.zero_grad()
        return losses

    plain: list[nn.Module] = [tower(), tower(depth=3)]
    pair = copy.deepcopy(plain)
    expected = run(plain, [optimizer_of(model) for model in plain], lambda: None)
    shared = Shared("60KiB")
    optimizers = [optimizer_of(model) for model in pair]
    for model, optimizer in zip(pair, optimizers, strict=True):
        shared.boost(model, optimizer)
    assert run(pair, optimizers, shared.note) == pytest.approx(
        expected, rel=0 if ON_THE_CPU_DEVICE else 1e-4
    )
    for mine, theirs in zip(pair, plain, strict=True):
        if ON_THE_CPU_DEVICE:
            assert_same_weights(mine, copies(theirs.parameters()))
    shared.check()


OF_WHOLE = [
    pytest.param(settings, marks=pytest.mark.whole)
    for settings in (
        {"placement_policy": "static", "offload_optim_frac": 0.5},
        {"overlap": "forward"},
        {"link_bandwidth": "4GB/s"},
    )
]
"""Of which CI has more at once."""


@pytest.mark.parametrize(
    "settings",
    [
        *OF_WHOLE,
        {"placement_policy": "static", "offload_optim_frac": 1.0, "offload_param_frac": 0.5},
        {"placement_policy": "cuda"},
        {"overlap": "backward", "nonfinite": "ignore", "enable_gradient_accumulation": False},
        {"link_bandwidth": "4GB/s", "overlap": "forward"},
        {"precision": "bf16"},
        {"activations": "recompute"},
    ],
    ids=str,
)
def test_every_setting_gives_the_losses_of_models_with_budgets_of_their_own(
    settings: dict[str, Any],
) -> None:
    def run(own: bool) -> tuple[list[float], Shared]:
        torch.manual_seed(5)
        case = CASES["llama"]
        policy, reference = llama(layers=3), frozen(llama(layers=3))
        trains = boost(policy, "3MiB", **settings)
        other = trains.booster
        if own:
            other = castor.Booster(plugin("3MiB", **settings))
        other.boost(reference)
        shared = Shared("3MiB", **settings)
        shared.booster, shared.models = trains.booster, [policy, reference]
        losses = []
        for step in range(5):
            batch = case.batch(step)
            with torch.no_grad():
                target = reference(**batch).loss
            losses += [target.item(), *train_on(trains, case, steps=1)]
            if not own:
                shared.note()
        return losses, shared

    expected, _ = run(own=True)
    actual, shared = run(own=False)
    assert actual == expected
    shared.check()


def test_both_on_nvme(tmp_path: Path) -> None:
    """What the host has no room for, of both, in one NVMe budget."""
    settings = {"nvme_path": tmp_path, "nvme_memory": "4MiB", "nvme_offload_fraction": 1.0}
    plain, (shared, (policy, reference)) = shared_towers("45KiB", host_memory="103KiB", **settings)
    expected = losses_of_plain(plain[0], tower_loss, steps=3)
    seen = []
    for seed in range(3):
        with torch.no_grad():
            assert equal(tower_loss(reference, seed), tower_loss(plain[1], seed))
        seen.append(shared_step(shared, policy, seed))
    assert_close_losses(seen, expected)
    reports = [shared.booster.report(model) for model in (policy, reference)]
    assert sum(report.host_bytes for report in reports) <= 103 * 1024
    assert all(report.nvme_bytes > 0 for report in reports)


@OF_A_RELEASE
def test_two_that_train_from_one_directory(tmp_path: Path) -> None:
    settings = {"nvme_path": tmp_path, "nvme_memory": "1MiB", "nvme_offload_fraction": 1.0}
    plain = [tower(), tower(depth=3)]
    pair = copy.deepcopy(plain)
    shared = Shared("45KiB", **settings)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=LR) for model in pair]
    for model, optimizer in zip(pair, optimizers, strict=True):
        shared.boost(model, optimizer)
    assert {file.name for file in tmp_path.iterdir()} == {"castor.scratch", "castor-2.scratch"}
    seen: list[list[float]] = [[], []]
    for seed in range(4):
        for losses, model, optimizer in zip(seen, pair, optimizers, strict=True):
            boosted = Boosted(shared.booster, model, optimizer)
            losses.append(boosted.step(tower_loss(model, seed)))
            shared.note()
    for losses, model in zip(seen, plain, strict=True):
        assert_close_losses(losses, losses_of_plain(model, tower_loss, steps=4))
    shared.booster.release(pair[0])
    gc.collect()
    assert [file.name for file in tmp_path.iterdir()] == ["castor-2.scratch"]
    assert (
        shared.booster.memory(pair[1]).device_bytes == shared.booster.memory(pair[1]).nonmodel_bytes
    )


def test_a_device_too_small_names_both() -> None:
    _, (shared, (policy, reference)) = shared_towers("40KiB")

    def run() -> None:
        kept = [policy(torch.ones(64, 32)) for _ in range(20)]
        with torch.no_grad():
            kept.append(reference(torch.ones(64, 32)))

    with pytest.raises(castor.OutOfMemoryError) as no:
        run()
    message = str(no.value)
    assert no.value.tier == "device"
    assert no.value.budget == 40 * 1024
    for number in (1, 2):
        assert f"Tower (model {number} of its plugin) has " in message, message
    assert "Models of one plugin share this budget" in message
    del no
    gc.collect()
    policy.zero_grad()
    shared_step(shared, policy, 0)


def test_plugins_of_their_own_share_nothing() -> None:
    one, other = boost(tower(), "130KiB"), boost(tower(), "130KiB")
    for boosted in (one, other):
        boosted.step(tower_loss(boosted.model, 0))
        assert boosted.report().device_budget_bytes == 130 * 1024
    copied = copy.deepcopy(one.booster.plugin)
    booster = castor.Booster(copied)
    model = tower()
    booster.boost(model)
    held = one.booster.memory(one.model)
    with torch.no_grad():
        tower_loss(model, 0)
    assert one.booster.memory(one.model) == held


def test_two_threads() -> None:
    """Each trains its own model; chunks leave from under either, and bits stay what they are."""
    torch.manual_seed(3)
    plain = [tower(depth=4), tower(depth=5)]
    pair = copy.deepcopy(plain)
    expected = [losses_of_plain(model, tower_loss, steps=12) for model in plain]
    shared = Shared("260KiB")
    optimizers = [torch.optim.AdamW(model.parameters(), lr=LR) for model in pair]
    for model, optimizer in zip(pair, optimizers, strict=True):
        shared.boost(model, optimizer)
    seen: list[list[float]] = [[], []]

    def run(i: int) -> None:
        boosted = Boosted(shared.booster, pair[i], optimizers[i])
        for seed in range(12):
            seen[i].append(boosted.step(tower_loss(pair[i], seed)))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive()
    for actual, wanted in zip(seen, expected, strict=True):
        assert_close_losses(actual, wanted)
    shared.check()
