"""activations="auto": the step that is predicted is the one that runs; the fastest is chosen."""

import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import castor.report
import grids
from castor.activations import auto
from castor.activations.block_profile import Decided
from castor.activations.blocks import find_blocks
from castor.activations.choices import Choice, Decisions
from castor.runtime.engine import engine_of
from helpers import (
    GIB,
    ON_THE_CPU_DEVICE,
    Boosted,
    assert_equal,
    boost,
    copies,
    on_device_of,
    train_on,
    without_collections,
)
from test_recomputed_blocks import (
    MODELS,
    SOME_MODELS,
    of_boosted,
    of_plain,
    own,
    small,
    with_dropout,
)
from zoo import VOCABULARY, Batch, Case, gpt2, llama

RANDOM_STATE_BYTES = torch.get_rng_state().nbytes
KEEP_NONE, KEEP_ONE, KEEP_ALL = 0, 1, 1000


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """A GPU counts all memory that there is, also that of models which nobody has any more."""
    yield
    gc.collect()


DEEP = replace(MODELS["llama"], name="deep", build=lambda: llama(layers=8))
LONG = replace(DEEP, name="long", batch=lambda seed: longer(8, 64, seed))
"""Its blocks save tensors that are large enough to be offloaded."""


def longer(rows: int, length: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def choosing(decided: Callable[[int], Decisions], monkeypatch: pytest.MonkeyPatch) -> list[Choice]:
    """From now on that is decided for so many blocks; gives the choices."""
    chosen: list[Choice] = []

    def search(choice: Callable[[Decisions], Choice], num_blocks: int, _: int) -> Choice:
        chosen.append(choice(decided(num_blocks)))
        return chosen[-1]

    monkeypatch.setattr(auto, "search", search)
    return chosen


def last_kept(kept: int, others: Decided = "recompute") -> Callable[[int], Decisions]:
    """So many of the last blocks are kept, or all there are."""
    return lambda blocks: (*[others] * (blocks - kept), *["keep"] * min(kept, blocks))  # type: ignore[arg-type, list-item]


def step(boosted: Boosted, batch: Batch, case: Case, micro_batches: int = 1) -> float:
    for _ in range(micro_batches):
        loss = case.loss(boosted.model(**batch), batch)
        boosted.booster.backward(loss, boosted.optimizer)
    boosted.optimizer.step()
    boosted.optimizer.zero_grad()
    return loss.item()


def moments(boosted: Boosted) -> list[tuple[int, int, int]]:
    """(kind, id, non-model bytes) of the last step."""
    timeline = engine_of(boosted.model).session.timeline()
    assert timeline is not None
    return [(moment[0], moment[1], moment[4]) for moment in timeline["events"]]


def block_input_bytes(case: Case) -> int:
    batch = case.batch(0)
    tokens = next(iter(batch.values())).shape[:2].numel()
    return 4 * 48 * max(tokens, 4 * 17)  # the models are 48 wide; ViT's images have 17 patches


def peaks(boosted: Boosted, choice: Choice) -> tuple[int, int]:
    """Non-model bytes of the last step, predicted and actual; its moments are those predicted."""
    found = moments(boosted)
    assert [event[:2] for event in found] == [event[:2] for event in choice.events]
    return max(event[2] for event in choice.events), max(event[2] for event in found)


def without_offload(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on what is not kept is recomputed."""
    search = auto.search

    def searched(choice: Callable[[Decisions], Choice], blocks: int, most: int) -> Choice:
        def found(decisions: Decisions) -> Choice:
            return replace(
                choice(decisions), **{"spare_bytes": -1} if "offload" in decisions else {}
            )

        return search(found, blocks, most)

    monkeypatch.setattr(auto, "search", searched)


def test_host_memory_that_is_full_is_not_offloaded_to(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = choosing(last_kept(KEEP_NONE, "offload"), monkeypatch)
    host = boost(LONG.model()).report().host_bytes + (1 << 20)
    boosted = boost(LONG.model(), host_memory=host, activations="auto", tile_logits=False)
    step(boosted, LONG.batch(0), LONG)
    assert not chosen[0].fits


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("kept", [KEEP_NONE, KEEP_ONE, KEEP_ALL])
@pytest.mark.parametrize("name", SOME_MODELS)
def test_the_step_that_is_predicted_is_the_step_that_runs(
    name: str, kept: int, micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = MODELS[name]
    chosen = choosing(last_kept(kept), monkeypatch)
    boosted = boost(case.model(), activations="auto", tile_logits=False)
    plain = boost(case.model(), tile_logits=False)
    for number in range(3):
        batch = case.batch(number)
        assert step(boosted, batch, case, micro_batches) == step(plain, batch, case, micro_batches)
        assert len(chosen) == 1
        if number == 0:
            continue
        predicted, actual = peaks(boosted, chosen[0])
        # Above: of each block a random state, an input and an output that are not kept, and the
        # output that the profile compares. Below: what backward of a kept block holds longer.
        extra = 2 * block_input_bytes(case) + RANDOM_STATE_BYTES * micro_batches
        assert predicted - actual <= extra * (1 + boosted.report().activation_blocks)
        assert actual - predicted <= 0.05 * actual
    report = boosted.report()
    assert report.recomputed_blocks == report.activation_blocks - min(
        kept, report.activation_blocks
    )
    assert (report.saved_activation_bytes > 0) == (kept > 0)
    assert (report.recompute_seconds > 0) == (report.recomputed_blocks > 0)
    assert report.divergent_steps == 0
    assert_equal(copies(boosted.model.parameters()), copies(plain.model.parameters()))


def deeper(name: str) -> Case:
    """A model of four blocks, whose tensors are large enough to be offloaded."""
    configs = {
        "llama": (hf.LlamaConfig, {"num_key_value_heads": 2}),
        "gpt2": (
            hf.GPT2Config,
            {"bos_token_id": 0} | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        ),
        "glm": (hf.GlmConfig, {"num_key_value_heads": 2, "head_dim": 12}),
        "mistral": (hf.MistralConfig, {"num_key_value_heads": 2}),
        "gemma2": (hf.Gemma2Config, {"head_dim": 12, "num_key_value_heads": 2}),
        "qwen3": (hf.Qwen3Config, {"num_key_value_heads": 2, "head_dim": 12}),
        "bloom": (hf.BloomConfig, {"n_layer": 4, "n_head": 4}),
        "falcon": (hf.FalconConfig, {"alibi": False}),
        "gpt-neox": (hf.GPTNeoXConfig, {}),
        "phi": (hf.PhiConfig, {}),
        "olmo2": (hf.Olmo2Config, {"num_key_value_heads": 2}),
    }
    config, settings = configs[name]
    common = {"num_hidden_layers": 4, "pad_token_id": 0, "eos_token_id": 0}
    return Case(
        name,
        small(config, **(common | settings)),
        lambda seed: longer(4, 48, seed),
        lambda out, _: out.loss,
    )


MIXTURES: list[tuple[Decided, ...]] = [
    ("offload", "offload", "offload", "offload"),
    ("offload", "keep", "offload", "recompute"),
    ("recompute", "offload", "offload", "keep"),
    ("keep", "recompute", "keep", "recompute"),
    ("offload", "recompute", "keep", "offload"),
]


@pytest.mark.parametrize("link", [{}, {"link_bandwidth": "1GB/s"}], ids=["memory", "link"])
@pytest.mark.parametrize(
    "name",
    grids.some(
        ("bloom", "falcon", "gemma2", "glm", "gpt-neox", "gpt2", "llama", "mistral", "olmo2", "phi",
         "qwen3"),
        "falcon", "gemma2", "gpt2", "llama",
    ),
)  # fmt: skip
def test_the_step_of_any_mixture_is_the_step_that_runs(
    name: str, link: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    case, batch_tokens = deeper(name), 4 * 48
    plain = boost(case.model(), tile_logits=False)
    losses = train_on(plain, case, steps=2)
    for mixture in MIXTURES:
        chosen = choosing(lambda _, mixture=mixture: mixture, monkeypatch)  # type: ignore[misc]
        boosted = boost(case.model(), activations="auto", tile_logits=False, **link)
        assert train_on(boosted, case, steps=2) == losses
        predicted, actual = peaks(boosted, chosen[0])
        # Gemma 2 has norms behind what its second forwards stop at.
        inputs = (2 if name == "gemma2" else 1) * 4 * 48 * batch_tokens
        assert predicted - actual <= inputs + 4 * RANDOM_STATE_BYTES
        # Side streams free what they have copied later than the thread that computes would.
        assert actual - predicted <= (inputs / 4 if ON_THE_CPU_DEVICE else inputs)
        assert_same_step_time(boosted, chosen[0])
        report = boosted.report()
        assert report.recomputed_blocks == mixture.count("recompute")
        assert report.offloaded_blocks == mixture.count("offload")
        assert report.divergent_steps == 0
        monkeypatch.undo()
        del boosted
        gc.collect()


def assert_same_step_time(boosted: Boosted, choice: Choice) -> None:
    """The simulator gives the step that was predicted and the one that ran the same seconds."""
    policy = engine_of(boosted.model).blocks._auto  # type: ignore[attr-defined]
    timeline = engine_of(boosted.model).session.timeline()
    assert timeline is not None
    ran = [(m[0], m[1], m[4], m[2]) for m in timeline["events"]]
    seconds = [1e-4] * len(ran)
    for share in (0.5, 0.8, 1.2):  # of what takes parameters and activations
        memory = boosted.report().peak_nonmodel_bytes + int(share * (1 << 20))
        options = policy._options() | {"device_bytes": memory}
        times = [
            policy._simulator.run(events, seconds, options)["step_seconds"]
            for events in (choice.events, ran)
        ]
        assert times[0] == pytest.approx(times[1], rel=0.01)


@dataclass
class Figures:
    """Of a run with room for everything."""

    losses: list[float]
    weights: list[torch.Tensor]
    peak_device_bytes: int
    peak_nonmodel_bytes: int


@functools.cache
def whole_run(activations: str, steps: int = 4) -> Figures:
    boosted = boost(DEEP.model(), activations=activations, tile_logits=False)
    losses = train_on(boosted, DEEP, steps=steps)
    report = boosted.report()
    found = Figures(
        losses, copies(boosted.model.parameters()), report.peak_device_bytes,
        report.peak_nonmodel_bytes,
    )  # fmt: skip
    del boosted
    gc.collect()
    return found


def test_a_budget_keeps_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    without_offload(monkeypatch)
    monkeypatch.setattr(auto, "_fault_seconds", lambda: 0.0)  # new memory is slow on busy machines
    kept, least = whole_run("keep"), whole_run("recompute")
    recomputed = []
    for budget in (3 * least.peak_nonmodel_bytes, kept.peak_nonmodel_bytes, GIB):
        boosted = boost(DEEP.model(), budget, activations="auto", tile_logits=False)
        assert train_on(boosted, DEEP) == kept.losses
        report = boosted.report()
        assert report.divergent_steps == 0
        assert report.peak_device_bytes <= budget
        recomputed.append(report.recomputed_blocks)
        shown = castor.report.summary(boosted.model)
        assert ("of 8 blocks" in shown) is (report.recomputed_blocks > 0)
        assert_equal(copies(boosted.model.parameters()), kept.weights)
        del boosted
        gc.collect()
    # How many follows from times: a slower machine may recompute more of them in the second budget.
    assert recomputed[0] > 0
    assert recomputed[1] > 0
    assert recomputed[2] == 0


def test_a_shortage_in_mid_forward_recomputes_the_blocks_that_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without_offload(monkeypatch)
    kept = whole_run("keep", steps=5)
    budget = kept.peak_nonmodel_bytes
    boosted = boost(DEEP.model(), budget, activations="auto", tile_logits=False)
    embedding, device = boosted.model.get_input_embeddings(), engine_of(boosted.model).device
    held: list[torch.Tensor] = []
    for number in range(5):
        hook = None
        if number == 3:  # somebody keeps more, from the first module on, than the margin of a block
            more = 2 * boosted.report().saved_activation_bytes // 5 // 4
            hook = embedding.register_forward_hook(
                lambda *_, more=more: held.append(torch.zeros(more, device=device))
            )
        batch = on_device_of(boosted, DEEP.batch(number))
        assert step(boosted, batch, DEEP) == kept.losses[number]
        assert boosted.report().divergent_steps == (0 if number < 3 else 1)
        assert 0 < boosted.report().recomputed_blocks < 8
        if hook:
            hook.remove()
            held.clear()
    assert boosted.report().peak_device_bytes <= budget


def deep_with_dropout() -> Case:
    return replace(MODELS["gpt2"], build=lambda: gpt2(dropout=0.1, layers=6))


def passes_of(
    boosted: Boosted, case: Case, fault: Callable[[int], Any] = lambda _: None, steps: int = 5
) -> list[Any]:
    """Losses, gradients and random numbers of steps, and the weights; fault(step) before each."""
    torch.manual_seed(7)
    found: list[Any] = []
    for number in range(steps):
        batch = on_device_of(boosted, case.batch(number))
        fault(number)
        loss = case.loss(boosted.model(**batch), batch)
        boosted.booster.backward(loss, boosted.optimizer)
        found += [loss.detach().cpu(), torch.rand(2)]
        found += copies(p.grad for p in boosted.model.parameters() if p.grad is not None)
        boosted.optimizer.step()
        boosted.optimizer.zero_grad()
    return [*found, *copies(boosted.model.parameters())]


@pytest.mark.parametrize("dropout", [False, True], ids=["", "dropout"])
@pytest.mark.parametrize("name", SOME_MODELS)
def test_random_decisions_have_plain_pytorchs_bits(
    name: str, dropout: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = MODELS[name]
    case = replace(case, build=with_dropout(case.build)) if dropout else case
    random = Random(f"{name}, {dropout}")
    choices: tuple[Decided, ...] = ("keep", "recompute", "offload")
    blocks = find_blocks(case.model())
    expected = of_plain(case)
    by_hand = {block: random.choice(choices) for block in blocks}
    found, report = of_boosted(case, activations=by_hand)
    assert_equal(found, expected)
    assert report.divergent_steps == 0
    kept = passes_of(boost(case.model(), tile_logits=False), case, steps=3)
    choosing(lambda blocks: tuple(random.choice(choices) for _ in range(blocks)), monkeypatch)
    boosted = boost(case.model(), activations="auto", tile_logits=False)
    assert_equal(passes_of(boosted, case, steps=3), kept)
    assert boosted.report().divergent_steps == 0


@pytest.mark.parametrize("decided", ["keep", "recompute", "offload"])
def test_an_input_written_in_place_raises_as_in_plain_pytorch(
    decided: Decided, monkeypatch: pytest.MonkeyPatch
) -> None:
    choosing(last_kept(KEEP_NONE, decided), monkeypatch)
    boosted = boost(LONG.model(), activations="auto", tile_logits=False)
    train_on(boosted, LONG, steps=2)
    layer = list(find_blocks(boosted.model).values())[3]

    def writes(_: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
        with torch.no_grad():
            args[0].add_(1)  # which the block has saved for its norm

    layer.register_forward_hook(writes)
    batch = on_device_of(boosted, LONG.batch(2))
    loss = boosted.model(**batch).loss
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        boosted.booster.backward(loss, boosted.optimizer)


@pytest.mark.parametrize("others", ["keep", "offload"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_block_in_which_an_allocation_fails_is_recomputed(
    name: str, others: Decided, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = deep_with_dropout() if name == "gpt2" else LONG
    budget = 64 << 20
    expected = passes_of(boost(case.model(), budget, tile_logits=False), case)
    choosing(last_kept(1, others), monkeypatch)
    boosted = boost(case.model(), budget, activations="auto", tile_logits=False)
    policy: Any = engine_of(boosted.model).blocks
    device = engine_of(boosted.model).device
    failed: list[int] = []

    def fault(number: int) -> None:
        block = list(find_blocks(boosted.model).values())[2]

        def fails(*_: Any) -> None:
            handle.remove()
            failed.append(number)
            torch.zeros(budget, device=device)

        if number in (2, 4):  # once in the step, when half of the block has run
            handle = block.mlp.register_forward_hook(fails)

    assert_equal(passes_of(boosted, case, fault), expected)
    assert failed == [2, 4]
    assert policy._auto._profiling  # the next step sees what there is
    assert boosted.report().divergent_steps <= 4  # those two, and the profile between them
    assert boosted.report().peak_device_bytes <= budget


def test_what_a_block_kept_until_it_failed_is_free_again(monkeypatch: pytest.MonkeyPatch) -> None:
    choosing(last_kept(KEEP_ALL), monkeypatch)
    kept = whole_run("keep", steps=4)
    budget = 2 * kept.peak_nonmodel_bytes
    boosted = boost(DEEP.model(), budget, activations="auto", tile_logits=False)
    session, device = engine_of(boosted.model).session, engine_of(boosted.model).device
    third = list(find_blocks(boosted.model).values())[2]
    held: list[torch.Tensor] = []
    before: list[int] = []

    def takes_the_rest(*_: Any) -> None:
        before.append(session.step_position()[1] - sum(tensor.nbytes for tensor in held))
        held.clear()  # the second time, in which the block is recomputed
        if len(before) == 1:
            left = budget - session.step_position()[1] - (64 << 10)
            held.append(torch.zeros(left, dtype=torch.uint8, device=device))

    for number in range(4):
        batch = on_device_of(boosted, DEEP.batch(number))
        handle = third.self_attn.register_forward_pre_hook(takes_the_rest) if number == 2 else None
        assert step(boosted, batch, DEEP) == kept.losses[number]
        if handle:
            handle.remove()
    assert len(before) == 3  # kept, recomputed, and again in backward
    tolerance = 2 * RANDOM_STATE_BYTES + block_input_bytes(DEEP)
    assert before[1] - before[0] <= tolerance < kept.peak_nonmodel_bytes / 8
    assert_equal(copies(boosted.model.parameters()), kept.weights)
    assert boosted.report().peak_device_bytes <= budget


def test_a_block_that_fails_again_is_an_error_that_says_what_would_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    choosing(last_kept(KEEP_ALL), monkeypatch)
    boosted = boost(DEEP.model(), 64 << 20, activations="auto", tile_logits=False)
    train_on(boosted, DEEP, steps=2)
    weights, device = copies(boosted.model.parameters()), engine_of(boosted.model).device
    block = list(find_blocks(boosted.model).values())[2]
    handle = block.mlp.register_forward_hook(lambda *_: torch.zeros(64 << 20, device=device))
    with pytest.raises(castor.OutOfMemoryError, match=r"A step of \d+ x \d+ tokens, every block"):
        step(boosted, DEEP.batch(2), DEEP)
    handle.remove()
    assert_equal(copies(boosted.model.parameters()), weights)
    train_on(boosted, DEEP, steps=2)


def test_larger_inputs_are_recomputed_and_profiled() -> None:
    shapes = [
        (2, 16),
        (2, 16),
        (2, 8),
        (4, 32),
        (4, 32),
        (4, 32),
        (2, 16),
        (1, 64),
        (1, 64),
        (1, 64),
    ]
    plain = boost(DEEP.model(), tile_logits=False)
    boosted = boost(DEEP.model(), activations="auto", tile_logits=False)
    recomputed = []
    for number, shape in enumerate(shapes):
        batch = longer(*shape, number)
        assert step(boosted, batch, DEEP) == step(plain, batch, DEEP)
        recomputed.append(boosted.report().recomputed_blocks)
    # A step that is larger is recomputed; the one after it is the profile.
    assert recomputed == [0, 0, 0, 8, 0, 0, 0, 8, 0, 0]
    settled = boosted.report().divergent_steps
    for number, shape in enumerate(2 * [(4, 32), (1, 64), (2, 16)]):
        step(boosted, longer(*shape, number), DEEP)
    assert boosted.report().recomputed_blocks == 0
    assert boosted.report().divergent_steps == settled


def test_passes_that_nobody_ends() -> None:
    boosted = boost(DEEP.model(), activations="auto", tile_logits=False)
    plain = boost(DEEP.model(), tile_logits=False)
    for number in range(3):
        batch = DEEP.batch(number)
        for model in (boosted.model, plain.model):
            model(**batch)  # without a backward
            model.eval()
            with torch.no_grad():
                model(**batch)
            model.train()
        assert step(boosted, batch, DEEP) == step(plain, batch, DEEP)
    assert boosted.report().recomputed_blocks == 0


class RefusedError(Exception):
    """A hook of the user's raises it."""


def refuse(*_: Any) -> None:
    raise RefusedError


@pytest.mark.parametrize("place", ["in a block", "at the head", "behind", "in backward"])
def test_a_pass_that_fails_leaves_nothing_to_the_profile(place: str) -> None:
    boosted = boost(DEEP.model(), activations="auto", tile_logits=False)
    plain = boost(DEEP.model(), tile_logits=False)
    model: Any = boosted.model
    shapes = 3 * [(1, 4)] + [(8, 32)]
    recomputed = []
    for number, shape in enumerate(shapes):
        if number < 2:
            handle = {
                "in a block": lambda: model.model.layers[2].mlp.register_forward_hook(refuse),
                "at the head": lambda: model.lm_head.register_forward_pre_hook(refuse),
                "behind": lambda: model.register_forward_hook(refuse),
                "in backward": lambda: model.model.layers[1].mlp.register_full_backward_hook(
                    refuse
                ),
            }[place]()
            for _ in range(2):  # their inputs are larger than the step's
                with pytest.raises(RefusedError):
                    step(boosted, longer(8, 32, 9), DEEP)
            handle.remove()
            boosted.optimizer.zero_grad()
        batch = longer(*shape, number)
        assert step(boosted, batch, DEEP) == step(plain, batch, DEEP)
        recomputed.append(boosted.report().recomputed_blocks)
    assert_equal(copies(boosted.model.parameters()), copies(plain.model.parameters()))
    if place == "in a block":  # such a step is no profile, and has not shown what inputs take
        assert recomputed == [8, 8, 0, 8]


def test_a_skipped_step_is_a_profile_as_well() -> None:
    boosted = boost(DEEP.model(), activations="auto", tile_logits=False)
    batch = DEEP.batch(0)
    loss = DEEP.loss(boosted.model(**batch), batch)
    boosted.booster.backward(loss * float("nan"), boosted.optimizer)
    with pytest.warns(RuntimeWarning, match="skipped an optimizer step"):
        boosted.optimizer.step()
    boosted.optimizer.zero_grad()
    assert boosted.report().recomputed_blocks == 0
    step(boosted, batch, DEEP)
    assert boosted.report().divergent_steps == 0


@pytest.mark.parametrize("settings", [
    {"overlap": "forward"},
    {"overlap": "backward", "nonfinite": "ignore", "enable_gradient_accumulation": False},
    {"precision": "bf16"},
    {"precision": "fp16"},
    {"link_bandwidth": "2GB/s"},
    {"tile_logits": 16},
    {"placement_policy": "cpu"},
    {"placement_policy": "cuda"},
    {"gather_embeddings": True},
])  # fmt: skip
def test_beside_other_settings(settings: dict[str, Any]) -> None:
    runs = []
    for activations in ("keep", "auto"):
        boosted = boost(
            DEEP.model(), activations=activations, **({"tile_logits": False} | settings)
        )
        runs.append((train_on(boosted, DEEP, steps=3), copies(boosted.model.parameters())))
        assert boosted.report().divergent_steps == 0
    assert runs[0][0] == runs[1][0]
    assert_equal(runs[0][1], runs[1][1])


def with_adapters() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(DEEP.model(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


def partly_frozen() -> nn.Module:
    model = DEEP.model()
    for name, param in model.named_parameters():
        param.requires_grad_("layers.0" not in name and "layers.3" not in name)
    return model


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize("build", [with_adapters, partly_frozen])
def test_models_that_train_in_part(build: Callable[[], nn.Module]) -> None:
    runs = []
    for activations in ("keep", "auto", "recompute"):
        torch.manual_seed(0)
        boosted = boost(build(), activations=activations, tile_logits=False)
        runs.append((train_on(boosted, DEEP), copies(boosted.model.parameters())))
        assert boosted.report().divergent_steps == 0
    assert runs[0][0] == runs[1][0] == runs[2][0]
    assert_equal(runs[0][1], runs[1][1])
    assert_equal(runs[0][1], runs[2][1])


def test_states_on_nvme_and_an_optimizer_of_ones_own(tmp_path: Path) -> None:
    cases: list[tuple[Any, dict[str, Any]]] = [
        (torch.optim.AdamW, {"nvme_path": tmp_path, "host_memory": "1MiB"})
    ]
    if ON_THE_CPU_DEVICE:
        cases.append((torch.optim.RMSprop, {}))
    for optimizer, settings in cases:
        runs = []
        for activations in ("keep", "auto"):
            model = DEEP.model()
            boosted = boost(
                model, GIB, optimizer(model.parameters(), lr=1e-3), activations=activations,
                tile_logits=False, **settings,
            )  # fmt: skip
            runs.append(train_on(boosted, DEEP))
            del model, boosted
            gc.collect()
        assert runs[0] == runs[1]


def test_a_model_without_such_layers_keeps_all() -> None:
    boosted = boost(own().model(), activations="auto")
    assert boosted.report().recomputed_blocks == 0
    train_on(boosted, own())
    assert boost(nn.Linear(4, 4), activations="auto").report().activation_blocks == 0


def test_the_models_own_checkpointing_gives_way() -> None:
    with pytest.warns(UserWarning, match="gives way to activations: as many as serve of 8 blocks"):
        boosted = boost(DEEP.model(checkpointing=True), activations="auto")
    train_on(boosted, DEEP)
    assert boosted.report().recomputed_blocks == 0


class Elsewhere(saved_tensors_hooks):
    """Keeps copies of what autograd saves, as the activation offloading of TRL and torchtune."""

    def __init__(self) -> None:
        super().__init__(lambda tensor: tensor.clone(), lambda tensor: tensor.clone())


@pytest.mark.parametrize("activations", ["auto", "recompute", "offload"])
@pytest.mark.parametrize("hooks", [Elsewhere, save_on_cpu])
def test_beside_offloading_of_others(hooks: Callable[[], Any], activations: str) -> None:
    plain = boost(LONG.model())
    boosted = boost(LONG.model(), activations=activations)
    for number in range(3):
        batch = LONG.batch(number)
        with hooks():
            loss = LONG.loss(boosted.model(**batch), batch)
        assert boosted.step(loss) == step(plain, batch, LONG)
    assert_equal(copies(boosted.model.parameters()), copies(plain.model.parameters()))


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
def test_a_switch_that_is_turned_afterwards_counts() -> None:
    boosted = boost(DEEP.model(), activations="auto", tile_logits=False)
    train_on(boosted, DEEP, steps=2)
    assert boosted.report().recomputed_blocks == 0
    boosted.model.gradient_checkpointing_enable()
    assert boosted.report().recomputed_blocks == 8
    train_on(boosted, DEEP, steps=2)


def test_a_model_that_is_dropped_gives_its_memory_back_at_once() -> None:
    with without_collections():
        boosted = boost(DEEP.model(), activations="auto")
        train_on(boosted, DEEP, steps=2)
        engine = weakref.ref(engine_of(boosted.model))
        del boosted
        assert engine() is None


@pytest.mark.cpu_device("a GPU's link is not the host's memory")
def test_the_hosts_memory_is_measured_once_with_what_no_cache_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copied: list[int] = []
    measure = auto._C.copy_bandwidth

    def measured(num_bytes: int, repetitions: int) -> float:
        copied.append(num_bytes)
        return measure(num_bytes, repetitions)

    monkeypatch.setattr(auto._C, "copy_bandwidth", measured)
    auto._copy_of.cache_clear()
    for _ in range(2):
        boosted = boost(DEEP.model(), activations="auto", host_memory="8GiB")
        step(boosted, DEEP.batch(0), DEEP)
    (num_bytes,) = copied
    assert num_bytes >= 64 << 20
    assert 2 * num_bytes > auto._C.cache_bytes()
    # Where budgets are less than caches, chunks stay in these.
    assert auto._copied_bytes(8 << 20) == 1 << 20
