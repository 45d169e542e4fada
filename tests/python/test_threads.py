"""Threads beside the one that trains: what they ask neither hangs nor holds Python up."""

import os
import signal
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import builds
import castor
from castor import _C
from helpers import (
    Boosted,
    assert_equal,
    boost,
    device_of,
    equal,
    exact_state,
    go_on,
    largest_module_bytes,
    on_device_of,
    param_bytes,
    plugin,
)
from rank_processes import run_python
from simulated import Simulation
from stored_tower import wide
from zoo import llama, tower, tower_batch

HERE = Path(__file__).parent

# Trains with a link on which a chunk takes 0.4 s, while threads ask all that may be asked. Python
# must go on meanwhile: `tick` tells for how much of the time a thread that only sleeps is held up.
RUN = """
    import sys, time
    from concurrent.futures import ThreadPoolExecutor
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
            session.consistent
            session.memory()
            torch.tensor([1.0] * 64)

    def tick():
        global held_up
        while going:
            slept = time.perf_counter()
            time.sleep(0.001)
            if (seconds := time.perf_counter() - slept) > 0.2:
                held_up += seconds

    pool = ThreadPoolExecutor()
    threads = [pool.submit(work) for work in (ask, ask, tick)]
    try:
        for _ in range(2):
            loss = model(torch.ones(4, 256)).square().mean()
            booster.backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
    finally:
        going = False
    for thread in threads:
        thread.result()
    print(held_up / (time.perf_counter() - begun))
"""


@pytest.mark.parametrize("settings", ["", 'overlap="forward"'], ids=["none", "forward"])
def test_asking_while_a_copy_is_under_way_neither_hangs_nor_stops_python(
    settings: str, tmp_path: Path
) -> None:
    script = tmp_path / "asking.py"
    script.write_text(textwrap.dedent(RUN).format(here=str(HERE), settings=settings))
    done = run_python(script)
    assert done.returncode == 0, done.stderr
    if builds.WANTED is None:  # a sanitizer's build is slow all the time
        assert float(done.stdout) < 0.5  # a busy machine holds it up as well, but not all along


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


CHUNK_OF_ONE = 4352
"""Bytes of a chunk that holds one layer of the tower."""
HALF = 30_000
"""A budget for half of the tower's chunks, and for a step's activations."""


def in_threads(*works: Callable[[], None], timeout: float = 60.0) -> list[str]:
    """Runs each on a thread of its own; gives what they raised.

    A thread that is not over in time is a failure of its own, and stands behind no other test.
    """
    errors: list[str] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=guarded, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
    assert not any(thread.is_alive() for thread in threads)
    return errors


@contextmanager
def pass_patience(seconds: float) -> Iterator[None]:
    """Within it, a wait for a pass of another thread that does nothing ends so soon."""
    before = _C.set_pass_patience(seconds)
    try:
        yield
    finally:
        _C.set_pass_patience(before)


def inputs(boosted: Boosted, count: int, *, width: int = 32) -> list[torch.Tensor]:
    return [on_device_of(boosted, tower_batch(seed, width=width))["x"] for seed in range(count)]


@torch.no_grad()
def evaluations(
    boosted: Boosted, count: int = 12, *, width: int = 32
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Inputs, and what one thread makes of them."""
    xs = inputs(boosted, count, width=width)
    return xs, [boosted.model(x).clone() for x in xs]


def serving(memory: int = 10_000, **settings: Any) -> Boosted:
    """A tower for inference; by default barely one of its layers fits on the device.

    Beside it fit the last hidden state and the output of three threads whose pass is over: their
    frames still hold them when the next pass begins.
    """
    booster = castor.Booster(plugin(memory, **{"chunk_bytes": CHUNK_OF_ONE, **settings}))
    model, *_ = booster.boost(tower())
    return Boosted(booster, model, None)


def serving_in_bf16() -> Boosted:
    """As serving(), with room for what a bf16 layer of this processor takes as working memory."""
    ample = serving(2**26, precision="bf16")
    evaluations(ample, 1)
    return serving(6_500 + ample.report().peak_nonmodel_bytes, precision="bf16")


SERVING: dict[str, Callable[[Path], Boosted]] = {
    "all": lambda _: serving(2**26),
    "half": lambda _: serving(20_000),
    "one": lambda _: serving(),
    "one_bf16": lambda _: serving_in_bf16(),
    "nvme": lambda path: wide(path),
    "nvme_tight": lambda path: wide(path, memory=56_000),
}


@pytest.mark.parametrize("boosted_as", SERVING)
def test_threads_that_share_a_model_for_inference_get_right_outputs(
    boosted_as: str, tmp_path: Path
) -> None:
    """Four threads, each call compared with what one thread makes of the same input."""
    boosted = SERVING[boosted_as](tmp_path)
    model = boosted.model
    xs, expected = evaluations(boosted, width=model.head.in_features)
    wrong: list[int] = []

    def serve(first: int) -> None:
        for j in range(2 * len(xs)):
            i = (7 * j + first) % len(xs)
            with torch.inference_mode() if first % 2 else torch.no_grad():
                if not torch.equal(model(xs[i]), expected[i]):
                    wrong.append(i)

    assert in_threads(*(partial(serve, first) for first in range(4))) == []
    assert wrong == []
    report = boosted.report()
    assert report.peak_device_bytes <= report.device_budget_bytes


@pytest.mark.parametrize("fraction", [0.9, 0.35])
def test_two_threads_generate_at_once(fraction: float) -> None:
    """Each gets the tokens that one thread alone gets."""
    model = llama()
    model.eval()
    memory = int(fraction * param_bytes(model)) + 4 * largest_module_bytes(model)
    boosted = Boosted(castor.Booster(plugin(memory, chunk_bytes=16384)), model, None)
    boosted.booster.boost(model)
    prompts = [torch.arange(1, 5 + i).reshape(1, -1).to(device_of(model)) for i in range(4)]

    def generate(prompt: torch.Tensor) -> list[int]:
        tokens = model.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0)
        return list(tokens[0].tolist())

    expected = [generate(prompt) for prompt in prompts]
    got: dict[int, list[int]] = {}

    def serve(first: int) -> None:
        for i in range(first, len(prompts), 2):
            got[i] = generate(prompts[i])

    assert in_threads(partial(serve, 0), partial(serve, 1)) == []
    assert [got[i] for i in range(len(prompts))] == expected


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def own_step(model: nn.Module) -> torch.optim.Optimizer:
    """One that no rule of castor's runs."""
    return torch.optim.Rprop(model.parameters(), lr=1e-3)


OVERLAPS: dict[str, dict[str, Any]] = {
    "none": {},
    "forward": {"overlap": "forward"},
    "backward": BACKWARD,
    "bf16": {"precision": "bf16"},
}


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("optimizer", [sgd, adamw, own_step])
def test_training_beside_evaluation_is_training_alone(
    optimizer: Callable[[nn.Module], torch.optim.Optimizer], overlap: str
) -> None:
    """Losses and weights keep their bits; each evaluation is of the weights of one step."""
    settings = OVERLAPS[overlap]
    if optimizer is own_step and overlap in ("forward", "backward"):
        pytest.skip("an optimizer's own step runs in step()")
    steps = 8

    def boosted_tower() -> Boosted:
        model = tower()
        return boost(model, HALF, optimizer(model), chunk_bytes=CHUNK_OF_ONE, **settings)

    reference = boosted_tower()
    x = inputs(reference, 1)[0]
    expected, outputs = [], []
    for seed in range(steps):
        with torch.no_grad():
            outputs.append(reference.model(x))
        expected += go_on(reference, seed, 1)
    with torch.no_grad():
        outputs.append(reference.model(x))

    boosted = boosted_tower()
    begun, stop = threading.Event(), threading.Event()
    strange: list[torch.Tensor] = []

    def evaluate() -> None:
        while not stop.is_set():
            with torch.no_grad():
                output = boosted.model(x)
            begun.set()
            if not any(torch.equal(output, one) for one in outputs):
                strange.append(output)

    losses: list[float] = []

    def train() -> None:
        try:
            begun.wait(60)  # eight small steps may be over before another thread has had a turn
            losses.extend(go_on(boosted, steps=steps))
        finally:
            stop.set()

    assert in_threads(train, evaluate, evaluate) == []
    assert losses == expected
    assert strange == []
    assert begun.is_set()
    with torch.no_grad():
        assert torch.equal(boosted.model(x), outputs[-1])


def test_threads_that_train_by_turns_of_a_pool() -> None:
    """Forward, backward and step may each be of another thread, and a thread may die between."""
    expected = go_on(boost(tower(), HALF, chunk_bytes=CHUNK_OF_ONE))
    boosted = boost(tower(), HALF, chunk_bytes=CHUNK_OF_ONE)
    losses: list[torch.Tensor] = []

    def forward(seed: int) -> None:
        losses.append(boosted.model(**on_device_of(boosted, tower_batch(seed))))

    for seed in range(4):
        assert in_threads(partial(forward, seed)) == []
        assert in_threads(losses[-1].backward) == []
        assert in_threads(boosted.optimizer.step) == []
        boosted.optimizer.zero_grad()
    assert [loss.item() for loss in losses] == expected


def test_two_threads_that_train_one_model_add_their_gradients() -> None:
    """Forwards and backwards of two threads, one after the other, and one step over their sum."""
    boosted = boost(tower(), HALF, chunk_bytes=CHUNK_OF_ONE)
    alone = boost(tower(), HALF, chunk_bytes=CHUNK_OF_ONE)
    batches = [on_device_of(boosted, tower_batch(seed)) for seed in range(2)]

    def micro_batch(i: int) -> None:
        boosted.booster.backward(boosted.model(**batches[i]), boosted.optimizer)

    for _ in range(4):
        for batch in batches:
            alone.booster.backward(alone.model(**batch), alone.optimizer)
        alone.optimizer.step()
        alone.optimizer.zero_grad()
        assert in_threads(partial(micro_batch, 0), partial(micro_batch, 1)) == []
        boosted.optimizer.step()
        boosted.optimizer.zero_grad()
    assert_equal(exact_state(boosted), exact_state(alone))  # sums of two do not know their order


class Interrupted(BaseException):
    """As KeyboardInterrupt: torch runs no hook behind it."""


def test_a_thread_that_dies_in_a_forward_leaves_the_model_to_the_others() -> None:
    boosted = serving()
    model = boosted.model
    xs, expected = evaluations(boosted)

    def interrupt(*_: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise Interrupted

    hook = model.layers[3].register_forward_pre_hook(interrupt)
    assert in_threads(lambda: model(xs[0])) == ["Interrupted: "]
    with torch.no_grad():
        assert torch.equal(model.layers[0](xs[0]), model.layers[0](xs[0]))  # no root clears up
        assert torch.equal(model(xs[1]), expected[1])
    hook.remove()


def test_a_hook_that_calls_the_model_again_is_of_the_same_pass() -> None:
    boosted = serving()
    model = boosted.model
    xs, expected = evaluations(boosted)
    nested: list[bool] = []
    inside = threading.local()

    def again(*_: Any) -> None:
        if not getattr(inside, "now", False):
            inside.now = True
            nested.append(torch.equal(model(xs[0]), expected[0]))
            inside.now = False

    model.register_forward_hook(again)

    def serve(x: torch.Tensor, right: torch.Tensor) -> None:
        for _ in range(10):
            with torch.no_grad():
                assert torch.equal(model(x), right)

    works = [partial(serve, x, right) for x, right in zip(xs[:3], expected, strict=False)]
    assert in_threads(*works) == []
    assert nested == [True] * 30


@pytest.mark.parametrize("waits_in", ["forward", "step", "backward"])
def test_ctrl_c_ends_a_wait_for_another_threads_pass(waits_in: str) -> None:
    boosted = boost(tower(), 2**26, chunk_bytes=CHUNK_OF_ONE)
    model = boosted.model
    xs, expected = evaluations(boosted)
    loss = model(**on_device_of(boosted, tower_batch(0)))
    inside, over = threading.Event(), threading.Event()

    def hold(*_: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            assert over.wait(60)

    def serve() -> None:
        with torch.no_grad():
            assert torch.equal(model(xs[0]), expected[0])

    wait: Callable[[], Any] = {
        "forward": partial(model, xs[1]),
        "step": boosted.optimizer.step,
        "backward": loss.backward,
    }[waits_in]
    hook = model.layers[3].register_forward_hook(hold)
    # A job in the background ignores it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    begun = time.monotonic()
    with ThreadPoolExecutor() as pool:
        served = pool.submit(serve)
        assert inside.wait(60)
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            wait()
        assert time.monotonic() - begun < 30
        over.set()
        served.result()
    signal.signal(signal.SIGINT, before)
    hook.remove()
    with torch.no_grad():
        assert torch.equal(model(xs[1]), expected[1])


def test_a_hook_that_waits_for_a_thread_which_calls_the_model_is_told() -> None:
    """Neither could go on: the thread that waits for its turn gives up, with a name."""
    boosted = serving()
    model = boosted.model
    xs, expected = evaluations(boosted)
    errors: list[str] = []

    def join(*_: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            errors.extend(in_threads(lambda: model(xs[0])))

    hook = model.layers[3].register_forward_hook(join)
    with torch.no_grad(), pass_patience(0.1):
        assert torch.equal(model(xs[1]), expected[1])
    hook.remove()
    assert len(errors) == 1
    assert errors[0].startswith("UsageError: thread ")
    assert f"a forward of thread {threading.get_native_id()}" in errors[0]


def test_evaluation_between_an_updating_backward_and_a_step_that_never_comes_is_refused() -> None:
    boosted = boost(tower(), HALF, chunk_bytes=CHUNK_OF_ONE, **BACKWARD)
    boosted.booster.backward(
        boosted.model(**on_device_of(boosted, tower_batch(0))), boosted.optimizer
    )
    x = inputs(boosted, 1)[0]
    evaluate = torch.no_grad()(boosted.model)
    with pass_patience(0.1):
        (error,) = in_threads(lambda: evaluate(x))
    assert error.startswith("UsageError")
    assert "optimizer.step() was not called" in error
    boosted.optimizer.step()
    assert in_threads(lambda: evaluate(x)) == []


def test_saves_and_reads_wait_for_the_pass_of_another_thread(tmp_path: Path) -> None:
    """Each save is of the weights of one step, which loads as what training had then."""
    boosted = boost(tower(), HALF, chunk_bytes=CHUNK_OF_ONE)
    reference = boost(tower(), HALF, chunk_bytes=CHUNK_OF_ONE)
    steps = 8
    weights = [exact_state(reference)[: len(list(reference.model.parameters()))]]
    for seed in range(steps):
        go_on(reference, seed, 1)
        weights.append(exact_state(reference)[: len(weights[0])])
    stop = threading.Event()
    saved: list[Path] = []

    def save() -> None:
        while not stop.is_set() or not saved:
            path = tmp_path / f"{len(saved)}"
            boosted.booster.save_model(boosted.model, path)
            boosted.optimizer.state_dict()
            boosted.model.state_dict()
            saved.append(path)

    def train() -> None:
        try:
            go_on(boosted, steps=steps)
        finally:
            stop.set()

    assert in_threads(train, save) == []
    fresh = boost(tower(), 2**26)
    for path in saved[:: max(1, len(saved) // 6)]:
        fresh.booster.load_model(fresh.model, path)
        loaded = [param.detach() for param in fresh.model.parameters()]
        assert any(all(map(equal, loaded, one)) for one in weights)


def test_training_beside_evaluation_on_a_simulated_device(simulated: Simulation) -> None:
    """Backward runs on autograd's thread of the device, for the thread that called it."""
    expected = go_on(simulated.boost(tower(), 2**20), steps=4)
    boosted = simulated.boost(tower(), 2**20)
    x = inputs(boosted, 1)[0]
    stop = threading.Event()
    losses: list[float] = []

    def evaluate() -> None:
        while not stop.is_set():
            with torch.no_grad():
                assert bool(boosted.model(x).isfinite().all())

    def train() -> None:
        try:
            losses.extend(go_on(boosted, steps=4))
        finally:
            stop.set()

    assert in_threads(train, evaluate) == []
    assert losses == expected
