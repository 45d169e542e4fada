"""Losses that user code computes of logits row by row: in tiles, as plain PyTorch has them."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
import transformers as hf
from torch import nn

import castor
from castor.activations.lazy_logits import Source
from helpers import GIB, boost, copies
from test_tiled_logits import LLAMA, Loss, assert_as_plain, class_weights, pair, with_ignored
from zoo import VOCABULARY, Batch

MIB = 2**20


def logits_of(model: Any, batch: Batch) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=batch["input_ids"]).logits
    return logits


def selected(logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Log-probabilities, as TRL 1.16 computes them in float32: sequence by sequence."""
    chosen = torch.gather(logits, dim=-1, index=index.unsqueeze(-1)).squeeze(-1)
    return chosen - torch.stack([torch.logsumexp(row, dim=-1) for row in logits])


def selected_in_16_bits(logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Log-probabilities, as TRL 1.16 computes them in 16 bits."""
    found = [
        F.log_softmax(row, dim=-1).gather(dim=-1, index=labels.unsqueeze(-1))
        for row, labels in zip(logits, index, strict=True)
    ]
    return torch.stack(found).squeeze(-1)


def entropy(logits: torch.Tensor) -> torch.Tensor:
    """Entropies in pieces of rows."""
    found = []
    for rows in logits.reshape(-1, logits.shape[-1]).split(7, dim=0):
        logps = F.log_softmax(rows, dim=-1)
        found.append(-(torch.exp(logps) * logps).sum(-1))
    return torch.cat(found).reshape(logits.shape[:-1])


def preference(logps: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    sums = (logps * (labels % 3 > 0)).sum(-1)
    return -F.logsigmoid(0.1 * (sums[0] - sums[1]))


def dpo(model: Any, batch: Batch) -> torch.Tensor:
    labels = batch["labels"][:, 1:]
    return preference(selected(logits_of(model, batch)[:, :-1], labels), labels)


def dpo_in_16_bits(model: Any, batch: Batch) -> torch.Tensor:
    labels = batch["labels"][:, 1:]
    return preference(selected_in_16_bits(logits_of(model, batch)[:, :-1], labels), labels)


def policy_gradient(model: Any, batch: Batch) -> torch.Tensor:
    logits, labels = logits_of(model, batch)[:, :-1] / 0.7, batch["labels"][:, 1:]
    logps = selected(logits, labels)
    ratio = (logps - logps.detach()).exp()
    return -(ratio * (labels % 5 - 2)).mean() - 0.01 * entropy(logits).mean()


def softmax_entropy(model: Any, batch: Batch) -> torch.Tensor:
    logits = logits_of(model, batch).float()
    return (logits.logsumexp(-1) - (logits.softmax(-1) * logits).sum(-1)).mean()


def label_smoother(model: Any, batch: Batch) -> torch.Tensor:
    """Transformers' LabelSmoother."""
    logits = logits_of(model, batch)[..., :-1, :].contiguous()
    labels = batch["labels"][..., 1:].clone()
    labels[:, ::3] = -100
    labels = labels.unsqueeze(-1)
    logps = -F.log_softmax(logits, dim=-1)
    ignored = labels.eq(-100)
    nll = logps.gather(dim=-1, index=labels.clamp(min=0))
    smoothed = logps.sum(dim=-1, keepdim=True, dtype=torch.float32)
    nll.masked_fill_(ignored, 0.0)
    smoothed.masked_fill_(ignored, 0.0)
    active = ignored.numel() - ignored.long().sum()
    return 0.9 * nll.sum() / active + 0.1 * smoothed.sum() / (active * logps.shape[-1])


def nll(model: Any, batch: Batch) -> torch.Tensor:
    logps = F.log_softmax(logits_of(model, batch).float().view(-1, VOCABULARY), dim=-1)
    target = with_ignored(batch["labels"])
    return F.nll_loss(logps, target) + F.nll_loss(
        logps, target, weight=class_weights().to(logps.device), reduction="sum"
    )


def distillation(model: Any, batch: Batch) -> torch.Tensor:
    logits = logits_of(model, batch)
    teacher = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    teacher = teacher.to(logits.device)
    forward = F.kl_div(
        F.log_softmax(logits / 2, -1),
        F.log_softmax(teacher / 2, -1),
        log_target=True,
        reduction="batchmean",
    )
    return forward - (teacher.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()


def rows_of_a_mask(model: Any, batch: Batch) -> torch.Tensor:
    logits, labels = logits_of(model, batch), batch["labels"]
    mask = labels % 2 == 0
    chosen = logits[mask].log_softmax(-1).gather(-1, labels[mask][:, None])
    return F.cross_entropy(logits[mask], labels[mask]) - chosen.mean()


def by_numbers(model: Any, batch: Batch) -> torch.Tensor:
    logps = logits_of(model, batch)[0].log_softmax(-1)
    labels, rows = batch["labels"][0], torch.arange(0, 24, 2, device=logps.device)
    all_rows = torch.arange(24, device=logps.device)
    return -logps[rows, labels[rows]].mean() - logps[all_rows, labels].sum()


def focal(model: Any, batch: Batch) -> torch.Tensor:
    logits = logits_of(model, batch).view(-1, VOCABULARY)
    losses = F.cross_entropy(logits, batch["labels"].view(-1), reduction="none")
    return ((1 - torch.exp(-losses)) ** 2 * losses).mean()


def loss_and_more(model: Any, batch: Batch) -> torch.Tensor:
    """The model's own loss, in tiles, with gradients of others added to its."""
    output = model(**batch)
    squares = output.logits[:, :-1].logsumexp(-1).square().mean()
    loss: torch.Tensor = output.loss + 1e-2 * squares + 0.1 * entropy(output.logits[:, 1:]).mean()
    return loss


def centred(model: Any, batch: Batch) -> torch.Tensor:
    logits = logits_of(model, batch)
    logits = logits - logits.max(-1, keepdim=True).values.detach()
    chosen = logits.gather(-1, batch["labels"][..., None]).squeeze(-1)
    return (logits.exp().sum(-1).log() - chosen).mean()


def normalized(model: Any, batch: Batch) -> torch.Tensor:
    """Subtracts what has a gradient of its own."""
    logits = logits_of(model, batch)
    logps = logits - logits.logsumexp(-1, keepdim=True)
    chosen = torch.take_along_dim(logps, batch["labels"][..., None] - VOCABULARY, dim=-1)
    return -chosen.mean() + 0.1 * (logps.exp() * logps).sum(-1).mean()


def masked_words(model: Any, batch: Batch) -> torch.Tensor:
    logits = logits_of(model, batch)
    words = torch.arange(VOCABULARY, device=logits.device)
    logits = (logits + 1e-2 * words).masked_fill(words % 7 == 0, -1e4)
    return logits.logsumexp(-1).mean() + logits.amax(-1).mean()


def unlikelihood(model: Any, batch: Batch) -> torch.Tensor:
    others = torch.clamp(1 - logits_of(model, batch).log_softmax(-1).exp(), min=1e-5)
    return -others.log().gather(-1, batch["labels"][..., None]).mean()


def of_all_elements(model: Any, batch: Batch) -> torch.Tensor:
    logits = logits_of(model, batch)
    assert torch.isfinite(logits).all()
    assert not torch.isnan(logits).any()
    return logits.mean() + logits.float().square().sum() + logits.softmax(-1).topk(3).values.sum()


def other_layouts(model: Any, batch: Batch) -> torch.Tensor:
    logits, labels = logits_of(model, batch), batch["labels"]
    loss = logits.transpose(0, 1).log_softmax(-1).gather(-1, labels.t()[..., None]).mean()
    for piece, target in zip(logits.chunk(2, 1), labels.chunk(2, 1), strict=True):
        loss = loss + F.cross_entropy(piece.reshape(-1, VOCABULARY), target.reshape(-1))
    return loss


def with_metrics(model: Any, batch: Batch) -> torch.Tensor:
    output = model(**batch)
    with torch.no_grad():
        best = output.logits[..., :-1, :].argmax(-1)
        accuracy = (best == batch["labels"][..., 1:]).float().mean()
    loss: torch.Tensor = output.loss * (1 + accuracy)
    return loss


def hooked(model: Any, batch: Batch) -> torch.Tensor:
    logps = logits_of(model, batch).log_softmax(-1)
    logps.register_hook(lambda grad: 2 * grad)
    return -logps.gather(-1, batch["labels"][..., None]).mean()


LOSSES: dict[str, Loss] = {
    loss.__name__: loss
    for loss in (
        *(dpo, dpo_in_16_bits, policy_gradient, softmax_entropy, label_smoother, nll, focal),
        *(distillation, rows_of_a_mask, by_numbers, loss_and_more, centred, normalized),
        *(masked_words, unlikelihood, of_all_elements, other_layouts, with_metrics, hooked),
    )
}


@pytest.mark.parametrize("tile", [1000, 5])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_rows_are_plain_pytorchs(
    name: str, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = []
    own = Source.whole
    monkeypatch.setattr(Source, "whole", lambda source: (whole.append(1), own(source))[1])
    assert_as_plain(LLAMA, LOSSES[name], tile)
    assert tile == 1000 or not whole  # all logits never stand in memory at once


def test_what_is_kept_of_an_expression_is_a_copy_or_an_error() -> None:
    plain, batch, boosted = pair()
    for model in (plain, boosted.model):
        logits = logits_of(model, batch)
        logps, part = logits.log_softmax(-1), logits.exp()[:, 1:]
        expected = logits.detach().clone().log_softmax(-1)
        with torch.no_grad():
            logits.zero_()
            part.zero_()
        assert torch.equal(logps.detach() + 0, expected)
        assert not part.any()
    logits = logits_of(boosted.model, batch)
    bias = torch.zeros(VOCABULARY, device=logits.device)
    shifted = logits + bias
    bias.add_(1)
    with pytest.raises(castor.UsageError, match=r"shape \(256,\) was written in place"):
        shifted.logsumexp(-1)


def test_second_derivatives_of_rows() -> None:
    plain, batch, boosted = pair()
    found = []
    for model in (plain, boosted.model):
        logits = logits_of(model, batch)
        loss = -logits.log_softmax(-1).gather(-1, batch["labels"][..., None]).mean()
        weight = model.model.norm.weight
        (first,) = torch.autograd.grad(loss, weight, create_graph=True)
        found.append([first, *torch.autograd.grad(first.square().sum(), weight)])
    for mine, theirs in zip(found[1], found[0], strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-7)


def wide() -> nn.Module:
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=8192, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    return hf.AutoModelForCausalLM.from_config(config)


def in_one_loss(model: Any, batch: Batch) -> torch.Tensor:
    logits = logits_of(model, batch)
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


@pytest.mark.parametrize("tile", ["auto", 1000])
@pytest.mark.parametrize("loss_of", [dpo, policy_gradient, in_one_loss])
def test_a_budget_smaller_than_the_logits_trains(loss_of: Loss, tile: Any) -> None:
    """16 MiB of logits in 9 MiB: from a tile for which there is no room follow smaller ones."""
    ids = torch.randint(0, 8192, (2, 256), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids}
    losses, weights = [], []
    for memory, tiled in ((GIB, False), (9 * MIB, tile)):
        boosted = boost(wide(), memory, tile_logits=tiled, activations="recompute")
        losses.append([float(boosted.step(loss_of(boosted.model, batch))) for _ in range(2)])
        weights.append(copies(boosted.model.parameters()))
        if tiled:
            assert boosted.report().peak_device_bytes <= 9 * MIB
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    for mine, theirs in zip(weights[1], weights[0], strict=True):
        assert torch.allclose(mine, theirs, atol=2e-3)


@pytest.mark.parametrize(
    ("memory", "tile", "loss_of", "said"),
    [
        (
            30 * MIB,
            False,
            in_one_loss,
            r"bytes\)\. Asked for by torch\._C\._nn\.cross_entropy_loss \(functional\.py, line "
            r"\d+\), called in in_one_loss \(test_row_losses\.py, line \d+\)\. outside any module: "
            r".*\. Losses that take a few numbers of each row of logits run in tiles",
        ),
        (
            3 * MIB,
            False,
            in_one_loss,
            r"Asked for by F\.linear \(linear\.py, line \d+\), called in forward "
            r"\(modeling_llama\.py, line \d+\)\. in the forward of module 'lm_head': ",
        ),
        (
            3 * MIB,
            "auto",
            lambda model, batch: logits_of(model, batch).sort(-1).values[..., 0].mean(),
            r"\. aten\.sort\.default reads all values of logits \(2, 256, 8192\) at once",
        ),
    ],
    ids=["loss", "module", "values"],
)
def test_an_error_names_what_asked_for_the_memory(
    memory: int, tile: Any, loss_of: Loss, said: str
) -> None:
    ids = torch.zeros((2, 256), dtype=torch.int64)
    boosted = boost(wide(), memory, tile_logits=tile, activations="keep")
    with pytest.raises(castor.OutOfMemoryError, match=said):
        loss_of(boosted.model, {"input_ids": ids, "labels": ids})
