"""generate and evaluation inside a budget: plain PyTorch's tokens, no fetch on demand behind the
first token, and training that does not notice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from helpers import (
    ON_THE_CPU_DEVICE,
    Boosted,
    assert_equal,
    boost,
    copies,
    equal,
    exact_state,
    on_device_of,
    param_bytes,
)
from zoo import VOCABULARY

NEW_TOKENS = 64
POSITIONS = 128
PROMPT = torch.arange(5, 11)[None]
GREEDY: dict[str, Any] = {}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "sampling": {"do_sample": True, "top_k": 20},
    "beams": {"num_beams": 3},
}


def gpt2(*, width: int = 128, layers: int = 8) -> Any:
    config = hf.GPT2Config(
        vocab_size=VOCABULARY, n_embd=width, n_layer=layers, n_head=4, n_positions=POSITIONS,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return hf.GPT2LMHeadModel(config)


def llama() -> Any:
    config = hf.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=384, num_hidden_layers=8,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=POSITIONS,
    )  # fmt: skip
    return hf.LlamaForCausalLM(config)


def t5() -> Any:
    config = hf.T5Config(
        vocab_size=VOCABULARY, d_model=128, d_ff=256, d_kv=32, num_layers=4, num_heads=4,
        dropout_rate=0.0, decoder_start_token_id=0,
    )  # fmt: skip
    return hf.T5ForConditionalGeneration(config)


MODELS: dict[str, Callable[[], Any]] = {"gpt2": gpt2, "llama": llama, "t5": t5}


def seeded(build: Callable[[], Any]) -> Any:
    torch.manual_seed(3)
    model = build()
    model.generation_config.pad_token_id = 0
    return model


def half_of(build: Callable[[], Any]) -> int:
    """Half of the parameters' bytes."""
    return param_bytes(seeded(build)) // 2


class Watch(hf.StoppingCriteria):
    """What the report says after each token; stops nothing."""

    def __init__(self, boosted: Boosted) -> None:
        self.boosted = boosted
        self.demand_fetches: list[int] = []
        self.h2d_bytes: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        report = self.boosted.report()
        self.demand_fetches.append(report.demand_fetches)
        self.h2d_bytes.append(report.h2d_bytes)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


@contextmanager
def evaluated(model: Any) -> Iterator[None]:
    model.eval()
    yield
    model.train()


def generate(
    model: Any, *, tokens: int = NEW_TOKENS, prompt: torch.Tensor = PROMPT, **how: Any
) -> Any:
    prompt = prompt.to(next(iter(model.parameters())).device)
    with evaluated(model):
        return model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens,
            min_new_tokens=tokens, **({"do_sample": False} | how),
        )  # fmt: skip


def watched(boosted: Boosted, **how: Any) -> Watch:
    watch = Watch(boosted)
    generate(boosted.model, stopping_criteria=[watch], **how)
    return watch


def language_loss(boosted: Boosted, seed: int, *, rows: int = 1, length: int = 16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
    loss: torch.Tensor = boosted.model(
        **on_device_of(boosted, {"input_ids": ids, "labels": ids})
    ).loss
    return loss


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_plain_pytorch(name: str, way: str) -> None:
    boosted = boost(seeded(MODELS[name]), half_of(MODELS[name]))
    plain = seeded(MODELS[name])
    for _ in range(2):  # the second one begins with a plan
        tokens = []
        for model in (boosted.model, plain):
            torch.manual_seed(11)
            tokens.append(generate(model, tokens=12, **WAYS[way]))
        assert equal(tokens[0], tokens[1])
    report = boosted.report()
    assert report.peak_device_bytes <= report.device_budget_bytes


@pytest.mark.parametrize("linked", [{}, {"link_bandwidth": "2GB/s"}], ids=["copies", "link"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_nothing_is_fetched_on_demand_after_the_first_token(
    name: str, way: str, linked: dict[str, str]
) -> None:
    budget = half_of(MODELS[name]) + largest_gradient(MODELS[name], linked)
    boosted = boost(seeded(MODELS[name]), budget, **linked)
    watch = watched(boosted, **WAYS[way])
    assert len(watch.demand_fetches) == NEW_TOKENS
    assert watch.demand_fetches[0] > 0
    assert watch.demand_fetches[-1] == watch.demand_fetches[0]
    report = boosted.report()
    assert report.peak_device_bytes <= report.device_budget_bytes == budget


def largest_gradient(build: Callable[[], Any], linked: dict[str, str]) -> int:
    """What a device with a link keeps for gradients on their way (docs/design/0016)."""
    if not linked:
        return 0
    return max(p.numel() * p.element_size() for p in build().parameters())


def test_an_encoder_and_its_decoder_fetch_nothing_on_demand_once_decoding_repeats() -> None:
    watch = watched(boost(seeded(t5), half_of(t5)))
    assert watch.demand_fetches[-1] == watch.demand_fetches[2]


def test_a_second_generate_begins_with_the_plan_of_the_first() -> None:
    boosted = boost(seeded(gpt2), half_of(gpt2))
    first = watched(boosted, tokens=8)
    second = watched(boosted, tokens=8)
    assert second.demand_fetches[-1] == first.demand_fetches[-1]


def test_a_token_costs_the_parameters_less_what_stays() -> None:
    def build() -> Any:
        return gpt2(width=64, layers=24)

    total = param_bytes(seeded(build))
    boosted = boost(seeded(build), half_of(build))
    watch = watched(boosted, tokens=16)
    report = boosted.report()
    chunk = report.chunk_bytes
    for before, after in zip(watch.h2d_bytes[3:], watch.h2d_bytes[4:], strict=False):
        streamed = after - before
        room = report.device_budget_bytes - report.peak_nonmodel_bytes
        assert streamed <= total - room + 4 * chunk


def test_the_cache_is_charged_and_chunks_give_way_to_it() -> None:
    boosted = boost(seeded(gpt2), half_of(gpt2))
    rows = 3
    watch = watched(boosted, prompt=PROMPT.repeat(rows, 1))
    layers, width, kept = 8, 128, PROMPT.shape[1] + NEW_TOKENS - 1
    cache = 2 * layers * width * kept * rows * 4
    report = boosted.report()
    assert report.peak_nonmodel_bytes >= cache
    assert report.peak_device_bytes <= report.device_budget_bytes
    streamed = [b - a for a, b in zip(watch.h2d_bytes[2:], watch.h2d_bytes[3:], strict=False)]
    assert sum(streamed[-8:]) > sum(streamed[:8])
    assert watch.demand_fetches[-1] == watch.demand_fetches[0]


def trained(boosted: Boosted, between: Callable[[Boosted], Any], steps: int = 5) -> list[int]:
    """Demand fetches of each step."""
    fetches = []
    for seed in range(steps):
        between(boosted)
        before = boosted.report().demand_fetches
        boosted.step(language_loss(boosted, seed))
        fetches.append(boosted.report().demand_fetches - before)
    return fetches


def evaluation(boosted: Boosted) -> None:
    with evaluated(boosted.model), torch.no_grad():
        for seed in range(3):
            language_loss(boosted, 100 + seed)


def generation(boosted: Boosted) -> None:
    with torch.random.fork_rng():
        generate(boosted.model, tokens=5, do_sample=True)


@pytest.mark.parametrize("between", [evaluation, generation])
@pytest.mark.parametrize("settings", [{}, {"link_bandwidth": "4GB/s", "overlap": "forward"}])
def test_training_does_not_notice(
    between: Callable[[Boosted], Any], settings: dict[str, Any]
) -> None:
    budget = half_of(gpt2) + largest_gradient(gpt2, settings)
    alone = boost(seeded(gpt2), budget, **settings)
    beside = boost(seeded(gpt2), budget, **settings)
    expected = trained(alone, lambda _: None)
    found = trained(beside, between)
    assert_equal(exact_state(beside), exact_state(alone))
    assert beside.report().divergent_steps == 0
    if not ON_THE_CPU_DEVICE and settings:
        return  # side streams free at other moments in each run: a step may press, and plans again
    assert beside.report().plans == alone.report().plans
    assert all(mine <= theirs for mine, theirs in zip(found[1:], expected[1:], strict=True))


def test_an_evaluation_that_presses_does_not_plan_training_again() -> None:
    def pressing(boosted: Boosted) -> None:
        with evaluated(boosted.model), torch.no_grad():
            language_loss(boosted, 100, rows=4, length=32)

    budget = half_of(gpt2)
    alone, beside = (boost(seeded(gpt2), budget, gpu_margin_mem_ratio=0.0) for _ in range(2))
    trained(alone, lambda _: None)
    trained(beside, pressing)
    assert beside.report().evictions > alone.report().evictions
    assert beside.report().plans == alone.report().plans


@pytest.mark.parametrize("between", [evaluation, generation])
def test_chunks_with_their_optimizer_states_stay_on_the_device(
    between: Callable[[Boosted], Any],
) -> None:
    boosted = boost(seeded(gpt2), 3 * param_bytes(gpt2()))
    trained(boosted, lambda _: None)
    before = boosted.report()
    assert before.resident_chunks > 0
    between(boosted)
    trained(boosted, between, steps=2)
    after = boosted.report()
    assert (after.resident_bytes, after.plans) == (before.resident_bytes, before.plans)


def test_generation_within_a_step_changes_nothing() -> None:
    results = []
    for inside in (False, True):
        boosted = boost(seeded(gpt2), half_of(gpt2))
        for seed in range(4):
            boosted.booster.backward(language_loss(boosted, seed), boosted.optimizer)
            if inside:
                generation(boosted)
            loss = language_loss(boosted, seed + 50)
            if inside:
                evaluation(boosted)
            boosted.booster.backward(loss, boosted.optimizer)
            boosted.optimizer.step()
            boosted.optimizer.zero_grad()
        report = boosted.report()
        assert report.divergent_steps == 0
        assert report.peak_device_bytes <= report.device_budget_bytes
        results.append(exact_state(boosted))
    assert_equal(*results)


def test_weights_written_between_two_generates_are_read() -> None:
    boosted, plain = boost(seeded(gpt2), half_of(gpt2)), seeded(gpt2)
    for seed in range(3):
        assert equal(generate(boosted.model, tokens=6), generate(plain, tokens=6))
        for model in (boosted.model, plain):
            generator = torch.Generator().manual_seed(seed)
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(0.05 * torch.randn(p.shape, generator=generator).to(p.device))
    assert_equal(copies(boosted.model.parameters()), copies(plain.parameters()))


@pytest.mark.parametrize("linked", [{}, {"link_bandwidth": "4GB/s"}], ids=["copies", "link"])
def test_weights_on_nvme_generate_too(tmp_path: Path, linked: dict[str, str]) -> None:
    size = param_bytes(seeded(gpt2))
    boosted = boost(
        seeded(gpt2), half_of(gpt2) + largest_gradient(gpt2, linked),
        host_memory=size, nvme_path=str(tmp_path), nvme_memory="1GiB", **linked,
    )  # fmt: skip
    assert boosted.report().nvme_weight_bytes > 0
    plain = seeded(gpt2)
    for _ in range(2):
        assert equal(generate(boosted.model, tokens=8), generate(plain, tokens=8))
    boosted.step(language_loss(boosted, 0))
    generate(boosted.model, tokens=8)
