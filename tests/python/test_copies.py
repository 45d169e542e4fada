"""Copies of chunks on the CPU device: torch's kernel on torch's threads, and nobody sees them."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from helpers import Boosted, assert_equal, boost, exact_state, go_on, tight_memory
from zoo import tower, tower_batch, tower_loss


def ample_and_tight() -> tuple[Boosted, Boosted]:
    return boost(tower()), boost(tower(), tight_memory(tower, tower_loss))


class Recorder(TorchDispatchMode):
    """The names of all operators, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_the_operators_of_the_model_alone() -> None:
    seen = []
    for boosted in ample_and_tight():
        with Recorder() as recorder:
            go_on(boosted)
        seen.append(recorder.names)
    assert boosted.report().evictions > 0
    assert seen[0] == seen[1]


def test_a_dispatch_mode_does_not_see_what_resident_chunks_keep_of_their_parameters() -> None:
    seen = []
    for policy in ("auto", "cpu"):
        boosted = boost(tower(), precision="bf16", placement_policy=policy)
        go_on(boosted)
        with Recorder() as recorder:
            go_on(boosted)
        seen.append(recorder.names)
        assert (boosted.report().resident_chunks > 0) == (policy == "auto")
    assert seen[0] == seen[1]


def test_the_profiler_sees_the_operators_of_the_model_alone() -> None:
    seen = []
    for boosted in ample_and_tight():
        with torch.profiler.profile(acc_events=True) as profiler:
            go_on(boosted)
        names = (event.name for event in profiler.events())
        seen.append(Counter(name for name in names if name.startswith("aten::")))
    assert boosted.report().evictions > 0
    assert seen[0] == seen[1]


@contextmanager
def num_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("count", [1, 3])
def test_any_number_of_threads_copies_every_byte(count: int) -> None:
    states = []
    with num_threads(count):
        for boosted in ample_and_tight():
            go_on(boosted)
            states.append(exact_state(boosted))
    assert boosted.report().evictions > 0
    assert_equal(states[0], states[1])


def test_copies_inside_vmap_and_inference_mode() -> None:
    results = []
    for boosted in ample_and_tight():
        go_on(boosted)
        before = boosted.report().evictions
        x = tower_batch(0)["x"]
        with torch.inference_mode():
            results.append([torch.vmap(boosted.model)(x), boosted.model(x)])
    assert boosted.report().evictions > before
    assert_equal(results[1], results[0])
