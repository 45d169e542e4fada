"""Compiled blocks of boosted models: one graph each, as in plain PyTorch, within the budget."""

import copy
import functools
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from accelerate.utils.other import compile_regions
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import castor
import compiled_cases
import grids
from castor.runtime.blocks import check_no_cuda_graphs, find_blocks
from castor.runtime.engine import engine_of
from helpers import (
    Boosted,
    assert_close_losses,
    assert_close_weights,
    assert_same_weights,
    boost,
    copies,
    losses_of_boosted,
    losses_of_plain,
    param_bytes,
    tight_memory,
)
from rank_processes import found
from zoo import CASES, VOCABULARY, Case

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of dynamo
]


def qwen3() -> nn.Module:
    config = hf.Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=48, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=12, max_position_embeddings=64,
    )  # fmt: skip
    return hf.AutoModelForCausalLM.from_config(config)


LLAMA = CASES["llama"]
MODELS = {name: CASES[name] for name in ("llama", "gpt2", "bert", "t5", "mixtral")} | {
    "qwen3": Case("qwen3", qwen3, LLAMA.batch)
}

Compile = Callable[[nn.Module, Any], None]
"""Compiles the blocks of a model with a backend."""


def in_place(model: nn.Module, backend: Any) -> None:
    for block in find_blocks(model).values():
        block.compile(fullgraph=True, backend=backend)


def wrapped(model: nn.Module, backend: Any) -> None:
    for name in find_blocks(model):
        layers, _, i = name.rpartition(".")
        blocks: Any = model.get_submodule(layers)
        blocks[int(i)] = torch.compile(blocks[int(i)], fullgraph=True, backend=backend)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def build(case: Case, compile_blocks: Compile = in_place, backend: Any = "aot_eager") -> Any:
    model: Any = case.model()
    model.config.use_cache = False
    compile_blocks(model, backend)
    return model


def forward_of(case: Case) -> Callable[[Any, int], torch.Tensor]:
    def forward(model: Any, seed: int) -> torch.Tensor:
        batch = case.batch(seed)
        return case.loss(model(**batch), batch)

    return forward


LOSS = forward_of(LLAMA)


@functools.cache
def plain_losses() -> list[float]:
    """Of six steps, with compiled blocks; what was compiled is forgotten."""
    torch._dynamo.reset()
    losses = losses_of_plain(build(LLAMA), LOSS)
    torch._dynamo.reset()  # it serves models with other hooks, too
    counters.clear()
    return losses


def breaks() -> int:
    return sum(counters["graph_break"].values())


@pytest.mark.parametrize("way", [in_place, wrapped])
@pytest.mark.parametrize("name", grids.some(tuple(MODELS), "gpt2", "t5", "mixtral"))
def test_blocks_are_one_graph_as_in_plain_pytorch(name: str, way: Compile) -> None:
    case = MODELS[name]
    forward = forward_of(case)
    # T5's four graphs take the longest, of which the most is autograd's part.
    backend = "eager" if name == "t5" and not grids.WHOLE else "aot_eager"
    graphs = CompileCounterWithBackend(backend), CompileCounterWithBackend(backend)
    plain = build(case, way, graphs[0])
    expected = losses_of_plain(plain, forward)
    num_graphs = graphs[0].frame_count
    memory = tight_memory(lambda: build(case, way, graphs[0]), forward)  # of the same code
    torch._dynamo.reset()
    counters.clear()
    boosted = boost(build(case, way, graphs[1]), memory)
    assert_close_losses(losses_of_boosted(boosted, forward), expected)
    for mine, theirs in zip(boosted.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-4)
    assert breaks() == 0
    assert graphs[1].frame_count == num_graphs  # of all blocks that are alike: one
    report = boosted.report()
    assert report.peak_device_bytes <= report.device_budget_bytes == memory
    assert memory < report.peak_nonmodel_bytes + param_bytes(plain)  # so that it streams
    assert report.divergent_steps == 0


def test_a_block_is_one_module_of_the_plan() -> None:
    boosted = boost(build(LLAMA))
    assert engine_of(boosted.model).modules == [
        "model",
        "model.embed_tokens",
        "model.layers.0",
        "model.layers.1",
        "model.norm",
        "lm_head",
    ]


@pytest.mark.parametrize("part", ["mlp", pytest.param("", marks=pytest.mark.whole)])
def test_inductors_code_gives_plain_pytorchs_losses(part: str) -> None:
    def compile_parts(model: nn.Module, backend: Any) -> None:
        for block in find_blocks(model).values():
            block.get_submodule(part).compile(fullgraph=True, backend=backend)

    def built() -> Any:
        return build(LLAMA, compile_parts, "inductor")

    expected = losses_of_plain(built(), LOSS, steps=3)
    boosted = boost(built(), tight_memory(built, LOSS))
    assert_close_losses(losses_of_boosted(boosted, LOSS, steps=3), expected)
    assert breaks() == 0


def every_part(model: Any, backend: Any) -> Any:
    for part in (model.lm_head, model.model.norm, model.model.embed_tokens):
        part.compile(fullgraph=True, backend=backend)
    in_place(model, backend)
    return model


def by_accelerate(model: Any, backend: Any) -> Any:
    return compile_regions(model, fullgraph=True, backend=backend)


@pytest.mark.parametrize("way", [every_part, by_accelerate])
@pytest.mark.parametrize("settings", [{}, {"gather_embeddings": True}])
def test_other_parts_may_be_compiled_too(
    way: Callable[[Any, Any], Any], settings: dict[str, Any]
) -> None:
    expected = plain_losses()
    model: Any = LLAMA.model()
    model.config.use_cache = False
    boosted = boost(way(model, "aot_eager"), **settings)
    assert_close_losses(losses_of_boosted(boosted, LOSS), expected)
    assert breaks() == 0
    assert len(engine_of(boosted.model).modules) == 6


@pytest.mark.parametrize("wrap", [False, True])
def test_tiles_of_a_compiled_heads_logits_are_refused(wrap: bool) -> None:
    model: Any = LLAMA.model()
    model.lm_head.compile()
    if wrap:
        model.lm_head = torch.compile(model.lm_head)
    with pytest.raises(castor.UsageError, match="compiled output embedding"):
        boost(model, tile_logits=16)


@pytest.mark.parametrize("precision", grids.some(("bf16", "fp16"), "fp16"))
def test_half_precision_has_one_graph(precision: str) -> None:
    torch._dynamo.config.recompile_limit = 1
    try:
        boosted = boost(build(LLAMA), precision=precision)
        losses = losses_of_boosted(boosted, LOSS)
    finally:
        torch._dynamo.config.recompile_limit = 8
    eager = boost(LLAMA.model(), precision=precision)
    assert_close_losses(losses, losses_of_boosted(eager, LOSS), tolerance=4e-3)
    assert breaks() == 0


@pytest.mark.parametrize("way", [in_place, wrapped])
@pytest.mark.parametrize("choice", ["recompute", "offload"])
def test_activations_of_compiled_blocks(choice: str, way: Compile) -> None:
    expected = plain_losses()
    kept = boost(build(LLAMA, way))
    losses_of_boosted(kept, LOSS)
    counters.clear()
    memory = tight_memory(lambda: build(LLAMA, way), LOSS)
    boosted = boost(build(LLAMA, way), memory, activations=choice)
    assert_close_losses(losses_of_boosted(boosted, LOSS), expected)
    assert breaks() == 0
    report = boosted.report()
    assert (report.recomputed_blocks, report.offloaded_blocks) == (
        (2, 0) if choice == "recompute" else (0, 2)
    )
    assert report.peak_nonmodel_bytes < kept.report().peak_nonmodel_bytes
    assert report.peak_device_bytes <= memory


def test_some_blocks_are_chosen_by_name() -> None:
    expected = plain_losses()
    choice = {"*": "keep", "model.layers.1": "recompute"}
    boosted = boost(build(LLAMA, wrapped), activations=choice)
    assert_close_losses(losses_of_boosted(boosted, LOSS), expected)
    assert boosted.report().recomputed_blocks == 1


def test_the_models_own_checkpointing_is_within_the_graph() -> None:
    models = [LLAMA.model(checkpointing=True) for _ in range(2)]
    for model in models:
        in_place(model, "aot_eager")
    expected = losses_of_plain(models[0], LOSS)
    assert_close_losses(losses_of_boosted(boost(models[1]), LOSS), expected)
    assert breaks() == 0


@pytest.mark.parametrize(
    ("activations", "case", "message"),
    [
        ("auto", LLAMA, "'model.layers.0' is compiled, and its second forward cannot be profiled"),
        ("tile:2", LLAMA, "'model.layers.0.mlp' is for what runs within 'model.layers.0'"),
        ("recompute:mlp", LLAMA, "'model.layers.0.mlp' is for what runs within 'model.layers.0'"),
        ("recompute", CASES["mixtral"], "'model.layers.0' is compiled and chooses experts"),
    ],
)
def test_activations_within_a_compiled_block_are_refused(
    activations: str, case: Case, message: str
) -> None:
    with pytest.raises(castor.UsageError, match=message):
        boost(build(case), activations=activations)


def test_a_budget_below_a_block_names_it() -> None:
    with pytest.raises(castor.OutOfMemoryError, match=r"model\.layers\.0"):
        boost(build(LLAMA), memory="64KiB")


def test_a_block_that_is_compiled_anew_stays_followed() -> None:
    expected = plain_losses()[:4]
    boosted = boost(build(LLAMA))
    losses = losses_of_boosted(boosted, LOSS, steps=2)
    again = CompileCounterWithBackend("eager")
    in_place(boosted.model, again)
    losses += [boosted.step(LOSS(boosted.model, seed)) for seed in (2, 3)]
    assert_close_losses(losses, expected)
    assert again.frame_count == 1
    assert breaks() == 0
    assert boosted.report().divergent_steps == 0


def test_a_block_that_is_compiled_no_more_stays_followed() -> None:
    expected = plain_losses()[:4]
    boosted = boost(build(LLAMA))
    losses = losses_of_boosted(boosted, LOSS, steps=2)
    for block in find_blocks(boosted.model).values():
        block._compiled_call_impl = None
    losses += [boosted.step(LOSS(boosted.model, seed)) for seed in (2, 3)]
    assert_close_losses(losses, expected)
    assert boosted.report().divergent_steps == 0


def test_a_block_that_is_compiled_after_boost_is_named() -> None:
    expected = plain_losses()
    model: Any = LLAMA.model()
    model.config.use_cache = False
    boosted = boost(model)
    for block in find_blocks(model).values():
        block.compile(backend="aot_eager")
    with pytest.warns(UserWarning, match=r"'model.layers.0' \(LlamaDecoderLayer\).*after boost"):
        first = boosted.step(LOSS(model, 0))
    losses = [first, *(boosted.step(LOSS(model, seed)) for seed in range(1, 6))]
    assert_close_losses(losses, expected)
    assert breaks() > 0


@pytest.mark.parametrize("blocks_too", grids.some((False, True), True))
def test_a_whole_compiled_model_trains_as_plain(blocks_too: bool) -> None:
    expected = plain_losses()
    model: Any = LLAMA.model()
    model.config.use_cache = False
    if blocks_too:
        in_place(model, "aot_eager")
    boosted = boost(model)
    called = torch.compile(model, backend="aot_eager")
    losses = [boosted.step(LOSS(called, seed)) for seed in range(6)]
    assert_close_losses(losses, expected)
    other = boost(LLAMA.model())  # the set of boosted models changes
    del other, boosted
    gc.collect()


def test_a_forward_that_fails_leaves_the_block() -> None:
    boosted = boost(build(LLAMA))
    block: Any = boosted.model.model.layers[0]
    said = "bind arguments"
    if not torch.__version__.startswith("2.11."):
        said += "|Observed exception"  # torch 2.15
    with pytest.raises(torch._dynamo.exc.Unsupported, match=said):
        block()
    torch._dynamo.reset()
    expected = plain_losses()
    assert_close_losses(losses_of_boosted(boosted, LOSS), expected)


def test_released_copied_and_pickled_models_are_ordinary() -> None:
    model = build(LLAMA)
    before = [block._compiled_call_impl for block in find_blocks(model).values()]
    boosted = boost(model)
    losses_of_boosted(boosted, LOSS, steps=1)
    copied = copy.deepcopy(model)
    read = pickle.loads(pickle.dumps(model))
    weights = copies(model.parameters())
    boosted.booster.release(model)
    assert [block._compiled_call_impl for block in find_blocks(model).values()] == before
    for plain in (copied, read, model):
        assert_same_weights(plain, weights)
        LOSS(plain, 3).backward()
    assert_close_weights(copied, model)


def test_a_dropped_model_takes_its_session_along() -> None:
    boosted = boost(build(LLAMA))
    losses_of_boosted(boosted, LOSS, steps=1)
    session = weakref.ref(engine_of(boosted.model))
    torch._dynamo.reset()
    del boosted
    gc.collect()
    assert session() is None


@pytest.mark.parametrize("way", grids.some((in_place, wrapped), wrapped))
def test_files_and_traces_have_the_blocks_names(way: Compile, tmp_path: Path) -> None:
    boosted = boost(build(LLAMA, way), precision="bf16", optim_state_format="split")
    losses_of_boosted(boosted, LOSS, steps=2)
    boosted.booster.save_model(boosted.model, tmp_path / "model")
    boosted.booster.save_trace(tmp_path / "trace", boosted.model)
    saved = [p.detach().clone() for p in boosted.model.parameters()]

    again = boost(build(LLAMA, way), precision="bf16", trace_file=tmp_path / "trace")
    again.booster.load_model(again.model, tmp_path / "model")
    assert_same_weights(again.model, saved)
    again.step(LOSS(again.model, 0))
    assert again.report().divergent_steps == 0
    assert_same_weights(boosted.model, saved)
    with pytest.raises(castor.UsageError, match="recorded for another model"):
        boost(LLAMA.model(), trace_file=tmp_path / "trace")


def test_cuda_graphs_are_refused_by_name() -> None:
    block = nn.Linear(2, 2)
    block.compile(mode="max-autotune-no-cudagraphs")
    check_no_cuda_graphs("layers.0", block)
    block.compile(mode="reduce-overhead")
    for part in (block, torch.compile(nn.Linear(2, 2), mode="reduce-overhead")):
        with pytest.raises(castor.UsageError, match=r"'layers.0' \(Linear\).*CUDA graphs"):
            check_no_cuda_graphs("layers.0", part)


def test_parts_with_several_blocks_are_followed_as_they_were() -> None:
    model: Any = LLAMA.model()
    model.config.use_cache = False
    model.model.compile(backend="aot_eager")
    expected = plain_losses()
    boosted: Boosted = boost(model)
    assert_close_losses(losses_of_boosted(boosted, LOSS), expected)
    assert "model.layers.0.mlp.up_proj" in engine_of(model).modules


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return found(compiled_cases.divided, 2, tmp_path_factory.mktemp("divided"))


@pytest.mark.parametrize("layout", compiled_cases.LAYOUTS)
def test_ranks_break_graphs_only_where_they_exchange_within_blocks(
    layout: str, divided: Any
) -> None:
    losses, num_breaks, raised = divided[layout]
    assert losses == pytest.approx(divided["plain"], rel=1e-5)
    exchanges = layout in ("layers", "sequences", "ring")
    assert (num_breaks > 0, raised) == (exchanges, "Unsupported" if exchanges else None)


def test_what_one_schedule_has_compiled_serves_the_zero_bubble(divided: Any) -> None:
    for schedule in compiled_cases.SCHEDULES:
        assert divided[schedule] == pytest.approx(divided["deep"], rel=1e-5), schedule
