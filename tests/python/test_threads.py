"""Threads beside the one that trains: what they ask neither hangs nor holds Python up."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

HERE = Path(__file__).parent

# Trains with a link on which a chunk takes 0.4 s, while threads ask all that may be asked. Python
# must go on meanwhile: `ticks` counts how long a thread that only sleeps is held up.
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
    going, longest = True, 0.0

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
        global longest
        while going:
            begun = time.perf_counter()
            time.sleep(0.001)
            longest = max(longest, time.perf_counter() - begun)

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
    print(longest)
"""


@pytest.mark.parametrize("settings", ["", 'overlap="forward"'], ids=["none", "forward"])
def test_asking_while_a_copy_is_under_way_neither_hangs_nor_stops_python(settings: str) -> None:
    script = textwrap.dedent(RUN).format(here=str(HERE), settings=settings)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 0.3
