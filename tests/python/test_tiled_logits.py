"""Logits that are not computed until somebody reads them; the loss over them runs in tiles."""

import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
import transformers as hf
from torch import nn

import castor
import grids
from castor.activations.deferred import DeferredLogits
from castor.runtime.engine import engine_of
from helpers import (
    FORMATS_AND_OVERLAPS,
    GIB,
    Boosted,
    assert_boost_fails,
    assert_equal,
    boost,
    copies,
    margin,
    on_device_of,
    plugin,
    tight_memory,
)
from zoo import CASES, LENGTH, VOCABULARY, Batch, Case, gpt2, tower

ROWS = 2 * LENGTH
"""Of the logits of each batch."""
LOSS_TOLERANCE = 2e-6
HEAD_TOLERANCE = 2e-6
"""Relative, in the norm, in fp32: a sum in another order."""


def small(config: Callable[..., Any], **settings: Any) -> Callable[[], nn.Module]:
    """What builds a small decoder of that architecture."""
    return lambda: hf.AutoModelForCausalLM.from_config(
        config(
            vocab_size=VOCABULARY, hidden_size=48, intermediate_size=96, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, **settings,
        )
    )  # fmt: skip


GEMMA2 = small(hf.Gemma2Config, head_dim=12, final_logit_softcapping=2.0, pad_token_id=0)
QWEN = small(hf.Qwen2Config)
COHERE = small(hf.CohereConfig, logit_scale=0.3, pad_token_id=0, bos_token_id=1, eos_token_id=2)
LLAMA, GPT2 = CASES["llama"], CASES["gpt2"]
MODELS = {name: case for name, case in CASES.items() if name != "vit"} | {
    case.name: case
    for case in (
        replace(LLAMA, name="gemma2", build=GEMMA2),
        replace(LLAMA, name="qwen", build=QWEN),
        replace(LLAMA, name="cohere", build=COHERE),
        replace(GPT2, name="gpt2-dropout", build=lambda: gpt2(dropout=0.1)),
    )
}

Loss = Callable[[Any, Batch], torch.Tensor]


def own_loss(model: Any, batch: Batch) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    return loss


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """On the CPU."""
    named = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
    return dict(zip((name for name, _ in named), copies(grad for _, grad in named), strict=True))


def head_names(model: Any) -> set[str]:
    head = model.get_output_embeddings()
    own = {id(param) for param in head.parameters()}
    return {name for name, param in model.named_parameters() if id(param) in own}


def of_plain(case: Case, loss_of: Loss) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model = case.model()
    torch.manual_seed(5)
    loss = loss_of(model, case.batch(0))
    loss.backward()
    return loss.detach(), gradients(model)


def of_boosted(
    case: Case, loss_of: Loss, **settings: Any
) -> tuple[torch.Tensor, dict[str, torch.Tensor], Boosted]:
    boosted = boost(case.model(), **settings)
    torch.manual_seed(5)
    loss = loss_of(boosted.model, on_device_of(boosted, case.batch(0)))
    boosted.booster.backward(loss, boosted.optimizer)
    return loss.detach().cpu(), gradients(boosted.model), boosted


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    actual, expected = actual.cpu().double(), expected.cpu().double()
    return ((actual - expected).norm() / expected.norm()).item()


def assert_as_plain(case: Case, loss_of: Loss, tile: Any, *, tiled: bool = True) -> Boosted:
    """Loss and gradients of plain PyTorch: bitwise with one tile, or where nothing is tiled."""
    expected_loss, expected = of_plain(case, loss_of)
    loss, actual, boosted = of_boosted(case, loss_of, tile_logits=tile)
    report = boosted.report()
    assert (report.logit_tiles > 0) is tiled
    assert actual.keys() == expected.keys()
    if report.logit_tiles <= 1:
        assert_equal([loss], [expected_loss])
        assert_equal(list(actual.values()), list(expected.values()))
        return boosted
    assert relative(loss, expected_loss) <= LOSS_TOLERANCE
    heads = head_names(boosted.model)
    for name, grad in expected.items():
        tolerance = HEAD_TOLERANCE if name in heads else 5e-6
        # The bias of keys has no gradient but rounding.
        assert (actual[name] - grad).norm() <= tolerance * grad.norm() + 1e-9, name
    return boosted


@pytest.mark.parametrize("name", MODELS)
def test_one_tile_is_plain_pytorch_bit_for_bit(name: str) -> None:
    boosted = assert_as_plain(MODELS[name], own_loss, 10_000)
    assert boosted.report().logit_tiles == 1


@pytest.mark.parametrize("tile", [7, 16, 1])
@pytest.mark.parametrize("name", MODELS)
def test_more_tiles_are_plain_pytorch_within_rounding(name: str, tile: int) -> None:
    boosted = assert_as_plain(MODELS[name], own_loss, tile)
    report = boosted.report()
    assert report.logit_rows_per_tile == tile
    assert report.logit_tiles == -(-ROWS // tile)
    assert report.logit_avoided_bytes == (ROWS - tile) * VOCABULARY * 4


def shifted(labels: torch.Tensor) -> torch.Tensor:
    return labels[..., 1:].contiguous().view(-1)


def loop_shift(model: Any, batch: Batch) -> torch.Tensor:
    logits = model(input_ids=batch["input_ids"]).logits
    return F.cross_entropy(
        logits[..., :-1, :].contiguous().view(-1, VOCABULARY), shifted(batch["labels"])
    )


def loop_module(model: Any, batch: Batch) -> torch.Tensor:
    logits = model(input_ids=batch["input_ids"]).logits
    loss: torch.Tensor = nn.CrossEntropyLoss(label_smoothing=0.1)(
        logits.float().flatten(0, 1), batch["labels"].flatten()
    )
    return loss


def with_ignored(labels: torch.Tensor, index: int = -100) -> torch.Tensor:
    labels = labels.clone()
    labels[:, ::3] = index
    return labels.flatten()


def loop_of(**arguments: Any) -> Loss:
    def loss_of(model: Any, batch: Batch) -> torch.Tensor:
        logits = model(input_ids=batch["input_ids"]).logits.flatten(0, -2)
        target = with_ignored(batch["labels"], arguments.get("ignore_index", -100))
        placed = {
            name: value.to(target.device) if isinstance(value, torch.Tensor) else value
            for name, value in arguments.items()
        }
        loss = F.cross_entropy(logits, target, **placed)
        if arguments.get("reduction") == "none":  # a different weight for each row
            loss = (loss * torch.linspace(0.5, 2, loss.numel(), device=loss.device)).sum()
        return loss

    return loss_of


def class_weights() -> torch.Tensor:
    return torch.rand(VOCABULARY, generator=torch.Generator().manual_seed(3)) + 0.5


def loop_scaled(model: Any, batch: Batch) -> torch.Tensor:
    logits = model(input_ids=batch["input_ids"]).logits
    capped = 3.0 * torch.tanh(-(logits / 3.0 + 0.5))
    return F.cross_entropy(capped.squeeze().view(-1, VOCABULARY), batch["labels"].flatten())


def loop_last(model: Any, batch: Batch) -> torch.Tensor:
    logits = model(input_ids=batch["input_ids"]).logits
    return F.cross_entropy(logits[:, -1], batch["labels"][:, -1]) + F.cross_entropy(
        logits[0, 2:-1:2], batch["labels"][0, 3::2][:11]
    )


def num_items(model: Any, batch: Batch) -> torch.Tensor:
    loss: torch.Tensor = model(**batch, num_items_in_batch=torch.tensor(37)).loss
    return loss


TILED_LOSSES: dict[str, Loss] = {
    "shift": loop_shift,
    "module": loop_module,
    "ignored": loop_of(),
    "ignored 0": loop_of(ignore_index=0),
    "smoothing": loop_of(label_smoothing=0.2),
    "weight": loop_of(weight=class_weights()),
    "weight and smoothing": loop_of(weight=class_weights(), label_smoothing=0.2),
    "sum": loop_of(reduction="sum", weight=class_weights()),
    "none": loop_of(reduction="none", label_smoothing=0.2),
    "scaled": loop_scaled,
    "num_items_in_batch": num_items,
}


@pytest.mark.parametrize("tile", [1000, 5])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("loss", TILED_LOSSES)
def test_losses_that_run_in_tiles(loss: str, name: str, tile: int) -> None:
    boosted = assert_as_plain(CASES[name], TILED_LOSSES[loss], tile)
    assert (boosted.report().logit_tiles > 1) == (tile == 5)


def z_loss(model: Any, batch: Batch) -> torch.Tensor:
    outputs = model(**batch)
    loss: torch.Tensor = outputs.loss + 1e-2 * outputs.logits.float().logsumexp(-1).square().mean()
    return loss


def twice(model: Any, batch: Batch) -> torch.Tensor:
    outputs = model(**batch)
    loss: torch.Tensor = outputs.loss + F.cross_entropy(
        outputs.logits.view(-1, VOCABULARY), batch["labels"].flatten(), label_smoothing=0.1
    )
    return loss


def by_hand(model: Any, batch: Batch) -> torch.Tensor:
    logits = model(input_ids=batch["input_ids"]).logits
    chosen = logits.float().log_softmax(-1).gather(-1, batch["labels"].unsqueeze(-1))
    return -chosen.mean()


def probabilities(model: Any, batch: Batch) -> torch.Tensor:
    logits = model(input_ids=batch["input_ids"]).logits.flatten(0, 1)
    return F.cross_entropy(logits, F.one_hot(batch["labels"].flatten(), VOCABULARY).float())


def transposed(model: Any, batch: Batch) -> torch.Tensor:
    logits = model(input_ids=batch["input_ids"]).logits
    return F.cross_entropy(logits.transpose(1, 2), batch["labels"])


def written(model: Any, batch: Batch) -> torch.Tensor:
    logits = model(input_ids=batch["input_ids"]).logits
    before = logits.float() * 1.0
    flat = logits.view(-1, VOCABULARY)
    logits[:, :, 7] = -1e4
    logits.div_(1.5)
    return F.cross_entropy(flat, batch["labels"].flatten()) + before.square().mean()


def masked(model: Any, batch: Batch) -> torch.Tensor:
    logits = model(input_ids=batch["input_ids"]).logits
    mask = batch["labels"] % 2 == 0
    return F.cross_entropy(logits[mask], batch["labels"][mask])


def part_of_the_vocabulary(model: Any, batch: Batch) -> torch.Tensor:
    logits = model(input_ids=batch["input_ids"]).logits
    return F.cross_entropy(logits[..., :100].flatten(0, 1), batch["labels"].flatten() % 100)


VALUE_LOSSES: dict[str, tuple[Loss, bool]] = {  # whether some of it runs in tiles
    "z_loss": (z_loss, True),
    "twice": (twice, True),
    "two parts": (loop_last, True),
    "by hand": (by_hand, True),
    "probabilities": (probabilities, True),
    "transposed": (transposed, False),
    "written": (written, True),
    "masked": (masked, True),
    "part of the vocabulary": (part_of_the_vocabulary, False),
}


@pytest.mark.parametrize("tile", [1000, 5])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("loss", VALUE_LOSSES)
def test_other_uses_of_logits_get_their_values(loss: str, name: str, tile: int) -> None:
    loss_of, tiled = VALUE_LOSSES[loss]
    assert_as_plain(CASES[name], loss_of, tile, tiled=tiled)


def pair(case: Case = LLAMA, tile: Any = 5) -> tuple[nn.Module, Any, Boosted]:
    """A plain model, a batch, and a boosted one, all where castor computes."""
    boosted = boost(case.model(), tile_logits=tile)
    plain = case.model().to(engine_of(boosted.model).device)
    return plain, on_device_of(boosted, case.batch(0)), boosted


@pytest.mark.cpu_device("a GPU's values are no numpy array")
def test_what_plain_code_sees_of_logits() -> None:
    plain, batch, boosted = pair()
    expected, logits = plain(**batch).logits, boosted.model(**batch).logits
    assert isinstance(logits, torch.Tensor)
    assert isinstance(logits, DeferredLogits)
    assert logits.logits._value is None
    for attribute in ("shape", "dtype", "device", "requires_grad", "is_leaf", "layout", "ndim"):
        assert getattr(logits, attribute) == getattr(expected, attribute)
    assert logits.stride() == expected.stride()
    assert logits.is_contiguous()
    assert len(logits) == len(expected)
    assert logits.grad_fn is not None
    assert not logits.isnan().any()
    assert torch.equal(logits, expected)
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    assert logits[0, 1, 2].item() == expected[0, 1, 2].item()
    assert logits.tolist() == expected.tolist()
    assert (logits.detach().numpy() == expected.detach().numpy()).all()
    assert torch.equal(torch.from_dlpack(logits.detach()), expected.detach())
    assert logits.untyped_storage().nbytes() == expected.untyped_storage().nbytes()
    assert repr(logits)[:40] == repr(expected)[:40]
    assert torch.equal(logits.data, expected.data)
    assert torch.equal(torch.stack([logits, logits])[0], expected)
    assert torch.equal(torch.cat((expected, logits)), torch.cat((expected, expected)))
    with torch.no_grad():
        assert torch.equal(logits.float().softmax(-1), expected.float().softmax(-1))
    with pytest.raises(RuntimeError, match="requires grad"):
        logits.numpy()


def test_logits_are_there_after_backward_and_inside_inference_mode() -> None:
    plain, batch, boosted = pair()
    expected, outputs = plain(**batch), boosted.model(**batch)
    boosted.booster.backward(outputs.loss, boosted.optimizer)
    before = gradients(boosted.model)
    assert outputs.logits.logits._value is None
    with torch.inference_mode():
        assert torch.equal(outputs.logits.argmax(-1), expected.logits.argmax(-1))
    assert torch.equal(outputs.logits, expected.logits)
    assert_equal(list(gradients(boosted.model).values()), list(before.values()))
    boosted.optimizer.step()
    assert torch.equal(outputs.logits, expected.logits), "values once read stay"
    outputs = boosted.model(**batch)
    boosted.step(outputs.loss)
    with pytest.raises(castor.UsageError, match=r"weights were updated since; .*tile_logits=False"):
        outputs.logits.argmax(-1)
    assert "not computed" in repr(outputs.logits)
    assert "not computed" in repr(outputs)


def test_logits_of_weights_that_user_code_wrote_are_refused() -> None:
    _, batch, boosted = pair()
    logits = boosted.model(**batch).logits
    with torch.no_grad():
        boosted.model.lm_head.weight.mul_(2)
    with pytest.raises(castor.UsageError, match="was written since"):
        logits.sum()


def test_backward_with_updates_refuses_logits_afterwards() -> None:
    boosted = boost(
        LLAMA.model(),
        tile_logits=5,
        overlap="backward",
        nonfinite="ignore",
        enable_gradient_accumulation=False,
    )
    outputs = boosted.model(**LLAMA.batch(0))
    boosted.booster.backward(outputs.loss, boosted.optimizer)
    with pytest.raises(castor.UsageError, match="updated since"):
        outputs.logits.sum()
    boosted.optimizer.step()


def test_outputs_can_be_saved_and_copied(tmp_path: Path) -> None:
    plain, batch, boosted = pair()
    expected, outputs = plain(**batch), boosted.model(**batch)
    torch.save(outputs.logits, tmp_path / "logits.pt")
    loaded = torch.load(tmp_path / "logits.pt")
    assert type(loaded) is torch.Tensor
    assert torch.equal(loaded, expected.logits)
    detached = outputs.logits.detach()
    for copied in (copy.deepcopy(detached), pickle.loads(pickle.dumps(detached))):
        assert type(copied) is torch.Tensor
        assert torch.equal(copied, expected.logits)
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(outputs.logits)
    buffer = io.BytesIO()
    torch.save(dict(outputs), buffer)


@pytest.mark.parametrize("tile", [1000, 5])
def test_hooks_and_retained_gradients_see_plain_gradients(tile: int) -> None:
    plain, batch, boosted = pair(tile=tile)
    results = []
    for model in (plain, boosted.model):
        seen: list[torch.Tensor] = []
        outputs = model(**batch)
        outputs.logits.retain_grad()
        outputs.logits.register_hook(seen.append)
        outputs.logits.register_hook(lambda grad: grad * 2)
        outputs.loss.backward()
        results.append([*seen, outputs.logits.grad, *gradients(model).values()])
    found = [t + 0 for t in results[1]]
    if tile == 1000:
        assert_equal(found, results[0])
    for mine, theirs in zip(found, results[0], strict=True):
        assert relative(mine, theirs) <= HEAD_TOLERANCE
    outputs = [model(**batch) for model in (plain, boosted.model)]
    grads = [torch.autograd.grad(o.loss, o.logits, retain_graph=True)[0] for o in outputs]
    assert torch.equal(grads[1], grads[0])
    hidden = [torch.autograd.grad(o.loss, m.lm_head.weight, retain_graph=True)[0]
              for o, m in zip(outputs, (plain, boosted.model), strict=True)]  # fmt: skip
    assert relative(hidden[1], hidden[0]) <= HEAD_TOLERANCE


def test_a_second_backward_and_a_second_derivative() -> None:
    plain, batch, boosted = pair()
    results = []
    for model in (plain, boosted.model):
        loss = model(**batch).loss
        loss.backward(retain_graph=True)
        loss.backward()
        once = gradients(model)
        model.zero_grad()
        weight = model.lm_head.weight
        loss = model(**batch, use_cache=False).loss
        grad = torch.autograd.grad(loss, weight, create_graph=True)[0]
        grad.square().sum().backward()
        results.append([*once.values(), *gradients(model).values()])
    for actual, expected in zip(results[1], results[0], strict=True):
        assert relative(actual, expected) <= 1e-5


@pytest.mark.cpu_device("autocast of the CPU")
def test_never_outside_training() -> None:
    plain, batch, boosted = pair()
    model = boosted.model
    with torch.no_grad():
        assert type(model(**batch).logits) is torch.Tensor
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert type(model(**batch).logits) is torch.Tensor
    model.eval()
    assert type(model(**batch).logits) is torch.Tensor
    plain.eval()
    ids = batch["input_ids"][:, :5]
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **settings), plain.generate(ids, **settings))
    model.train()
    assert isinstance(model(**batch).logits, DeferredLogits)
    handle = model.lm_head.register_full_backward_hook(lambda *_: None)
    assert type(model(**batch).logits) is torch.Tensor
    handle.remove()
    with torch.autograd.graph.save_on_cpu():
        assert type(model(**batch).logits) is torch.Tensor


def test_forward_hooks_of_the_head_get_and_replace_its_output() -> None:
    plain, batch, boosted = pair()
    results = []
    for model in (plain, boosted.model):
        seen: list[float] = []

        def hook(module: Any, args: Any, output: torch.Tensor, seen: list[float] = seen) -> Any:
            seen.append(output.sum().item())
            return output.clamp(-0.1, 0.1)

        handle = model.lm_head.register_forward_hook(hook)
        loss = model(**batch).loss
        loss.backward()
        handle.remove()
        results.append([torch.tensor(seen), loss.detach(), *gradients(model).values()])
    for mine, theirs in zip(results[1], results[0], strict=True):
        assert relative(mine, theirs) <= HEAD_TOLERANCE


@pytest.mark.parametrize(
    "copy_of", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))]
)
def test_a_copy_of_the_model_is_plain(copy_of: Callable[[nn.Module], nn.Module]) -> None:
    _, batch, boosted = pair()
    copied = copy_of(boosted.model)
    logits = copied(**batch).logits
    assert type(logits) is torch.Tensor
    copied.lm_head.weight.data.zero_()
    assert not copied(**batch).logits.any()
    assert boosted.model(**batch).logits.any()
    again = boost(copied.cpu(), tile_logits=True)
    assert isinstance(again.model(**on_device_of(again, batch)).logits, DeferredLogits)


def train(
    boosted: Boosted, case: Case, loss_of: Loss, steps: int, micro_batches: int
) -> list[float]:
    losses = []
    torch.manual_seed(11)
    for step in range(steps):
        for k in range(micro_batches):
            batch = on_device_of(boosted, case.batch(step * micro_batches + k))
            loss = loss_of(boosted.model, batch) / micro_batches
            boosted.booster.backward(loss, boosted.optimizer)
            losses.append(loss.item())
        boosted.optimizer.step()
        boosted.optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("loss_of", [own_loss, loop_shift], ids=["own", "loop"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "opt", "mixtral"])
def test_a_tight_budget_streams_and_follows_the_plan(name: str, loss_of: Loss) -> None:
    case = CASES[name]
    plain = boost(case.model(), tile_logits=False)
    expected = train(plain, case, loss_of, 6, 1)
    ample = boost(case.model(), tile_logits=8)
    train(ample, case, loss_of, 2, 1)
    peak = ample.report().peak_nonmodel_bytes
    assert peak < plain.report().peak_nonmodel_bytes
    memory = peak + margin(ample.model, 0.35)
    boosted = boost(case.model(), memory, tile_logits=8)
    actual = train(boosted, case, loss_of, 6, 1)
    for mine, theirs in zip(actual, expected, strict=True):
        assert abs(mine - theirs) <= 1e-5 * abs(theirs)
    report = boosted.report()
    assert report.evictions > 0
    assert report.divergent_steps == 0
    assert report.peak_device_bytes <= memory
    assert report.logit_tiles > 1


def test_reading_logits_keeps_to_the_plan() -> None:
    """Now and then, as a loop that measures accuracy does, before backward and after it."""
    memory = tight_memory(LLAMA.model, lambda m, seed: m(**LLAMA.batch(seed)).loss)
    boosted = boost(LLAMA.model(), memory, tile_logits=8)
    for step in range(8):
        outputs = boosted.model(**LLAMA.batch(step))
        if step == 4:
            outputs.logits.argmax(-1)
        boosted.booster.backward(outputs.loss, boosted.optimizer)
        if step in (3, 5):
            outputs.logits.argmax(-1)
        boosted.optimizer.step()
        boosted.optimizer.zero_grad()
    assert boosted.report().divergent_steps == 0
    assert boosted.report().peak_device_bytes <= memory


def test_steps_of_other_lengths_follow_the_plan() -> None:
    boosted = boost(LLAMA.model(), tile_logits=8)
    for length in (24, 24, 9, 17, 24):
        batch = {key: value[:, :length] for key, value in LLAMA.batch(length).items()}
        boosted.step(boosted.model(**batch).loss)
    assert boosted.report().divergent_steps == 0


@pytest.mark.parametrize(("precision", "state_format", "overlap"), FORMATS_AND_OVERLAPS)
def test_formats_and_overlap(precision: str, state_format: str, overlap: str) -> None:
    micro_batches = 1 if overlap == "backward" else 4
    settings: dict[str, Any] = {
        "precision": precision,
        "optim_state_format": state_format,
        "overlap": overlap,
        "chunk_bytes": 2**15,
    }
    if overlap == "backward":
        settings |= {"nonfinite": "ignore", "enable_gradient_accumulation": False}
    else:
        settings |= {"max_norm": 0.5}
    runs = []
    for tile in (False, 8, 1000):
        boosted = boost(LLAMA.model(), "1MiB", tile_logits=tile, **settings)
        runs.append(train(boosted, LLAMA, own_loss, 4, micro_batches))
        assert boosted.report().divergent_steps == 0
    assert runs[2] == runs[0]
    tolerance = 1e-5 if precision == "fp32" else 4e-3
    for mine, theirs in zip(runs[1], runs[0], strict=True):
        assert abs(mine - theirs) <= tolerance * abs(theirs)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_gathered_embeddings_and_weights_on_nvme(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    expected = train(boost(case.model(), tile_logits=False), case, own_loss, 4, 1)
    gathering = boost(case.model(), tile_logits=8, gather_embeddings=True, chunk_bytes=2**15)
    runs = [train(gathering, case, own_loss, 4, 1)]
    host = gathering.report().host_bytes // 3
    stored = boost(
        case.model(), "1100KiB", tile_logits=8, chunk_bytes=2**15,
        host_memory=host, nvme_path=tmp_path,
    )  # fmt: skip
    runs.append(train(stored, case, own_loss, 4, 1))
    assert stored.report().nvme_weight_bytes > 0
    for run in runs:
        for mine, theirs in zip(run, expected, strict=True):
            assert abs(mine - theirs) <= 1e-5 * abs(theirs)


def head_only(tile: Any, tiles_of: int) -> tuple[float, float]:
    """(error of castor, of plain bf16) of the head's gradient against fp64."""
    torch.manual_seed(1)
    rows, width, vocabulary = 64 * tiles_of, 64, 512
    config = hf.LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=rows,
    )  # fmt: skip
    model = hf.AutoModelForCausalLM.from_config(config).bfloat16()
    ids = torch.randint(0, vocabulary, (1, rows), generator=torch.Generator().manual_seed(2))
    reference = copy.deepcopy(model).double()
    hidden: list[torch.Tensor] = []
    handle = model.lm_head.register_forward_pre_hook(lambda _, args: hidden.append(args[0]))
    model(input_ids=ids, labels=ids).loss.backward()
    handle.remove()
    plain = model.lm_head.weight.grad.clone()
    weight = reference.lm_head.weight
    logits = hidden[0].detach().double() @ weight.T
    F.cross_entropy(logits[0, :-1], ids[0, 1:]).backward()
    model.zero_grad()
    boosted = boost(model, tile_logits=tile, precision="bf16")
    boosted.booster.backward(boosted.model(input_ids=ids, labels=ids).loss, boosted.optimizer)
    assert boosted.report().logit_tiles == tiles_of
    return relative(model.lm_head.weight.grad, weight.grad), relative(plain, weight.grad)


@pytest.mark.parametrize("tiles", grids.some((4, 16, 64), 64))
def test_the_heads_gradient_in_bf16_is_as_good_as_plain_pytorchs(tiles: int) -> None:
    mine, plain = head_only(64, tiles)
    assert mine <= 1.1 * plain


def test_auto_leaves_small_logits_alone_and_tiles_large_ones() -> None:
    small = boost(LLAMA.model())
    assert type(small.model(**LLAMA.batch(0)).logits) is torch.Tensor
    assert small.report().logit_tiles == 0

    def wide() -> nn.Module:
        torch.manual_seed(0)
        config = hf.LlamaConfig(
            vocab_size=40_000, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=256,
        )  # fmt: skip
        return hf.AutoModelForCausalLM.from_config(config)

    ids = torch.randint(0, 40_000, (1, 240), generator=torch.Generator().manual_seed(0))
    reports = []
    for memory, tile in (("128MiB", "auto"), ("128MiB", False), (GIB, "auto"), (GIB, True)):
        boosted = boost(wide(), memory, tile_logits=tile)
        for _ in range(2):
            boosted.step(boosted.model(input_ids=ids, labels=ids).loss)
        reports.append(boosted.report())
    rows = 2**24 // (4 * 40_000)
    assert [r.logit_rows_per_tile for r in reports] == [rows, 0, 0, rows]
    assert reports[0].logit_tiles == -(-240 // rows) == 3
    assert reports[0].logit_avoided_bytes == (240 - rows) * 40_000 * 4
    saved = reports[1].peak_nonmodel_bytes - reports[0].peak_nonmodel_bytes
    assert saved > reports[0].logit_avoided_bytes


def test_auto_counts_the_sum_of_the_heads_gradient() -> None:
    """In 16 bits it takes 4 bytes a weight: with few rows and a wide head nothing is saved."""

    def tiles(precision: str) -> int:
        torch.manual_seed(0)
        config = hf.LlamaConfig(
            vocab_size=40_000, hidden_size=512, intermediate_size=16, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=256,
        )  # fmt: skip
        model = hf.AutoModelForCausalLM.from_config(config)
        boosted = boost(model, "256MiB", precision=precision)
        ids = torch.arange(160).view(1, -1)
        model(input_ids=ids, labels=ids)
        return boosted.report().logit_tiles

    assert tiles("fp32") == 2
    assert tiles("bf16") == 0


@pytest.mark.parametrize("tile", [1000, 5])
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_gradient_checkpointing_beside_tiles(name: str, tile: int) -> None:
    case = MODELS[name]
    runs = []
    for setting in (False, tile):
        boosted = boost(case.model(checkpointing=True), tile_logits=setting)
        runs.append(train(boosted, case, own_loss, 3, 2))
        assert boosted.report().divergent_steps == 0
    for mine, theirs in zip(runs[1], runs[0], strict=True):
        assert abs(mine - theirs) <= (0 if tile == 1000 else 1e-5) * abs(theirs)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
@pytest.mark.parametrize("tile", [1000, 5])
def test_tuples_backward_hooks_and_casts_of_outputs(tile: int) -> None:
    from accelerate.utils import convert_outputs_to_fp32

    plain, batch, boosted = pair(tile=tile)
    results = []
    for model in (plain, boosted.model):
        seen: list[torch.Tensor] = []
        handle = model.register_full_backward_hook(
            lambda _, __, grads, seen=seen: seen.extend(g + 0 for g in grads if g is not None)
        )
        loss, logits, *_ = model(**batch, return_dict=False, use_cache=False)
        (loss + logits.float().square().mean()).backward()
        handle.remove()
        results.append([loss.detach(), *seen, *gradients(model).values()])
        model.zero_grad()
    for actual, expected in zip(results[1], results[0], strict=True):
        assert relative(actual, expected) <= LOSS_TOLERANCE
    outputs = convert_outputs_to_fp32(boosted.model.forward)(**batch)
    assert torch.equal(outputs.logits, plain(**batch).logits)


@pytest.mark.cpu_device("its plugins are of the CPU device")
def test_bad_values_are_refused_with_a_sentence() -> None:
    for value in (0, -3):
        with pytest.raises(ValueError, match=r"tile_logits is .*at least 1"):
            castor.GeminiPlugin(device="cpu", tile_logits=value)
    for value in ("yes", 2.0, None):
        with pytest.raises(TypeError, match=r"tile_logits is .*choose 'auto', True, False"):
            castor.GeminiPlugin(device="cpu", tile_logits=value)  # type: ignore[arg-type]


def test_a_model_without_output_embedding() -> None:
    assert_boost_fails(
        castor.UsageError, "Tower has no output embedding", tile_logits=True, memory=GIB
    )
    boost(tower())
    vit = CASES["vit"].model()
    with pytest.raises(castor.UsageError, match="ViTForImageClassification has no output emb"):
        boost(vit, tile_logits=64)
    boost(vit)


def test_a_head_with_a_forward_of_its_own() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    model = LLAMA.model()
    model.lm_head = Scaled(48, VOCABULARY, bias=False)
    with pytest.raises(castor.UsageError, match="has a Scaled with a forward of its own"):
        boost(model, tile_logits=True)
    assert type(boost(model).model(**LLAMA.batch(0)).logits) is torch.Tensor


@pytest.mark.parametrize("frozen", ["head", "body", "all"])
def test_frozen_parts(frozen: str) -> None:
    def build() -> nn.Module:
        model = LLAMA.build()
        for name, param in model.named_parameters():
            param.requires_grad_(name.startswith("lm_head") != (frozen == "head"))
        if frozen == "all":
            model.requires_grad_(False)
        return model

    case = replace(LLAMA, build=build)
    if frozen == "all":
        model = case.model()
        castor.Booster(plugin=plugin(tile_logits=5)).boost(model)
        assert type(model(**case.batch(0)).logits) is torch.Tensor
        return
    assert_as_plain(case, own_loss, 5)


@pytest.mark.cpu_device("a GPU tells of a label out of bounds later")
def test_errors_of_plain_pytorch() -> None:
    plain, batch, boosted = pair()
    for model in (plain, boosted.model):
        logits = model(**batch).logits.view(-1, VOCABULARY)
        target = batch["labels"].flatten()
        with pytest.raises(IndexError, match="out of bounds"):
            F.cross_entropy(logits, target + VOCABULARY)
        with pytest.raises(ValueError, match="to match target"):
            F.cross_entropy(logits, target[:-1])
        with pytest.raises(RuntimeError, match="invalid for input of size"):
            model(**batch).logits.view(-1, 7)
    boosted.step(boosted.model(**batch).loss)  # the run goes on
    assert boosted.report().logit_tiles > 1


def test_all_rows_ignored() -> None:
    results = []
    for model in (LLAMA.model(), boost(LLAMA.model(), tile_logits=5).model):
        batch = LLAMA.batch(0)
        batch["labels"].fill_(-100)
        loss = model(**batch).loss
        loss.backward()
        results.append([loss.isnan(), *gradients(model).values()])
    assert_equal(results[1], results[0])


def test_losses_that_are_held_hold_no_hidden_states() -> None:
    boosted = boost(LLAMA.model(), tile_logits=5)
    held = []
    for step in range(4):
        loss = boosted.model(**LLAMA.batch(step)).loss
        boosted.booster.backward(loss, boosted.optimizer)
        boosted.optimizer.step()
        boosted.optimizer.zero_grad()
        held.append(loss)
    used = boosted.booster.memory(boosted.model).nonmodel_bytes
    assert used < ROWS * 48 * 4, "less than the hidden states of one step"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_compiled_losses_and_models() -> None:
    plain, batch, boosted = pair()
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda logits, target: F.cross_entropy(logits.view(-1, VOCABULARY), target.view(-1)),
        backend="aot_eager",
    )
    expected = F.cross_entropy(plain(**batch).logits.view(-1, VOCABULARY), batch["labels"].view(-1))
    loss = compiled(boosted.model(**batch).logits, batch["labels"])
    assert relative(loss.detach(), expected.detach()) <= LOSS_TOLERANCE
    loss.backward()
    expected.backward()
    for name, grad in gradients(plain).items():
        assert relative(gradients(boosted.model)[name], grad) <= 1e-5
    boosted.model.zero_grad()
    # Autograd's part of all graphs takes half a minute.
    model = torch.compile(boosted.model, backend="aot_eager" if grids.WHOLE else "eager")
    loss = model(**batch).loss
    loss.backward()
    torch._dynamo.reset()
    for name, grad in gradients(plain).items():
        mine = gradients(boosted.model)[name]
        if name == "lm_head.weight":
            assert mine.shape == grad.shape
    assert torch.isfinite(loss)


def test_functorch_over_logits() -> None:
    plain, batch, boosted = pair()
    results = []
    for model in (plain, boosted.model):
        logits = model(**batch).logits.detach()
        rows = torch.func.vmap(lambda row: row.logsumexp(-1))(logits)
        slope = torch.func.grad(lambda x: x.square().sum())(logits)
        results.append([rows, slope])
    assert_equal(results[1], results[0])
