"""Every operator that writes a parameter on the device counts, whatever version counters say."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers import (
    ON_THE_CPU_DEVICE,
    Boosted,
    boost,
    copies,
    equal,
    losses_of_boosted,
    tight_memory,
)
from stored_tower import WIDTH, go_on_wide, wide
from zoo import tower, tower_batch, tower_loss

# --- every way to write ---------------------------------------------------------------------------

EXTENSION = torch.library.Library("castor_test_writes", "DEF")
EXTENSION.define("halve_(Tensor(a!) x) -> ()")
EXTENSION.define("halve_each_(Tensor(a!)[] xs) -> ()")
EXTENSION.define("halve_composite_(Tensor(a!) x) -> ()")


def halve_uncounted(x: torch.Tensor) -> None:
    with torch.autograd._unsafe_preserve_version_counter(x):
        x.detach().mul_(0.5)


def halve_each_uncounted(xs: list[torch.Tensor]) -> None:
    for x in xs:
        halve_uncounted(x)


def add_product(x: torch.Tensor, y: torch.Tensor) -> None:
    x.add_(2 * y)


for key in ("CPU", "PrivateUse1"):
    EXTENSION.impl("halve_", halve_uncounted, key)
    EXTENSION.impl("halve_each_", halve_each_uncounted, key)
EXTENSION.define("add_product_(Tensor(a!) x, Tensor y) -> ()")
EXTENSION.impl("add_product_", add_product, "CompositeImplicitAutograd")
EXTENSION.impl("halve_composite_", halve_uncounted, "CompositeImplicitAutograd")


def through_set(param: nn.Parameter) -> None:
    other = torch.empty(0, device=param.device)
    other.set_(param.untyped_storage(), param.storage_offset(), param.shape, param.stride())
    other.mul_(0.5)


def through_set_of_a_tensor(param: nn.Parameter) -> None:
    torch.empty(0, device=param.device).set_(param.detach()).mul_(0.5)


def through_assigned_data(param: nn.Parameter) -> None:
    other = torch.empty(0, device=param.device)
    other.data = param
    other.mul_(0.5)


def in_inference_mode(write: Callable[[Any], object]) -> Callable[[Any], object]:
    def run(param: nn.Parameter) -> None:
        with torch.inference_mode():
            write(param)

    return run


def storage_made_in_inference_mode(param: nn.Parameter) -> None:
    with torch.inference_mode():
        through_set(param)


def fused_sgd(param: nn.Parameter) -> None:
    torch._fused_sgd_(
        [param.detach()], [param.detach() * 0.5], [], weight_decay=0.0, momentum=0.0, lr=1.0,
        dampening=0.0, nesterov=False, maximize=False, is_first_step=True,
    )  # fmt: skip


WRITES: dict[str, Callable[[Any], object]] = {
    "in place": lambda p: p.mul_(0.5),
    "data": lambda p: p.data.mul_(0.5),
    "view of data": lambda p: p.data.view(-1)[:].mul_(0.5),
    "data of detached data": lambda p: p.detach().data.detach().data.mul_(0.5),
    "detach": lambda p: p.detach().mul_(0.5),
    "another parameter": lambda p: nn.Parameter(p.data).mul_(0.5),
    "subclass": lambda p: p.data.as_subclass(nn.Buffer).mul_(0.5),
    "out": lambda p: torch.mul(p.detach(), 0.5, out=p.data),
    "foreach": lambda p: torch._foreach_mul_([p], 0.5),
    "foreach of data": lambda p: torch._foreach_mul_([p.data], 0.5),
    "fused optimizer": fused_sgd,
    "set_ of a storage": through_set,
    "set_ of a tensor": through_set_of_a_tensor,
    "assigned data": through_assigned_data,
    "inference mode": in_inference_mode(lambda p: p.mul_(0.5)),
    "data in inference mode": in_inference_mode(lambda p: p.data.mul_(0.5)),
    "set_ in inference mode": storage_made_in_inference_mode,
    "extension": torch.ops.castor_test_writes.halve_,
    "extension with a list": lambda p: torch.ops.castor_test_writes.halve_each_([p]),
    "extension for every device": torch.ops.castor_test_writes.halve_composite_,
    "extension in inference mode": in_inference_mode(torch.ops.castor_test_writes.halve_composite_),
    "extension on data": lambda p: torch.ops.castor_test_writes.halve_(p.data),
}


def assert_halved(boosted: Boosted, evaluate: Callable[[], object], name: str) -> None:
    """Writes to every parameter, of which some are on the device, which then pass through it."""
    with torch.no_grad():
        evaluate()
    before, evictions = copies(boosted.model.parameters()), boosted.report().evictions
    with torch.no_grad():
        evaluate()  # reading may have brought some to the host
        for param in boosted.model.parameters():
            WRITES[name](param)
        evaluate()
        evaluate()
    assert boosted.report().evictions > evictions
    for param, value in zip(boosted.model.parameters(), before, strict=True):
        assert equal(param.cpu(), value * 0.5)


@pytest.mark.parametrize("name", WRITES)
def test_a_write_on_the_device_is_kept(name: str) -> None:
    boosted = boost(tower(), tight_memory(tower, tower_loss))
    losses_of_boosted(boosted, tower_loss, steps=2)
    assert_halved(boosted, lambda: tower_loss(boosted.model, 0), name)


@pytest.mark.parametrize("name", ["in place", "data", "fused optimizer", "extension"])
def test_a_write_on_the_device_is_kept_where_weights_are_on_nvme(name: str, tmp_path: Path) -> None:
    boosted = wide(tmp_path, memory=2**18)
    go_on_wide(boosted, 0, 2)
    batch = tower_batch(3, width=WIDTH)
    assert_halved(boosted, lambda: boosted.model(**batch), name)


# --- what does not change ---------------------------------------------------------------------


def test_data_keeps_its_own_version_counter() -> None:
    """As in torch: autograd does not see what is written through it."""
    boosted = boost(tower())
    weight = boosted.model.layers[0].weight
    version, data = weight._version, weight.data
    data.mul_(1.0)
    assert (data._version, weight.data._version, weight._version) == (1, 0, version)
    if ON_THE_CPU_DEVICE:  # torch's legacy constructor knows no key of a tensor that is watched
        assert data.new(3).shape == (3,)
    assert data.type() == torch.empty(0, device=data.device).type()


def test_an_operator_of_an_extension_trains_through_autograd_as_before() -> None:
    """One kernel for every device may call operators that autograd records."""
    weight = torch.ones(3, requires_grad=True)
    buffer = torch.zeros(3)
    boost(tower())
    torch.ops.castor_test_writes.add_product_(buffer, weight)
    buffer.sum().backward()
    assert equal(weight.grad, torch.full((3,), 2.0))
