"""Offloaded activations that the host has no room for go to NVMe: plain PyTorch's bits."""

import functools
import gc
from pathlib import Path
from typing import Any

import pytest
import torch

import castor
import grids
from castor.runtime.engine import engine_of
from faulty_disk import FaultyDisk
from helpers import Boosted, assert_equal, boost, copies, train_on
from test_auto_activations import LONG, choosing, last_kept, step
from test_offloaded_blocks import LINKS, wide
from test_recomputed_blocks import of_plain, passes

PAGE = 1 << 20
WINDOW = 8 * PAGE + 4095
"""Of eight pages, aligned to 4 KiB."""
BLOCK = 64 * 256 * 4 * 14
"""What a block of wide() saves: its input, and what comes of it in 256 and in 1024 columns."""
NUM_PAGES = 7 * 16
"""Enough for all tensors of seven blocks, each in a page of its own."""


@functools.cache
def ample_host_bytes() -> int:
    """Of wide() with all blocks offloaded."""
    return int(boost(wide().model(), activations="offload").report().host_bytes)


@functools.cache
def plain_passes() -> list[Any]:
    return of_plain(wide())


def boost_small(nvme_path: Path | None, *, pages: int = NUM_PAGES, **settings: Any) -> Boosted:
    """wide() with all blocks offloaded, and host memory for the model and one block."""
    case = wide()
    needed = ample_host_bytes()
    if nvme_path:
        settings |= {"nvme_path": nvme_path, "nvme_memory": pages * PAGE}
        needed += WINDOW
    return boost(case.model(), host_memory=needed + BLOCK, activations="offload", **settings)


def losses_of(boosted: Boosted) -> list[float]:
    torch.manual_seed(2)  # of dropout
    return train_on(boosted, wide())


def run(boosted: Boosted) -> list[Any]:
    return passes(
        boosted.model, lambda loss: boosted.booster.backward(loss, boosted.optimizer), wide()
    )


@pytest.mark.parametrize("link", LINKS)
def test_bits_are_plain_pytorchs(link: str, tmp_path: Path) -> None:
    boosted = boost_small(tmp_path, **LINKS[link])
    assert boosted.report().nvme_bytes == NUM_PAGES * PAGE
    assert_equal(run(boosted), plain_passes())
    report = boosted.report()
    assert report.host_bytes <= report.host_budget_bytes
    assert report.nvme_written_bytes >= 5 * BLOCK
    assert report.nvme_read_bytes > 0


def test_steps_follow_the_plan(tmp_path: Path) -> None:
    case = wide()
    boosted = boost_small(tmp_path)
    ample = boost(case.model(), activations="offload")
    assert losses_of(boosted) == losses_of(ample)
    assert_equal(copies(boosted.model.parameters()), copies(ample.model.parameters()))
    report = boosted.report()
    assert report.divergent_steps == 0
    assert report.offloaded_activation_bytes == ample.report().offloaded_activation_bytes
    assert "activations through a window of" in report.nvme_engine


def test_beside_states_and_weights_on_nvme(tmp_path: Path) -> None:
    case = wide()
    expected = boost(case.model())
    losses = losses_of(expected)
    boosted = boost(
        case.model(), host_memory="24MiB", nvme_path=tmp_path, nvme_memory="256MiB",
        activations="offload",
    )  # fmt: skip
    assert losses_of(boosted) == losses
    assert_equal(copies(boosted.model.parameters()), copies(expected.model.parameters()))
    assert boosted.report().nvme_bytes > 200 << 20  # all but less than a page of the rest


def test_a_graph_is_read_twice_and_its_pages_are_free_again(tmp_path: Path) -> None:
    case = wide()
    plain = case.model()
    torch.manual_seed(1)
    plain(**case.batch(0)).backward()
    expected = [2 * param.grad for param in plain.parameters() if param.grad is not None]
    boosted = boost_small(tmp_path)
    for _ in range(2):  # of pages that are all in use in each
        boosted.model.zero_grad()
        torch.manual_seed(1)
        loss = boosted.model(**case.batch(0))
        loss.backward(retain_graph=True)
        loss.backward()
        assert_equal(copies(param.grad for param in boosted.model.parameters()), expected)
        dropped = boosted.model(**case.batch(1))
        del loss, dropped
        gc.collect()


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("write:{}:EIO", castor.IoError),
        ("read:{}:EIO", castor.IoError),
        ("read:{}:flip", castor.CorruptionError),
        ("any:{}:EINTR", None),
        ("any:{}:short", None),
    ],
)
def test_a_fault_is_named_and_what_follows_is_right(
    fault: str, error: type[castor.Error] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = plain_passes()
    errors = (error,) if error else ()
    disk = FaultyDisk(monkeypatch)
    raised = 0
    for operation in grids.some((1, 7, 20), 1, 20):
        disk.set(fault.format(operation))
        boosted = boost_small(tmp_path)
        weights = copies(boosted.model.parameters())
        said = ""
        try:
            found = run(boosted)
        except errors as caught:
            said = str(caught)
        if said:
            raised += 1
            assert "castor.scratch" in said
            boosted.model.zero_grad()
            gc.collect()
            found = run(boosted)
        assert_equal(found, expected)
        assert_equal(copies(boosted.model.parameters()), weights)
        del boosted
        gc.collect()
    # What was read ahead, and not needed in the end, may have failed.
    assert raised >= (1 if error else 0)


def auto_in_little_host_memory(tmp_path: Path | None, pages: int) -> Boosted:
    """LONG's blocks, decided by "auto", and host memory for the model and one or two of them."""
    needed = boost(LONG.model(), tile_logits=False).report().host_bytes + (2 << 20)
    settings: dict[str, Any] = {}
    if tmp_path:
        settings = {"nvme_path": tmp_path, "nvme_memory": pages * PAGE}
        needed += WINDOW
    return boost(
        LONG.model(), host_memory=needed, activations="auto", tile_logits=False, **settings
    )


def test_auto_counts_what_goes_on_to_nvme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = boost(LONG.model(), tile_logits=False)
    losses = train_on(plain, LONG)
    chosen = choosing(last_kept(0, "offload"), monkeypatch)
    without = auto_in_little_host_memory(None, 0)
    step(without, LONG.batch(0), LONG)
    assert not chosen[-1].fits
    boosted = auto_in_little_host_memory(tmp_path, 8 * 32)
    assert train_on(boosted, LONG) == losses
    assert chosen[-1].fits
    report = boosted.report()
    assert report.offloaded_blocks == 8
    assert report.nvme_written_bytes > 0 < report.nvme_read_bytes
    assert report.divergent_steps == 0
    assert report.host_bytes <= report.host_budget_bytes
    assert_equal(copies(boosted.model.parameters()), copies(plain.model.parameters()))


def test_auto_recomputes_what_finds_no_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = boost(LONG.model(), tile_logits=False)
    losses = train_on(plain, LONG, steps=6)
    choosing(last_kept(0, "offload"), monkeypatch)
    boosted = auto_in_little_host_memory(tmp_path, 8)
    assert train_on(boosted, LONG, steps=6) == losses
    policy: Any = engine_of(boosted.model).blocks
    assert policy._auto._nvme_share < 1
    assert_equal(copies(boosted.model.parameters()), copies(plain.model.parameters()))
