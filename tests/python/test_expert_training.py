"""Adapters over frozen experts: steps fetch the experts that tokens choose, with the same bits."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as hf
from torch import nn

from castor.integrations import transformers as integration
from helpers import (
    Boosted,
    assert_equal,
    boost,
    on_device_of,
    param_bytes,
    plugin,
    without_collections,
)
from simulated import Simulation
from test_experts import EXPERT_BYTES, EXPERTS, LAYERS, MODELS, Routed, qwen3, seeded
from trainer_cases import Tokens, arguments, logged

pytestmark = [
    # peft asks transformers for what transformers 6 will rename.
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:the model's gradient checkpointing gives way:UserWarning"),
]

IDS = torch.arange(3, 13).reshape(2, 5)
"""Ten tokens: more than half of the experts of most layers, of none all."""
STEPS = 3


def adapted(
    build: Callable[[], Any] = qwen3, implementation: str = "grouped_mm", precision: str = "fp32"
) -> Any:
    """A model with LoRA on its attention, none of whose matrices is zero."""
    model = seeded(build, implementation)
    if precision == "bf16":
        rotary = model.model.rotary_emb
        model = model.to(torch.bfloat16)
        model.model.rotary_emb = rotary.float()
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False
    )
    adapted = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    torch.manual_seed(7)
    for name, param in adapted.named_parameters():
        if "lora_" in name:
            nn.init.normal_(param, std=0.1)
    return adapted.train()


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def plain_steps(model: Any, steps: int = STEPS) -> tuple[list[float], list[torch.Tensor]]:
    """Losses, and the gradients of each step."""
    optimizer = torch.optim.AdamW(trainable(model), lr=1e-2)
    losses, gradients = [], []
    for i in range(steps):
        ids = IDS + i
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(loss.item())
        gradients += [param.grad.clone() for param in trainable(model)]  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients


def boosted_steps(boosted: Boosted, steps: int = STEPS) -> tuple[list[float], list[torch.Tensor]]:
    losses, gradients = [], []
    for i in range(steps):
        batch = on_device_of(boosted, {"input_ids": IDS + i, "labels": IDS + i})
        loss = boosted.model(**batch).loss
        boosted.booster.backward(loss, boosted.optimizer)
        losses.append(loss.item())
        gradients += [p.grad.cpu().clone() for p in trainable(boosted.model)]  # type: ignore[union-attr]
        boosted.optimizer.step()
        boosted.optimizer.zero_grad()
    return losses, gradients


def planned(boosted: Boosted) -> Boosted:
    """Takes the steps that the plan is made of, which change nothing."""
    (group,) = boosted.optimizer.param_groups
    group["lr"] = 0.0
    batch = on_device_of(boosted, {"input_ids": IDS, "labels": IDS})
    for _ in range(2):
        boosted.step(boosted.model(**batch).loss)
    group["lr"] = 1e-2
    assert boosted.report().expert_misses == 0
    return boosted


def boosted(model: Any, memory: int | None = None, **settings: Any) -> Boosted:
    optimizer = torch.optim.AdamW(trainable(model), lr=1e-2)
    # No layer stays on the device, and none is measured.
    settings = {"placement_policy": "cpu", "gather_experts": True} | settings
    return planned(boost(model, memory or param_bytes(model), optimizer, **settings))


def checkpointing(model: Any, way: str) -> None:
    if way:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": way == "reentrant"})


@pytest.mark.parametrize("checkpoint", ["", "reentrant", "saved tensors"])
@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm", "eager"])
@pytest.mark.parametrize("name", ["qwen3", "mixtral"])
def test_losses_and_gradients_are_those_of_plain_pytorch(
    name: str, implementation: str, checkpoint: str
) -> None:
    plain = adapted(MODELS[name], implementation)
    checkpointing(plain, checkpoint)
    routed = Routed(plain)
    expected = plain_steps(plain, steps=1)
    found, reports = {}, {}
    for choice in (False, True):
        model = adapted(MODELS[name], implementation)
        checkpointing(model, checkpoint)
        # batched_mm copies the experts of each token.
        memory = param_bytes(model) * (2 if implementation == "batched_mm" else 1)
        trained = boosted(model, memory, gather_experts=choice)
        first = boosted_steps(trained, steps=1)
        after_first = trained.report()
        found[choice] = first, boosted_steps(trained)
        reports[choice] = trained.report()
        assert reports[choice].peak_device_bytes <= reports[choice].device_budget_bytes
    assert found[True][0][0] == found[False][0][0] == expected[0]
    assert_equal(found[True][0][1], expected[1])
    assert found[True][1][0] == found[False][1][0]
    assert_equal(found[True][1][1], found[False][1][1])
    # The first steps by the row are not as planned; then the plan is of steps by the row.
    assert (reports[True].divergent_steps, reports[False].divergent_steps) == (2, 0)
    forwards = routed.calls[:LAYERS]
    # batched_mm copies rows in forward, and backward needs the copies alone.
    times = 1 if implementation == "batched_mm" and not checkpoint else 2
    touched = sum(map(len, forwards))
    assert EXPERTS * LAYERS // 2 < touched < EXPERTS * LAYERS
    assert after_first.expert_misses == times * touched
    assert after_first.expert_fetched_bytes == times * touched * EXPERT_BYTES


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("activations", ["keep", "recompute", "offload", "auto"])
def test_same_bits_for_each_choice_of_activations(activations: str, precision: str) -> None:
    expected = plain_steps(adapted(precision=precision), steps=1)
    found = {}
    for choice in (False, True):
        model = adapted(precision=precision)
        trained = boosted(
            model, gather_experts=choice, activations=activations, precision=precision,
            memory=2 * param_bytes(model),
        )  # fmt: skip
        found[choice] = boosted_steps(trained)
        assert (trained.report().expert_misses > 0) == choice
    assert found[True][0] == found[False][0]
    assert_equal(found[True][1], found[False][1])
    assert found[True][0][:1] == expected[0]
    assert_equal(found[True][1][: len(expected[1])], expected[1])


def test_a_step_fetches_the_experts_that_256_tokens_choose() -> None:
    """64 experts, 4 a token, 2 x 128 tokens of the few words that a text has."""
    sizes = {"num_experts": 64, "num_experts_per_tok": 4}
    ids = torch.randint(3, 3 + 24, (2, 128), generator=torch.Generator().manual_seed(1))

    def build() -> Any:
        config = qwen3().config
        config.update(sizes)
        return type(qwen3())(config)

    plain = adapted(build)
    routed = Routed(plain)
    plain(input_ids=ids, labels=ids).loss.backward()
    touched = sum(map(len, routed.calls))
    model = adapted(build)
    trained = boosted(model, 2 * param_bytes(model))
    trained.step(trained.model(input_ids=ids, labels=ids).loss)
    fetched = trained.report().expert_fetched_bytes / EXPERT_BYTES
    assert 2 * touched <= fetched <= 1.1 * 2 * touched
    assert touched < 0.75 * 64 * LAYERS


def test_the_link_moves_rows_and_the_other_parameters_and_no_more() -> None:
    model = adapted()
    others = sum(p.nbytes for name, p in model.named_parameters() if ".experts." not in name)
    trained = boosted(model, 2 * param_bytes(model))
    for step in range(5):
        before = trained.report()
        trained.step(trained.model(input_ids=IDS + step, labels=IDS + step).loss)
        after = trained.report()
        rows = after.expert_fetched_bytes - before.expert_fetched_bytes
        moved = after.h2d_bytes - before.h2d_bytes
        assert 0 < rows < moved <= rows + 2 * others


def test_a_layer_is_fetched_in_full_where_a_call_needs_nearly_all_experts() -> None:
    few, many = IDS, torch.arange(3, 3 + 128).reshape(2, 64)
    plain, model = adapted(), adapted()
    trained = boosted(model, 2 * param_bytes(model))
    routed = Routed(plain)
    full, expected, misses = set(), [], []
    for ids in (few, many, few, few[:, :1], few):
        plain(input_ids=ids, labels=ids)
        needed = [len(experts) for experts in routed.calls[-LAYERS:]]
        full |= {layer for layer in range(LAYERS) if 11 * needed[layer] > 10 * EXPERTS}
        full -= {layer for layer in range(LAYERS) if 2 * needed[layer] <= EXPERTS}
        expected.append(2 * sum(needed[layer] for layer in range(LAYERS) if layer not in full))
        before = trained.report().expert_misses
        trained.booster.backward(trained.model(input_ids=ids, labels=ids).loss, trained.optimizer)
        misses.append(trained.report().expert_misses - before)
    assert misses == expected
    assert misses[1] == misses[2] == 0 < misses[3] < misses[0] == misses[4]


def test_micro_batches_of_both_kinds_go_through_one_checkpoint() -> None:
    few, many = IDS, torch.arange(3, 3 + 128).reshape(2, 64)
    gradients = {}
    for choice in (False, True):
        model = adapted()
        checkpointing(model, "saved tensors")
        trained = boosted(model, 2 * param_bytes(model), gather_experts=choice)
        losses = [trained.model(input_ids=ids, labels=ids).loss for ids in (few, many)]
        trained.booster.backward(losses[0] + losses[1], trained.optimizer)
        gradients[choice] = [p.grad.clone() for p in trainable(model)]  # type: ignore[union-attr]
    assert_equal(gradients[True], gradients[False])


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_a_pass_over_the_same_tokens_before_backward_changes_nothing(activations: str) -> None:
    plain, mine = adapted(), boosted(adapted(), activations=activations).model
    found = []
    for model in (plain, mine):
        loss = model(input_ids=IDS, labels=IDS).loss
        with torch.no_grad():
            again = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        found.append([again, *(param.grad for param in trainable(model))])
    assert_equal(found[1], found[0])


def test_backward_of_a_retained_graph_fetches_again() -> None:
    plain, trained = adapted(), boosted(adapted())
    gradients = []
    for model in (plain, trained.model):
        model.base_model.model.set_attn_implementation("eager")  # the others have no second one
        loss = model(input_ids=IDS, labels=IDS).loss
        some = trainable(model)[:2]
        first = torch.autograd.grad(loss, some, retain_graph=True)
        assert_equal(torch.autograd.grad(loss, some, retain_graph=True), first)
        penalty = sum(g.square().sum() for g in torch.autograd.grad(loss, some, create_graph=True))
        gradients.append([*first, *torch.autograd.grad(penalty, some)])
    assert_equal(gradients[1], gradients[0])


def test_a_write_between_forward_and_backward_is_an_error() -> None:
    for model in (adapted(), boosted(adapted()).model):
        loss = model(input_ids=IDS, labels=IDS).loss
        with torch.no_grad():
            model.base_model.model.model.layers[1].mlp.experts.down_proj.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


class Nothing:
    """A hook of a graph, to see when the graph is freed."""

    def __call__(self, *_: Any) -> None: ...


def test_a_graph_that_is_dropped_is_freed_at_once() -> None:
    trained = boosted(adapted())
    loss = trained.model(input_ids=IDS, labels=IDS).loss
    torch.autograd.grad(loss, trainable(trained.model)[-1:], retain_graph=True)
    hook = Nothing()
    loss.grad_fn.register_hook(hook)
    alive = weakref.ref(hook)
    with without_collections():
        del loss, hook
        assert alive() is None


def test_same_bits_on_a_simulated_device(simulated: Simulation) -> None:
    found = {}
    for choice in (False, True):
        model = adapted()
        optimizer = torch.optim.AdamW(trainable(model), lr=1e-2)
        trained = planned(
            simulated.boost(
                model, 2 * param_bytes(model), optimizer=optimizer, gather_experts=choice,
                placement_policy="cpu",
            )
        )  # fmt: skip
        found[choice] = boosted_steps(trained)
        assert (trained.report().expert_misses > 0) == choice
    assert found[True][0] == found[False][0]
    assert_equal(found[True][1], found[False][1])


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("name", ["qwen3", "mixtral"])
def test_an_unmodified_trainer_trains_the_same_adapters(
    name: str, checkpoint: bool, tmp_path: Path
) -> None:
    found = {}
    for choice in (False, True):
        model = adapted(MODELS[name])
        chosen = plugin(2 * param_bytes(model), gather_experts=choice, placement_policy="cpu")
        run = integration.trainer(hf.Trainer, chosen)(
            model=model,
            args=arguments(
                tmp_path / str(choice), max_steps=5, activation_checkpointing=checkpoint
            ),
            train_dataset=Tokens(),
        )
        run.train()
        found[choice] = logged(run, "loss"), logged(run, "grad_norm")
        state = [param.detach().clone() for param in trainable(run.model)]
        found[choice] = *found[choice], state
        assert (run.castor.report(run.model).expert_misses > 0) == choice  # type: ignore[attr-defined]
    assert found[True][:2] == found[False][:2]
    assert len(found[True][0]) == 5
    assert_equal(found[True][2], found[False][2])


@pytest.mark.parametrize("words", [2, 128])
def test_auto_takes_rows_where_they_are_fewer_bytes_than_the_plan_streams(words: int) -> None:
    ids = 3 + torch.arange(128).reshape(2, 64) % words
    moved, misses = {}, {}
    for choice in ("auto", False):
        model = adapted()
        trained = boost(
            model, 2 * param_bytes(model), torch.optim.AdamW(trainable(model), lr=0.0),
            placement_policy="cpu", gather_experts=choice,
        )  # fmt: skip
        for _ in range(8):
            before = trained.report().h2d_bytes
            trained.step(trained.model(input_ids=ids, labels=ids).loss)
        moved[choice] = trained.report().h2d_bytes - before
        misses[choice] = trained.report().expert_misses
    assert misses[False] == 0
    assert (misses["auto"] > 0) == (words == 2)
    assert moved["auto"] < moved[False] if words == 2 else moved["auto"] == moved[False]
