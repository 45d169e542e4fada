"""gather_experts=True on experts that train: steps move the rows of the experts that tokens choose.

Weights come by the row, gradients go to the host by the row. All bits are those of plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from helpers import (
    FORMATS_AND_OVERLAPS,
    Boosted,
    assert_equal,
    boost,
    copies,
    exact_state,
    on_device_of,
    param_bytes,
)
from simulated import Simulation
from test_expert_training import checkpointing
from test_experts import (
    EXPERT_BYTES,
    EXPERTS,
    LAYERS,
    MODELS,
    Routed,
    assert_same_tokens,
    generate,
    seeded,
)
from test_experts import boost as boost_for_inference

pytestmark = [
    # Tests ask transformers for what transformers 6 will rename.
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:the model's gradient checkpointing gives way:UserWarning"),
]

STEPS = 4
MAX_NORM = 0.5
SETTLED = 2
"""Steps that take full layers."""


def build(name: str = "qwen3", implementation: str = "grouped_mm") -> Any:
    return seeded(MODELS[name], implementation).requires_grad_(True).train()


def batch(step: int, micro: int = 0) -> torch.Tensor:
    """Ids of few tokens, others in each step, so that each step touches other experts."""
    return 3 + torch.arange(6).reshape(2, 3) % 4 + 5 * step + 2 * micro


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, foreach=False)


def nadam(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that castor has no kernel of: its own step runs on p.grad."""
    return torch.optim.NAdam(model.parameters(), lr=1e-2, foreach=False)


Make = Callable[[nn.Module], torch.optim.Optimizer]


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [
        torch.zeros_like(p).cpu() if p.grad is None else p.grad.detach().cpu().clone()
        for p in model.parameters()
    ]


def plain_steps(
    model: Any, make: Make = adamw, steps: int = STEPS, micros: int = 1
) -> tuple[list[float], list[torch.Tensor]]:
    """Losses, and the clipped gradients of each step."""
    optimizer, losses, found = make(model), [], []
    for step in range(steps):
        for micro in range(micros):
            ids = batch(step, micro)
            loss = model(input_ids=ids, labels=ids).loss / micros
            loss.backward()
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM, foreach=False)
        found += gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    return losses, found


def boosted_steps(
    boosted: Boosted, steps: int = STEPS, micros: int = 1
) -> tuple[list[float], list[torch.Tensor]]:
    losses, found = [], []
    for step in range(steps):
        for micro in range(micros):
            ids = batch(step, micro)
            given = on_device_of(boosted, {"input_ids": ids, "labels": ids})
            loss = boosted.model(**given).loss / micros
            boosted.booster.backward(loss, boosted.optimizer)
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(boosted.model.parameters(), MAX_NORM, foreach=False)
        found += gradients(boosted.model)
        boosted.optimizer.step()
        boosted.optimizer.zero_grad()
    return losses, found


def trained(model: Any, make: Make = adamw, memory: int = 0, **settings: Any) -> Boosted:
    """Boosts a model whose layers all stream."""
    settings = {"placement_policy": "cpu", "gather_experts": True} | settings
    return boost(model, memory or 2 * param_bytes(model), make(model), **settings)


@pytest.mark.parametrize("micros", [1, 2])
@pytest.mark.parametrize("checkpoint", ["", "reentrant", "saved tensors"])
@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm", "eager"])
@pytest.mark.parametrize("name", ["qwen3", "mixtral"])
def test_losses_gradients_and_weights_are_those_of_plain_pytorch(
    name: str, implementation: str, checkpoint: str, micros: int
) -> None:
    plain, model = build(name, implementation), build(name, implementation)
    for one in (plain, model):
        checkpointing(one, checkpoint)
    expected = plain_steps(plain, nadam, micros=micros)
    boosted = trained(model, nadam)
    found = boosted_steps(boosted, micros=micros)
    assert found[0] == expected[0]
    assert_equal(found[1], expected[1])
    assert_equal(copies(model.parameters()), copies(plain.parameters()))
    report = boosted.report()
    assert report.expert_misses > 0
    assert report.peak_device_bytes <= report.device_budget_bytes


PLACES: dict[str, dict[str, Any]] = {
    "streamed": {}, "behind a link": {"link_bandwidth": "2GB/s"},
    "some on the device": {"placement_policy": "auto"},
    "recomputed": {"activations": "recompute"}, "offloaded": {"activations": "offload"},
}  # fmt: skip


@pytest.mark.parametrize("micros", [1, 2])
@pytest.mark.parametrize("place", PLACES)
def test_adamw_has_the_bits_of_full_layers(place: str, micros: int) -> None:
    expected = plain_steps(build(), micros=micros)
    found = {}
    for choice in (False, True):
        boosted = trained(build(), gather_experts=choice, **PLACES[place])
        found[choice] = boosted_steps(boosted, micros=micros)
        assert (boosted.report().expert_misses > 0) == choice
        found[choice] += (exact_state(boosted),)
    assert found[True][0] == found[False][0] == pytest.approx(expected[0], rel=1e-3)
    assert found[True][0][:micros] == expected[0][:micros]
    assert_equal(found[True][1], found[False][1])
    assert_equal(found[True][2], found[False][2])


def test_the_link_moves_the_rows_that_tokens_touch() -> None:
    plain = build()
    routed = Routed(plain)
    model = build()
    others = sum(p.nbytes for name, p in model.named_parameters() if "experts" not in name)
    boosted = trained(model)
    boosted_steps(boosted, steps=SETTLED)
    plain.load_state_dict({name: p.detach().clone() for name, p in model.named_parameters()})
    ids = batch(3)
    plain(input_ids=ids, labels=ids).loss.backward()
    touched = sum(map(len, routed.calls))
    assert LAYERS < touched < EXPERTS * LAYERS // 2
    before = boosted.report()
    boosted.booster.backward(model(input_ids=ids, labels=ids).loss, boosted.optimizer)
    assert_equal(gradients(model), gradients(plain))
    boosted.optimizer.step()
    after = boosted.report()
    assert after.expert_misses - before.expert_misses == 2 * touched
    rows = touched * EXPERT_BYTES
    assert after.d2h_bytes - before.d2h_bytes == rows + others
    assert 2 * rows + others <= after.h2d_bytes - before.h2d_bytes <= 2 * (rows + others)


@pytest.mark.parametrize(("precision", "state_format", "overlap"), FORMATS_AND_OVERLAPS)
def test_same_bits_beside_compute_and_in_each_format(
    precision: str, state_format: str, overlap: str
) -> None:
    settings: dict[str, Any] = {"max_norm": MAX_NORM}
    if overlap == "backward":
        settings = {"enable_gradient_accumulation": False, "nonfinite": "ignore"}
    if precision == "fp16":
        settings["initial_scale"] = 64.0
    found = {}
    for choice in (False, True):
        boosted = trained(
            build(), gather_experts=choice, precision=precision, overlap=overlap,
            optim_state_format=state_format, **settings,
        )  # fmt: skip
        losses = []
        for step in range(6):
            ids = batch(step % 4)
            losses.append(boosted.step(boosted.model(input_ids=ids, labels=ids).loss))
        assert (boosted.report().expert_misses > 0) == choice
        found[choice] = losses, exact_state(boosted)
    assert found[True][0] == found[False][0]
    assert_equal(found[True][1], found[False][1])


@pytest.mark.cpu_device("plain PyTorch's bits are those of a CPU")
def test_passes_between_steps_compute_with_the_weights_of_the_last_one() -> None:
    plain = build()
    boosted = trained(build(), nadam)
    optimizer = nadam(plain)
    for step in range(STEPS):
        ids = batch(step)
        for model in (plain, boosted.model):
            model.train()
            model(input_ids=ids, labels=ids).loss.backward()
            model.eval()
        assert_same_tokens(generate(boosted.model, tokens=4), generate(plain, tokens=4))
        for one in (optimizer, boosted.optimizer):
            one.step()
            one.zero_grad()
        assert_same_tokens(generate(boosted.model, tokens=4), generate(plain, tokens=4))


def settled() -> Boosted:
    """A model that takes rows from now on, whose weights did not change."""
    boosted = trained(build(), lambda model: torch.optim.NAdam(model.parameters(), lr=0.0))
    boosted_steps(boosted, steps=SETTLED)
    return boosted


def test_gradients_that_go_elsewhere_than_to_p_grad_are_those_of_full_tensors() -> None:
    plain, boosted = build(), settled()
    ids, found = batch(0), []
    for model in (plain, boosted.model):
        model.set_attn_implementation("eager")  # the others have no second derivative
        params = [*model.model.layers[1].mlp.experts.parameters()]
        loss = model(input_ids=ids, labels=ids).loss
        first = torch.autograd.grad(loss, params, retain_graph=True)
        graph = torch.autograd.grad(loss, params, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in graph), params)
        assert params[0].grad is None
        found.append([*first, *second])
        seen: list[torch.Tensor] = []
        handle = params[0].register_hook(lambda gradient, seen=seen: seen.append(gradient.clone()))
        model(input_ids=ids, labels=ids).loss.backward()
        handle.remove()
        handle = params[1].register_post_accumulate_grad_hook(
            lambda param, seen=seen: seen.append(param.grad.clone())
        )
        model(input_ids=ids, labels=ids).loss.backward()
        handle.remove()
        found[-1] += seen
        found[-1] += gradients(model)
    assert boosted.report().expert_misses > 0
    assert len(found[0]) == len(found[1])
    assert_equal(found[1], found[0])


def test_a_parameter_that_is_frozen_later_gets_no_gradient() -> None:
    plain, boosted = build(), settled()
    ids = batch(0)
    for model in (plain, boosted.model):
        model.model.layers[1].mlp.experts.gate_up_proj.requires_grad_(False)
        model(input_ids=ids, labels=ids).loss.backward()
    assert boosted.model.model.layers[1].mlp.experts.gate_up_proj.grad is None
    assert_equal(gradients(boosted.model), gradients(plain))


def test_a_parameter_that_is_frozen_before_backward_gets_no_gradient() -> None:
    plain, boosted = build(), settled()
    for model in (plain, boosted.model):
        loss = model(input_ids=batch(0), labels=batch(0)).loss
        frozen = model.model.layers[1].mlp.experts.gate_up_proj.requires_grad_(False)
        loss.backward()
        assert frozen.grad is None
        frozen.requires_grad_(True)
    assert_equal(gradients(boosted.model), gradients(plain))


def test_parameters_may_be_stepped_within_backward() -> None:
    """By hooks, each as soon as its gradient has come."""
    plain, boosted = build(), settled()

    def step(param: torch.Tensor) -> None:
        assert param.grad is not None
        with torch.no_grad():
            param.sub_(param.grad, alpha=0.1)
        param.grad = None

    for model in (plain, boosted.model):
        experts = [p for name, p in model.named_parameters() if "experts" in name]
        handles = [param.register_post_accumulate_grad_hook(step) for param in experts]
        for i in range(2):
            model(input_ids=batch(i), labels=batch(i)).loss.backward()
        for handle in handles:
            handle.remove()
    assert boosted.report().expert_misses > 0
    assert_equal(copies(boosted.model.parameters()), copies(plain.parameters()))


@pytest.mark.parametrize("checkpoint", ["reentrant", "saved tensors"])
def test_a_pass_over_the_same_tokens_before_backward_changes_no_checkpoint(checkpoint: str) -> None:
    plain, boosted = build(), settled()
    for model in (plain, boosted.model):
        checkpointing(model, checkpoint)
        loss = model(input_ids=batch(0), labels=batch(0)).loss
        with torch.no_grad():
            model(input_ids=batch(0))
        loss.backward()
    assert_equal(gradients(boosted.model), gradients(plain))


def test_experts_that_no_optimizer_steps_have_the_cache_though_they_could_train() -> None:
    plain = build().eval()
    boosted = boost_for_inference(build().eval())
    assert_same_tokens(generate(boosted.model), generate(plain))
    assert boosted.report().expert_hits > 0


@pytest.mark.filterwarnings("ignore:the optimizer does not hold 6 parameters:UserWarning")
def test_experts_whose_gradients_no_optimizer_uses_get_torchs_own() -> None:
    plain, model = build(), build()
    others = [p for name, p in model.named_parameters() if "experts" not in name]
    boosted = boost(
        model, 4 * param_bytes(model), torch.optim.NAdam(others, lr=0.0), gather_experts=True
    )
    for _ in range(SETTLED + 1):
        model.zero_grad()
        boosted.step(model(input_ids=batch(0), labels=batch(0)).loss)
    plain(input_ids=batch(0), labels=batch(0)).loss.backward()
    mine, theirs = (m.model.layers[1].mlp.experts.down_proj.grad for m in (model, plain))
    assert_equal([mine], [theirs])


def test_a_layer_that_is_called_twice_in_a_graph_gets_both_gradients() -> None:
    plain, boosted = build(), settled()
    for model in (plain, boosted.model):
        losses = [model(input_ids=batch(i), labels=batch(i)).loss for i in range(2)]
        (losses[0] + losses[1]).backward()
    assert_equal(gradients(boosted.model), gradients(plain))


def test_writes_between_steps_reach_weights_and_masters() -> None:
    found = {}
    for choice in (False, True):
        boosted = trained(
            build(), gather_experts=choice, precision="bf16", optim_state_format="split"
        )
        losses = []
        for step in range(6):
            ids = batch(step % 2)
            losses.append(boosted.step(boosted.model(input_ids=ids, labels=ids).loss))
            experts = boosted.model.model.layers[1].mlp.experts
            with torch.no_grad():
                experts.down_proj.mul_(1.25)
                experts.gate_up_proj.data = experts.gate_up_proj.data * 0.75
        found[choice] = losses, exact_state(boosted)
    assert found[True][0] == found[False][0]
    assert_equal(found[True][1], found[False][1])


def test_a_write_between_forward_and_backward_is_an_error() -> None:
    for model in (build(), settled().model):
        loss = model(input_ids=batch(0), labels=batch(0)).loss
        with torch.no_grad():
            model.model.layers[1].mlp.experts.down_proj.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_run_goes_on_with_the_same_bits(tmp_path: Any) -> None:
    boosted = trained(build(), precision="bf16", optim_state_format="split")
    boosted_steps(boosted, steps=3)
    boosted.booster.save(tmp_path / "run", boosted.model, boosted.optimizer)
    expected = boosted_steps(boosted)[0]
    again = trained(build(), precision="bf16", optim_state_format="split")
    again.booster.load(tmp_path / "run", again.model, again.optimizer)
    assert boosted_steps(again)[0] == expected
    assert_equal(exact_state(again), exact_state(boosted))


def test_same_bits_on_a_simulated_device(simulated: Simulation) -> None:
    found = {}
    for choice in (False, True):
        model = build()
        # With room for the states that are compared: the device charges all tensors.
        boosted = simulated.boost(
            model, 16 * param_bytes(model), optimizer=adamw(model), gather_experts=choice,
            placement_policy="cpu",
        )  # fmt: skip
        losses = []
        for step in range(STEPS):
            for micro in range(2):  # the second one's gradients are added to the first one's
                ids = batch(step, micro)
                given = on_device_of(boosted, {"input_ids": ids, "labels": ids})
                loss = boosted.model(**given).loss
                boosted.booster.backward(loss, boosted.optimizer)
                losses.append(loss.item())
            boosted.optimizer.step()
            boosted.optimizer.zero_grad()
        assert (boosted.report().expert_misses > 0) == choice
        found[choice] = losses, exact_state(boosted)
    assert found[True][0] == found[False][0]
    assert_equal(found[True][1], found[False][1])
