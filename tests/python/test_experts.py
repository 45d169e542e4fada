"""gather_experts: passes without gradients fetch the experts that they need, with the same bits."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

import castor
from castor.runtime.engine import engine_of
from helpers import (
    Boosted,
    assert_equal,
    equal,
    exact_state,
    on_device_of,
    param_bytes,
    plugin,
    without_collections,
)
from helpers import boost as boost_trained
from simulated import Simulation
from zoo import VOCABULARY

EXPERTS, TOP, LAYERS, WIDTH, INNER = 16, 2, 3, 64, 32
EXPERT_BYTES = 3 * WIDTH * INNER * 4
PROMPT = torch.arange(5, 11)[None]
TOKENS = 24
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "num_experts_per_tok": TOP,
}  # fmt: skip


def qwen3() -> Any:
    config = hf.Qwen3MoeConfig(
        **SIZES, head_dim=16, intermediate_size=64, moe_intermediate_size=INNER,
        num_experts=EXPERTS, decoder_sparse_step=1, mlp_only_layers=[], norm_topk_prob=True,
    )  # fmt: skip
    return hf.Qwen3MoeForCausalLM(config)


def mixtral() -> Any:
    config = hf.MixtralConfig(**SIZES, intermediate_size=INNER, num_local_experts=EXPERTS)
    return hf.MixtralForCausalLM(config)


def gpt_oss() -> Any:
    config = hf.GptOssConfig(
        **SIZES, head_dim=16, intermediate_size=INNER, num_local_experts=EXPERTS,
        sliding_window=16, layer_types=["full_attention"] + ["sliding_attention"] * (LAYERS - 1),
    )  # fmt: skip
    return hf.GptOssForCausalLM(config)


MODELS: dict[str, Callable[[], Any]] = {"qwen3": qwen3, "mixtral": mixtral, "gpt_oss": gpt_oss}
IMPLEMENTATIONS = ("grouped_mm", "batched_mm", "eager")


def seeded(build: Callable[[], Any], implementation: str = "grouped_mm") -> Any:
    torch.manual_seed(3)
    model = build()
    for param in model.parameters():  # experts that differ, so that a wrong one is seen
        nn.init.normal_(param, std=0.2) if param.dim() > 1 else nn.init.normal_(param, 1.0, 0.1)
    model.generation_config.pad_token_id = 0
    model.set_experts_implementation(implementation)
    return model.eval().requires_grad_(False)


def boost(model: Any, memory: int | None = None, **settings: Any) -> Boosted:
    """Boosts a model for inference; without `memory`, in half of its bytes."""
    booster = castor.Booster(plugin=plugin(memory or param_bytes(model) // 2, **settings))
    model, *_ = booster.boost(model)
    return Boosted(booster, model, None)


def generate(model: Any, prompt: torch.Tensor = PROMPT, tokens: int = TOKENS) -> Any:
    prompt = prompt.to(next(iter(model.parameters())).device)
    return model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens,
        min_new_tokens=tokens, do_sample=False, output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip


def assert_same_tokens(actual: Any, expected: Any) -> None:
    assert equal(actual.sequences.cpu(), expected.sequences)
    assert_equal([x.cpu() for x in actual.logits], list(expected.logits))


class Routed:
    """Counts the experts that passes of a plain model touch."""

    def __init__(self, model: Any) -> None:
        self.calls: list[set[int]] = []
        for module in model.modules():
            if type(module).__name__.endswith("Experts"):
                module.register_forward_pre_hook(self._count)

    def _count(self, _: nn.Module, args: Any) -> None:
        self.calls.append(set(args[1].flatten().tolist()))


def assert_within_budget(boosted: Boosted) -> None:
    report = boosted.report()
    assert report.peak_device_bytes <= report.device_budget_bytes


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", MODELS)
def test_tokens_and_logits_are_those_of_plain_pytorch(name: str, implementation: str) -> None:
    plain = seeded(MODELS[name], implementation)
    routed = Routed(plain)
    model = seeded(MODELS[name], implementation)
    # batched_mm copies the experts of each token of the prompt.
    share = 1 if implementation == "batched_mm" else 2
    boosted = boost(model, param_bytes(model) // share)
    for prompt in (PROMPT, PROMPT.flip(1).repeat(2, 1)):
        assert_same_tokens(generate(boosted.model, prompt), generate(plain, prompt))
    by_row = [len(experts) for experts in routed.calls if 2 * len(experts) <= EXPERTS]
    report = boosted.report()
    assert report.expert_hits + report.expert_misses == sum(by_row)
    assert 0 < report.expert_misses < sum(by_row)
    assert report.expert_fetched_bytes % report.expert_misses == 0
    assert_within_budget(boosted)


@pytest.mark.parametrize("linked", [{}, {"link_bandwidth": "2GB/s"}], ids=["copies", "link"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_same_bits_behind_a_link_and_in_bf16(precision: str, linked: dict[str, str]) -> None:
    plain = seeded(qwen3)
    if precision == "bf16":
        plain = plain.to(torch.bfloat16)
        plain.model.rotary_emb = seeded(qwen3).model.rotary_emb
    boosted = boost(seeded(qwen3), precision=precision, **linked)
    assert_same_tokens(generate(boosted.model), generate(plain))
    report = boosted.report()
    size = EXPERT_BYTES // (2 if precision == "bf16" else 1)
    assert report.expert_fetched_bytes == report.expert_misses * size


def test_a_pass_in_inference_mode_is_as_any_other() -> None:
    plain, boosted = seeded(qwen3), boost(seeded(qwen3))
    for model in (plain, boosted.model):

        def choose(_: nn.Module, args: Any) -> None:
            args[1].add_(5).remainder_(EXPERTS)

        model.model.layers[1].mlp.experts.register_forward_pre_hook(choose)
    with torch.inference_mode():
        assert_same_tokens(generate(boosted.model), generate(plain))
    assert boosted.report().expert_misses > 0


def test_a_token_fetches_no_layer_and_only_missing_experts() -> None:
    boosted = boost(seeded(qwen3))
    generate(boosted.model)
    before = boosted.report()
    generate(boosted.model, PROMPT[:, :1])
    after = boosted.report()
    misses = after.expert_misses - before.expert_misses
    assert after.demand_fetches == before.demand_fetches
    guessed = after.expert_guessed_bytes - before.expert_guessed_bytes
    assert after.h2d_bytes - before.h2d_bytes == misses * EXPERT_BYTES + guessed
    assert 0 < misses < TOKENS * LAYERS * TOP
    assert after.expert_hits > before.expert_hits


def test_guesses_of_the_next_layers_experts_are_counted_apart() -> None:
    plain, boosted = seeded(qwen3), boost(seeded(qwen3))
    for model in (plain, boosted.model):  # what a layer adds changes little, as in trained models
        for layer in model.model.layers:
            with torch.no_grad():
                layer.self_attn.o_proj.weight.mul_(0.01)
                layer.mlp.experts.down_proj.mul_(0.01)
    assert_same_tokens(generate(boosted.model), generate(plain))
    report = boosted.report()
    guesses, rest = divmod(report.expert_guessed_bytes, EXPERT_BYTES)
    assert rest == 0
    assert 0 < guesses <= TOKENS * (LAYERS - 1)
    assert guesses // 2 < report.expert_right_guesses <= guesses
    assert report.expert_right_guesses < report.expert_hits
    assert report.expert_fetched_bytes == report.expert_misses * EXPERT_BYTES


def test_a_layer_without_a_router_beside_its_experts_is_not_guessed() -> None:
    model = seeded(qwen3)
    for layer in model.model.layers:
        layer.mlp.second = nn.Linear(WIDTH, EXPERTS, bias=False).requires_grad_(False)
    boosted = boost(model)
    assert_same_tokens(generate(boosted.model), generate(seeded(qwen3)))
    assert boosted.report().expert_misses > 0
    assert boosted.report().expert_guessed_bytes == 0


def test_other_threads_find_the_parameters_during_a_call() -> None:
    boosted = boost(seeded(qwen3))
    experts = boosted.model.model.layers[1].mlp.experts
    own = dict(experts.named_parameters())
    num_calls = 0

    def look(*_: Any) -> None:
        nonlocal num_calls
        rows = experts._parameters.get("down_proj")
        assert rows is experts._parameters["down_proj"]
        assert rows is dict(experts.named_parameters())["down_proj"]
        assert experts._parameters.get("nothing") is None
        if rows is not own["down_proj"]:
            num_calls += 1
            with ThreadPoolExecutor(1) as pool:
                assert pool.submit(lambda: experts.down_proj).result() is own["down_proj"]
                others = pool.submit(lambda: dict(experts.named_parameters())).result()
            assert others.keys() == own.keys()
            assert all(others[name] is own[name] for name in own)

    experts.act_fn.register_forward_pre_hook(look)
    generate(boosted.model)
    assert num_calls > 1
    assert experts.down_proj is own["down_proj"]


def test_hooks_of_users_see_the_experts_numbers() -> None:
    plain, boosted = seeded(qwen3), boost(seeded(qwen3))
    seen: dict[Any, list[Any]] = {plain: [], boosted.model: []}
    for model in seen:

        def note(module: nn.Module, args: Any, *_: Any, seen: list[Any] = seen[model]) -> None:
            seen.append((args[1].tolist(), module.num_experts, module.down_proj.shape))

        experts = model.model.layers[1].mlp.experts
        experts.register_forward_pre_hook(note)
        experts.register_forward_hook(note)
    assert_same_tokens(generate(boosted.model), generate(plain))
    assert boosted.report().expert_misses > 0
    assert seen[boosted.model] == seen[plain]


def test_a_hook_that_chooses_other_experts_is_heeded() -> None:
    plain, boosted = seeded(qwen3), boost(seeded(qwen3))
    for model in (plain, boosted.model):

        def choose(_: nn.Module, args: Any) -> Any:
            return args[0], (args[1] + 5) % EXPERTS, args[2]

        model.model.layers[1].mlp.experts.register_forward_pre_hook(choose)
    assert_same_tokens(generate(boosted.model), generate(plain))


def test_with_room_for_all_experts_each_is_fetched_once() -> None:
    model = seeded(qwen3)
    boosted = boost(model, 2 * param_bytes(model))
    generate(boosted.model, tokens=48)
    first = boosted.report()
    assert first.expert_misses <= LAYERS * EXPERTS
    generate(boosted.model, PROMPT[:, :1], tokens=1)
    generate(boosted.model, tokens=48)
    assert boosted.report().expert_misses <= LAYERS * EXPERTS
    assert first.expert_cache_bytes == LAYERS * EXPERTS * EXPERT_BYTES


def test_a_budget_without_room_for_a_cache_still_fetches_single_experts() -> None:
    plain, model = seeded(qwen3), seeded(qwen3)
    rest = param_bytes(model) - LAYERS * EXPERTS * EXPERT_BYTES
    boosted = boost(model, rest // 2 + EXPERTS * EXPERT_BYTES + 2**17, chunk_bytes=2**14)
    assert_same_tokens(generate(boosted.model), generate(plain))
    report = boosted.report()
    assert report.expert_misses > 0
    assert_within_budget(boosted)


def test_the_cache_gives_way_to_keys_and_values() -> None:
    plain, model = seeded(qwen3), seeded(qwen3)
    boosted = boost(model)
    rows = PROMPT.repeat(3, 1)
    generate(boosted.model)
    large = boosted.report().expert_cache_bytes
    # One row at a time needs few experts; the keys and values of three stay meanwhile.
    kept = [generate(boosted.model, row[None], tokens=100) for row in rows]
    expected = [generate(plain, row[None], tokens=100) for row in rows]
    for actual, wanted in zip(kept, expected, strict=True):
        assert_same_tokens(actual, wanted)
    assert boosted.report().expert_cache_bytes < large
    assert_within_budget(boosted)


def some_experts(model: Any, layer: int = 1) -> nn.Parameter:
    param: nn.Parameter = model.model.layers[layer].mlp.experts.down_proj
    return param


def scaled(param: torch.Tensor) -> None:
    param.mul_(1.5)


def scaled_data(param: torch.Tensor) -> None:
    param.data.mul_(1.5)


def scaled_row(param: torch.Tensor) -> None:
    for row in param.detach().unbind():
        row.copy_(row * 1.5)


def given_other_data(param: torch.Tensor) -> None:
    param.data = param.detach() * 1.5


@pytest.mark.parametrize("write", [scaled, scaled_data, scaled_row, given_other_data])
@pytest.mark.parametrize("memory", ["half", "ample"])
def test_a_write_between_calls_is_seen(write: Callable[[torch.Tensor], None], memory: str) -> None:
    plain, model = seeded(qwen3), seeded(qwen3)
    boosted = boost(model, param_bytes(model) * (2 if memory == "ample" else 1) // 2)
    generate(boosted.model)
    with torch.no_grad():
        for one in (plain, boosted.model):
            write(some_experts(one))
    assert_same_tokens(generate(boosted.model), generate(plain))


def test_weights_that_are_loaded_are_seen() -> None:
    torch.manual_seed(5)
    other = qwen3().state_dict()
    plain, boosted = seeded(qwen3), boost(seeded(qwen3))
    generate(boosted.model)
    plain.load_state_dict(other)
    boosted.model.load_state_dict(other)
    assert_same_tokens(generate(boosted.model), generate(plain))


def test_a_state_dict_has_all_experts_before_and_after_a_pass() -> None:
    plain, boosted = seeded(qwen3), boost(seeded(qwen3))
    expected = plain.state_dict()
    for _ in range(2):
        state = boosted.model.state_dict()
        assert state.keys() == expected.keys()
        assert_equal([state[name] for name in expected], [*expected.values()])
        generate(boosted.model)


class Interrupted(nn.Module):
    def forward(self, _: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt


def test_a_forward_that_fails_leaves_the_module_as_it_was() -> None:
    plain, boosted = seeded(qwen3), boost(seeded(qwen3))
    generate(boosted.model)
    experts = boosted.model.model.layers[1].mlp.experts
    act = experts.act_fn

    experts.act_fn = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        generate(boosted.model)
    experts.act_fn = act
    assert experts.num_experts == EXPERTS
    assert experts.down_proj.shape[0] == EXPERTS
    assert_same_tokens(generate(boosted.model), generate(plain))


def test_a_pass_that_needs_more_than_half_of_the_experts_takes_the_layer() -> None:
    plain, boosted = seeded(qwen3), boost(seeded(qwen3))
    ids = torch.arange(3, 3 + 64)[None]
    with torch.no_grad():
        expected = plain(input_ids=ids).logits
        assert equal(boosted.model(input_ids=ids).logits, expected)
        assert boosted.report().expert_misses == 0
        generate(boosted.model)
        assert equal(boosted.model(input_ids=ids).logits, expected)
    assert_within_budget(boosted)


def test_a_released_model_is_ordinary() -> None:
    plain, boosted = seeded(qwen3), boost(seeded(qwen3))
    generate(boosted.model)
    boosted.booster.release(boosted.model)
    assert_same_tokens(generate(boosted.model), generate(plain))
    assert all(module._compiled_call_impl is None for module in boosted.model.modules())


def trained(model: Any, *, generates: bool = True, **settings: Any) -> tuple[list[float], Boosted]:
    ids = torch.arange(3, 9).repeat(2, 2)
    boosted = boost_trained(model, param_bytes(model), **settings)
    losses = []
    for _ in range(4):
        model.train()
        loss = model(**on_device_of(boosted, {"input_ids": ids, "labels": ids})).loss
        losses.append(boosted.step(loss))
        model.eval()
        if generates:
            generate(model, tokens=4)
    return losses, boosted


def test_training_of_all_parameters_does_not_change() -> None:
    (losses, gathering), (expected, reference) = (
        trained(seeded(qwen3).requires_grad_(True), gather_experts=choice)
        for choice in ("auto", False)
    )
    assert losses == expected
    assert_equal(exact_state(gathering), exact_state(reference))
    assert gathering.report().h2d_bytes == reference.report().h2d_bytes
    assert gathering.report().expert_misses == 0


def frozen_experts() -> Any:
    model = seeded(qwen3).requires_grad_(True)
    for name, param in model.named_parameters():
        param.requires_grad_("experts" not in name)
    return model


def test_frozen_experts_are_fetched_singly_in_training_steps_and_between_them() -> None:
    (losses, gathering), (expected, reference) = (
        trained(frozen_experts(), gather_experts=choice) for choice in (True, False)
    )
    assert losses == expected
    assert_equal(exact_state(gathering), exact_state(reference))
    assert gathering.report().expert_misses > 0
    # The plan is of full layers until steps by the row repeat.
    assert (gathering.report().divergent_steps, reference.report().divergent_steps) == (2, 0)
    assert_within_budget(gathering)


def test_plans_of_training_do_not_count_the_cache() -> None:
    _, gathering = trained(frozen_experts(), gather_experts=True)
    _, reference = trained(frozen_experts(), generates=False, gather_experts=True)
    assert gathering.report().plans == reference.report().plans


def test_two_models_share_a_budget() -> None:
    plain = seeded(qwen3)
    models = [seeded(qwen3), seeded(qwen3)]
    booster = castor.Booster(plugin=plugin(param_bytes(plain)))
    for model in models:
        booster.boost(model)
    expected = generate(plain)
    for model in (*models, *models):
        assert_same_tokens(generate(model), expected)
    report = booster.report(models[0])
    assert report.peak_device_bytes <= report.device_budget_bytes


def test_the_setting_is_checked() -> None:
    with pytest.raises(castor.UsageError, match="no mixture of experts"):
        boost(nn.Linear(4, 4), 2**20, gather_experts=True)
    with pytest.raises(ValueError, match="placement_policy='cuda'"):
        plugin(gather_experts=True, placement_policy="cuda")
    with pytest.raises(ValueError, match="gather_experts is 'yes'"):
        plugin(gather_experts="yes")


def test_false_streams_layers() -> None:
    boosted = boost(seeded(qwen3), gather_experts=False)
    assert_same_tokens(generate(boosted.model), generate(seeded(qwen3)))
    report = boosted.report()
    assert (report.expert_hits, report.expert_misses, report.expert_cache_bytes) == (0, 0, 0)
    assert not any(engine_of(boosted.model).by_row)


def test_same_bits_on_a_simulated_device(simulated: Simulation) -> None:
    """Compared with full layers: transformers computes decode steps of a GPU in another way."""
    found = {}
    for choice in (False, True):
        model = frozen_experts().eval()
        boosted = simulated.boost(model, 2 * param_bytes(model), gather_experts=choice)
        found[choice] = generate(boosted.model)
        assert (boosted.report().expert_misses > 0) == choice
    assert equal(found[True].sequences.cpu(), found[False].sequences.cpu())
    for actual, expected in zip(found[True].logits, found[False].logits, strict=True):
        assert equal(actual.cpu(), expected.cpu())


def test_experts_share_no_chunk_with_other_parameters() -> None:
    boosted = boost(seeded(qwen3))
    engine = engine_of(boosted.model)
    for chunk in engine.session.chunks():
        assert len({engine.by_row[i] for i in chunk["params"]}) == 1


def test_copies_of_a_boosted_model_are_ordinary() -> None:
    boosted = boost(seeded(qwen3), 2**24)
    generate(boosted.model)
    copied = copy.deepcopy(boosted.model)
    assert all(module._compiled_call_impl is None for module in copied.modules())
    assert_same_tokens(generate(copied), generate(seeded(qwen3)))


def test_a_model_that_is_dropped_is_freed_at_once() -> None:
    model = seeded(qwen3)
    boosted, alive = boost(model), weakref.ref(model)
    generate(model)
    with without_collections():
        del boosted, model
        assert alive() is None
