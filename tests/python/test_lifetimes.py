"""When model and optimizer are gone, so are engine and session, whatever the user still holds."""

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import castor
import parallel_cases
from castor.runtime.engine import engine_of
from helpers import Boosted, assert_equal, boost, copies, go_on, without_collections
from rank_processes import found
from simulated import Simulation
from zoo import tower, tower_batch, tower_loss


def kept_nothing(_: Boosted) -> Any:
    return None


def kept_copy(boosted: Boosted) -> Any:
    return copy.deepcopy(boosted.model)


def kept_copy_of_both(boosted: Boosted) -> Any:
    return copy.deepcopy((boosted.model, boosted.optimizer))


def kept_loss(boosted: Boosted) -> Any:
    return tower_loss(boosted.model, 9)


def kept_report(boosted: Boosted) -> Any:
    return boosted.report(), boosted.booster.memory()


def kept_states(boosted: Boosted) -> Any:
    return boosted.model.state_dict(), boosted.optimizer.state_dict()


def hooked_by_the_user(boosted: Boosted) -> Any:
    """Cycles of the user's own: a module's hook that knows the model, the booster's report."""
    model, booster = boosted.model, boosted.booster

    def forward_hook(*_: Any) -> None:
        booster.report(model)

    model.layers[0].register_forward_hook(forward_hook)
    tower_loss(model, 8).backward()


@pytest.mark.parametrize("overlap", ["none", "forward", "backward"])
@pytest.mark.parametrize(
    "keep",
    [
        kept_nothing,
        kept_copy,
        kept_copy_of_both,
        kept_loss,
        kept_report,
        kept_states,
        hooked_by_the_user,
    ],
)
def test_engine_and_session_go_with_model_and_optimizer(
    keep: Callable[[Boosted], Any], overlap: str, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {}
    if overlap == "backward":
        settings = {"nonfinite": "ignore", "enable_gradient_accumulation": False}
    boosted = boost(
        tower(),
        overlap=overlap,
        nvme_path=tmp_path,
        nvme_offload_fraction=1.0,
        **settings,
    )
    go_on(boosted)
    kept = keep(boosted)
    boosted.optimizer.zero_grad()
    booster, engine = boosted.booster, weakref.ref(engine_of(boosted.model))
    assert list(tmp_path.iterdir()) != []
    del boosted
    gc.collect()
    assert engine() is None
    assert list(tmp_path.iterdir()) == [], "the session's scratch file"
    with pytest.raises(castor.UsageError, match="boosted last is gone"):
        booster.report()
    del kept


def test_reference_counts_alone_let_them_go() -> None:
    boosted = boost(tower())
    go_on(boosted)
    booster, engine = boosted.booster, weakref.ref(engine_of(boosted.model))
    with without_collections():
        del boosted
        assert engine() is None
    del booster


def test_a_booster_reports_the_next_model_after_the_first_is_gone() -> None:
    first = boost(tower())
    booster = first.booster
    del first
    model = tower()
    model, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
    assert booster.report().steps == 0


def test_a_part_that_is_kept_trains_on() -> None:
    boosted = boost(tower(), memory="48KiB")
    go_on(boosted)
    part, optimizer = boosted.model.layers, boosted.optimizer
    before = copies(part.parameters())
    del boosted
    gc.collect()
    x = torch.randn(4, 32)
    for layer in part:
        x = layer(x)
    x.square().mean().backward()
    optimizer.step()
    assert not any(
        torch.equal(a, b) for a, b in zip(part.parameters(), before, strict=True) if b.dim() > 1
    )
    del optimizer
    gc.collect()
    after = copies(part.parameters())
    assert_equal(copies(part.parameters()), after)


def test_models_go_right_after_backward_on_a_device_with_a_thread_of_its_own(
    simulated: Simulation,
) -> None:
    """Autograd's thread may be the last that drops a pass, when its model has gone."""
    for _ in range(8):
        boosted = simulated.boost(tower())
        boosted.booster.backward(boosted.model(**tower_batch(0)), boosted.optimizer)
        del boosted
        gc.collect()


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.whole)])
def test_process_groups_end_with_the_model_that_they_are_for(size: int, tmp_path: Path) -> None:
    threads = found(parallel_cases.come_and_go, size, tmp_path)
    assert {name: counts[2] - counts[1] for name, counts in threads.items()} == dict.fromkeys(
        threads, 0
    )
