"""Threads beside the one that trains: what they ask neither hangs nor holds Python up."""

import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import builds
from helpers import assert_equal, boost, exact_state, go_on
from zoo import tower

HERE = Path(__file__).parent

# Trains with a link on which a chunk takes 0.4 s, while threads ask all that may be asked. Python
# must go on meanwhile: `tick` tells for how much of the time a thread that only sleeps is held up.
RUN = """
    import sys, threading, time
    sys.path.insert(0, {here!r})
    import torch
    from torch import nn
    import castor
    from castor.runtime.engine import engine_of

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4)))
    plugin = castor.GeminiPlugin(
        device="cpu", precision="fp32", device_memory="1500KiB", host_memory="64MiB",
        chunk_bytes="256KiB", link_bandwidth=640 * 1024, {settings}
    )
    booster = castor.Booster(plugin)
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
    for param in model.parameters():
        param.register_hook(lambda grad: grad)  # gradients that Python knows
    session = engine_of(model).session
    going, begun, held_up = True, time.perf_counter(), 0.0

    def ask():
        while going:
            booster.report(model)
            booster.memory(model)
            session.step_figures()
            session.prediction()
            session.trace()
            session.timeline()
            session.chunks()
            session.whole
            session.home(0)
            torch.tensor([1.0] * 64)

    def tick():
        global held_up
        while going:
            slept = time.perf_counter()
            time.sleep(0.001)
            if (seconds := time.perf_counter() - slept) > 0.2:
                held_up += seconds

    threads = [threading.Thread(target=work) for work in (ask, ask, tick)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(2):
            loss = model(torch.ones(4, 256)).square().mean()
            booster.backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
    finally:
        going = False
        for thread in threads:
            thread.join()
    print(held_up / (time.perf_counter() - begun))
"""


@pytest.mark.parametrize("settings", ["", 'overlap="forward"'], ids=["none", "forward"])
def test_asking_while_a_copy_is_under_way_neither_hangs_nor_stops_python(settings: str) -> None:
    script = textwrap.dedent(RUN).format(here=str(HERE), settings=settings)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    if builds.WANTED is None:  # a sanitizer's build is slow all the time
        assert float(done.stdout) < 0.2  # a busy machine holds it up as well, but not all along


BACKWARD = {"overlap": "backward", "nonfinite": "ignore", "enable_gradient_accumulation": False}


@pytest.mark.parametrize(
    "settings",
    [{}, {"overlap": "forward"}, {"overlap": "forward", "link_bandwidth": "1GB/s"}, BACKWARD],
    ids=["none", "forward", "link", "backward"],
)
def test_weights_may_be_read_while_training_goes_on(settings: dict[str, Any]) -> None:
    """They change nothing of what is trained, and see whole weights or are told of the update."""
    reference = boost(tower(), **settings)
    expected = go_on(reference, steps=6)
    boosted = boost(tower(), **settings)
    params = list(boosted.model.parameters())
    stop = threading.Event()
    failures: list[Exception] = []

    @torch.no_grad()
    def read(order: list[torch.Tensor]) -> None:
        try:
            while not stop.is_set():
                for param in order:
                    try:
                        assert bool(param.sum().isfinite())
                    except RuntimeError as error:  # between backward's update and step() as well
                        if "updat" not in str(error):
                            raise
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=read, args=(order,)) for order in (params, params[::-1])]
    for thread in threads:
        thread.start()
    try:
        losses = go_on(boosted, steps=6)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failures
    assert losses == expected
    assert_equal(exact_state(boosted), exact_state(reference))
