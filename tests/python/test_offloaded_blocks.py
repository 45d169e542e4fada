"""Blocks whose activations wait for backward in host memory: plain PyTorch's bits."""

import copy
import functools
import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import castor
from castor.activations.blocks import find_blocks
from helpers import assert_equal, boost, copies, on_device_of, plugin, train_on
from test_recomputed_blocks import (
    MODELS,
    SOME_MODELS,
    Block,
    Tower,
    assert_only_training_differs,
    assert_same_in_half_precision,
    assert_same_run_in,
    of_boosted,
    of_plain,
    own,
    with_dropout,
)
from zoo import CASES, Case

LLAMA = CASES["llama"]
LINKS = {"memory": {}, "slow": {"link_bandwidth": "100MB/s"}}
"""Copies that are made at once, and copies beside the compute that must be waited for."""


@pytest.mark.parametrize("dropout", [False, True], ids=["", "dropout"])
@pytest.mark.parametrize("name", SOME_MODELS)
def test_loss_gradients_and_random_state_are_plain_pytorchs(name: str, dropout: bool) -> None:
    case = MODELS[name]
    case = replace(case, build=with_dropout(case.build)) if dropout else case
    expected = of_plain(case)
    blocks = list(find_blocks(case.model()))
    for activations, count in (
        ("offload", len(blocks)),
        ({"*": "offload", blocks[0]: "keep", blocks[-1]: "recompute"}, len(blocks) - 2),
    ):
        for link in LINKS.values():
            found, report = of_boosted(case, activations=activations, **link)
            assert_equal(found, expected)
            assert report.offloaded_blocks == count
            assert report.divergent_steps == 0
    boosted = boost(case.model(), activations="offload")
    train_on(boosted, case)
    assert boosted.report().offloaded_activation_bytes > 0


def watched(loss: torch.Tensor) -> list[weakref.ref[Any]]:
    """What is gone once the nodes that have computed it are."""
    nodes, found = [loss.grad_fn], {}
    while nodes:
        node = nodes.pop()
        if (
            node is not None
            and node not in found
            and node.name() != "torch::autograd::AccumulateGrad"
        ):
            mark = functools.partial(lambda *_: None)
            node.register_hook(mark)
            found[node] = weakref.ref(mark)
            nodes += [origin for origin, _ in node.next_functions]
    return list(found.values())


@pytest.mark.parametrize("activations", ["keep", "offload", "recompute", "auto"])
@pytest.mark.parametrize("name", SOME_MODELS)
def test_a_loss_that_is_dropped_leaves_nothing(name: str, activations: str) -> None:
    """Without backward, which would have let go of what autograd saved."""
    case = MODELS[name]
    boosted = boost(case.model(), activations=activations)
    train_on(boosted, case, steps=1)
    marks = watched(case.loss(boosted.model(**on_device_of(boosted, case.batch(1))), case.batch(1)))
    assert len(marks) > 10
    gc.collect()
    assert not any(mark() for mark in marks)


class Wide(Tower):
    """Blocks that save 900 KiB each, of a batch of 64 rows."""

    def __init__(self, block: type[nn.Module] = Block, num_blocks: int = 8) -> None:
        super().__init__(block, 256)
        self.blocks = nn.ModuleList(block(256) for _ in range(num_blocks))


def wide(block: type[nn.Module] = Block, num_blocks: int = 8) -> Case:
    def batch(seed: int) -> dict[str, Any]:
        return {"x": torch.randn(64, 256, generator=torch.Generator().manual_seed(seed))}

    return Case("wide", lambda: Wide(block, num_blocks), batch, lambda loss, _: loss)


@pytest.mark.parametrize("link", LINKS)
def test_the_device_holds_two_blocks_activations_at_most(link: str) -> None:
    case = wide()
    kept = of_boosted(case)[1].peak_nonmodel_bytes
    one = kept - of_boosted(wide(num_blocks=7))[1].peak_nonmodel_bytes
    found, report = of_boosted(case, activations="offload", **LINKS[link])
    assert_equal(found, of_plain(case))
    held = 2 if link == "memory" else 3
    rest = kept - 8 * one
    assert report.peak_nonmodel_bytes < held * one + max(rest, 0) + (1 << 20)
    assert report.offloaded_activation_bytes == 0  # no step has ended


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("overlap", ["none", "forward"])
def test_training_in_a_tight_budget(link: str, overlap: str) -> None:
    case = wide()
    settings: dict[str, Any] = {"overlap": overlap} | LINKS[link]
    kept = boost(case.model(), **settings)
    losses = train_on(kept, case)
    free = boost(case.model(), activations="offload", **settings)
    train_on(free, case)
    budget = free.report().peak_nonmodel_bytes + (5 << 20)
    assert_same_run_in(budget, kept, losses, case, activations="offload", **settings)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_accumulation_and_nvme(precision: str, tmp_path: Path) -> None:
    settings = {"activations": "offload", "nvme_path": tmp_path} | LINKS["slow"]
    assert_same_in_half_precision(precision, **settings)


@pytest.mark.parametrize("part", ["mlp", "norm"])
def test_parts_of_blocks(part: str) -> None:
    case = wide()
    found, report = of_boosted(case, activations=f"offload:{part}")
    assert_equal(found, of_plain(case))
    assert report.offloaded_blocks == 8


def test_a_parameter_written_before_backward_raises_as_in_plain_pytorch() -> None:
    case = wide()
    boosted = boost(case.model(), activations="offload")
    loss = boosted.model(**case.batch(0))
    with torch.no_grad():
        boosted.model.blocks[2].mlp[0].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        boosted.booster.backward(loss, boosted.optimizer)


@pytest.mark.parametrize("link", LINKS)
def test_a_graph_is_read_twice(link: str) -> None:
    case = wide()
    plain = case.model()
    torch.manual_seed(1)
    plain(**case.batch(0)).backward()
    expected = [2 * param.grad for param in plain.parameters() if param.grad is not None]
    boosted = boost(case.model(), activations="offload", **LINKS[link])
    torch.manual_seed(1)
    loss = boosted.model(**case.batch(0))
    loss.backward(retain_graph=True)
    loss.backward()
    assert_equal(copies(param.grad for param in boosted.model.parameters()), expected)


def test_a_gradient_of_a_gradient() -> None:
    case = wide()

    def penalty(model: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(1)
        x = case.batch(0)["x"].requires_grad_()
        (of_x,) = torch.autograd.grad(model(x=x), x, create_graph=True)
        (again,) = torch.autograd.grad(of_x.square().sum(), x)
        return [of_x.detach(), again]

    assert_equal(penalty(boost(case.model(), activations="offload").model), penalty(case.model()))


class Checkpointing(Block):
    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return checkpoint(super().forward, x, scale=scale, use_reentrant=False)  # type: ignore[no-any-return]


def test_a_block_that_checkpoints_itself() -> None:
    case = wide(Checkpointing)
    found, _ = of_boosted(case, activations="offload")
    assert_equal(found, of_plain(case))


def test_saved_tensors_hooks_of_others_see_the_other_modules() -> None:
    case = wide()
    seen: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor.nbytes)
        return tensor

    boosted = boost(case.model(), activations="offload")
    torch.manual_seed(1)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = boosted.model(**case.batch(0))
    boosted.booster.backward(loss, boosted.optimizer)
    assert seen
    plain = case.model()
    torch.manual_seed(1)
    plain(**case.batch(0)).backward()
    assert_equal(
        copies(p.grad for p in boosted.model.parameters()),
        copies(p.grad for p in plain.parameters()),
    )


def test_only_training_forwards_offload() -> None:
    assert_only_training_differs("offload")


def test_a_dropped_model_is_freed_and_copies_are_plain() -> None:
    case = wide()
    boosted = boost(case.model(), activations="offload")
    train_on(boosted, case)
    copied = copy.deepcopy(boosted.model)
    plain = case.model()
    plain.load_state_dict(boosted.model.state_dict())
    torch.manual_seed(2)
    expected = plain(**case.batch(9))
    torch.manual_seed(2)
    assert torch.equal(copied(**case.batch(9)), expected)
    gone = weakref.ref(boosted.model.blocks[0])
    del boosted
    gc.collect()
    assert gone() is None


def test_a_forward_of_somebody_elses_is_refused() -> None:
    model = own().model()
    forward = model.blocks[1].forward
    model.blocks[1].forward = lambda *args, **kwargs: forward(*args, **kwargs)
    with pytest.raises(castor.UsageError, match="a forward has been put in place of its own"):
        boost(model, activations="offload")


def test_models_own_checkpointing_gives_way() -> None:
    model = LLAMA.model()
    model.activation_checkpointing_enable()
    with pytest.warns(UserWarning, match="the model's gradient checkpointing gives way"):
        boosted = boost(model, activations="offload")
    train_on(boosted, LLAMA)
    report = boosted.report()
    assert (report.recomputed_blocks, report.offloaded_blocks) == (0, 2)


def test_settings_name_it() -> None:
    assert plugin(activations={"*": "offload:mlp"}).config.activations == {"*": "offload:mlp"}
    with pytest.raises(ValueError, match="activations has 'offload:'"):
        plugin(activations="offload:")
