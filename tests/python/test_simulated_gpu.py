"""The simulated GPU is a GPU to torch: asynchronous, with the bits of the CPU's kernels."""

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import simulated_gpu
from zoo import CASES

MILLISECOND = 1000


@pytest.fixture(params=[0, *simulated_gpu.SEEDS], ids="seed {}".format)
def gpu(request: pytest.FixtureRequest) -> Iterator[Any]:
    """torch.simgpu, whose streams dawdle."""
    module = simulated_gpu.require()
    module.gpu.delay(request.param)
    yield module
    simulated_gpu.rest()


@pytest.fixture
def at_once() -> Iterator[Any]:
    """torch.simgpu, whose streams do not dawdle, with nothing of earlier tests left to be freed."""
    gpu = simulated_gpu.require()
    gc.collect()
    gpu.synchronize()
    gpu.empty_cache()
    yield gpu
    simulated_gpu.rest()


def there(value: Any) -> Any:
    """With every tensor on the simulated GPU, a leaf as before."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("simgpu").requires_grad_(value.requires_grad)
    if isinstance(value, (list, tuple)):
        return type(value)(there(each) for each in value)
    return value


def flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for each in value for tensor in flat(each)]


def numbers(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = True) -> torch.Tensor:
    return torch.randn(shape).to(dtype).requires_grad_(grad)


# --- order --------------------------------------------------------------------------------------


def test_operators_return_before_they_are_done(at_once: Any) -> None:
    x = torch.zeros(8, device="simgpu")
    at_once.synchronize()
    stream = at_once.current_stream()
    with at_once._held():
        at_once._sleep(30 * MILLISECOND)
        x = x + 1
        assert not stream.query()
    assert x.tolist() == [1.0] * 8, "what the host reads is waited for"
    assert stream.query()


def test_streams_are_in_no_order_but_that_of_events(gpu: Any) -> None:
    side = gpu.Stream()
    x = torch.zeros(1000, device="simgpu")
    side.wait_stream(gpu.current_stream())
    for step in range(20):
        gpu._sleep(MILLISECOND)
        x.fill_(step)
        done = gpu.Event()
        done.record()
        with gpu.stream(side):
            side.wait_event(done)
            y = x * 2
        y.record_stream(side)
        gpu.current_stream().wait_stream(side)
        assert (y == 2 * step).all()


def test_without_an_event_a_side_stream_reads_too_early(at_once: Any) -> None:
    x = torch.zeros(8, device="simgpu")
    at_once.synchronize()
    with at_once._held():
        x.fill_(1)
        with at_once.stream(at_once.Stream()):
            assert x.tolist() == [0.0] * 8


def test_the_current_stream_is_that_of_a_thread(at_once: Any) -> None:
    side = at_once.Stream()
    seen = []
    with at_once.stream(side):
        thread = threading.Thread(target=lambda: seen.append(at_once.current_stream()))
        thread.start()
        thread.join()
        assert at_once.current_stream() == side
    assert seen[0] != side


def test_backward_runs_on_a_thread_of_its_own_on_the_streams_of_forward(gpu: Any) -> None:
    seen = []

    class Note(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            seen.append((threading.get_ident(), gpu.current_stream()))
            return grad

    side = gpu.Stream()
    x = torch.ones(8, device="simgpu", requires_grad=True)
    side.wait_stream(gpu.current_stream())
    with gpu.stream(side):
        loss = Note.apply(x).sum()
    loss.backward()
    assert seen[0][0] != threading.get_ident()
    assert seen[0][1] == side
    assert x.grad is not None
    assert x.grad.tolist() == [1.0] * 8


@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "page-locked"])
def test_a_copy_in_takes_pageable_bytes_at_once_and_page_locked_ones_later(
    at_once: Any, pinned: bool
) -> None:
    host = torch.ones(8)
    host = host.pin_memory() if pinned else host
    with at_once._held():
        device = host.to("simgpu", non_blocking=True)
        assert not at_once.current_stream().query()
        host.fill_(2)
    assert device.tolist() == [2.0 if pinned else 1.0] * 8


def test_a_copy_out_waits_unless_it_goes_to_page_locked_memory(at_once: Any) -> None:
    device, host = torch.ones(8, device="simgpu"), torch.zeros(8).pin_memory()
    with at_once._held():
        host.copy_(device, non_blocking=True)
        assert host.tolist() == [0.0] * 8
    at_once.synchronize()
    assert host.tolist() == [1.0] * 8
    at_once._sleep(30 * MILLISECOND)
    pageable = torch.zeros(8)
    pageable.copy_(device, non_blocking=True)
    assert pageable.tolist() == [1.0] * 8


# --- memory -------------------------------------------------------------------------------------


def test_freed_memory_is_its_streams_again_at_once_and_reads_as_poison(at_once: Any) -> None:
    at_once.empty_cache()  # of other blocks of the size
    x = torch.ones(1000, device="simgpu")
    address = x.data_ptr()
    del x
    y = torch.empty(1000, device="simgpu")
    assert y.data_ptr() == address
    assert bool(y.isnan().all())


def test_an_operator_does_not_keep_its_inputs(at_once: Any) -> None:
    side = at_once.Stream()
    x = torch.ones(1000, device="simgpu")
    at_once.synchronize()
    with at_once.stream(side):
        gate = at_once.gpu.hold()
        y = x * 1
    del x
    at_once.current_stream().synchronize()
    assert gate.open()
    side.synchronize()
    assert bool(y.isnan().all()), "the side stream was recorded nowhere"


def test_record_stream_holds_memory_back(gpu: Any) -> None:
    side = gpu.Stream()
    for _ in range(10):
        x = torch.ones(1000, device="simgpu")
        side.wait_stream(gpu.current_stream())
        with gpu.stream(side):
            gpu._sleep(MILLISECOND)
            y = x * 1
        x.record_stream(side)
        del x
        z = torch.empty(1000, device="simgpu").fill_(2)
        side.synchronize()
        assert y.tolist() == [1.0] * 1000
        del y, z


def test_memory_that_is_full_is_an_error_and_cached_memory_is_not(at_once: Any) -> None:
    at_once.empty_cache()
    total = at_once.get_device_properties().total_memory
    used = at_once.memory_reserved()
    at_once.set_per_process_memory_fraction((used + 2**20) / total)
    try:
        with at_once.stream(at_once.Stream()):
            torch.empty(2**20, dtype=torch.uint8, device="simgpu")
        kept = torch.empty(2**20, dtype=torch.uint8, device="simgpu")
        with pytest.raises(torch.OutOfMemoryError, match="tried to allocate 1048576 bytes"):
            torch.empty(2**20, dtype=torch.uint8, device="simgpu")
        del kept
    finally:
        at_once.set_per_process_memory_fraction(1.0)


def test_storages_are_made_there_too(at_once: Any) -> None:
    storage = torch.ones(8).untyped_storage().to(device="simgpu")
    assert storage.device.type == "simgpu"
    assert torch.tensor([], device="simgpu").set_(storage).tolist() == [1.0] * 8


def test_page_locked_memory_is_known_as_such(at_once: Any) -> None:
    assert torch.ones(8).pin_memory().is_pinned()
    assert not torch.ones(8).is_pinned()


def test_writes_in_inference_mode(gpu: Any) -> None:
    x = torch.ones(8, device="simgpu")
    with torch.inference_mode():
        x.mul_(2)
        y = x + 1
    assert x.tolist() == [2.0] * 8
    assert y.tolist() == [3.0] * 8


# --- errors -------------------------------------------------------------------------------------


def test_tensors_of_the_host_are_refused(at_once: Any) -> None:
    x = torch.ones(3, device="simgpu")
    with pytest.raises(RuntimeError, match="found at least two devices, simgpu:0 and cpu"):
        x + torch.ones(3)
    assert (x + torch.tensor(1.0)).tolist() == [2.0] * 3


def test_shapes_that_do_not_fit_are_told_at_once(at_once: Any) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        torch.ones(2, 3, device="simgpu") @ torch.ones(2, 3, device="simgpu")
    x = torch.ones(2, 3, device="simgpu")
    with pytest.raises(RuntimeError, match="must match"):
        x.add_(torch.ones(2, 4, device="simgpu"))
    assert x.sum().item() == 6.0, "the device goes on"


def test_an_error_of_a_kernel_is_told_at_the_next_synchronisation_and_stays(at_once: Any) -> None:
    weight, index = torch.ones(3, 4, device="simgpu"), torch.tensor([5], device="simgpu")
    row = F.embedding(index, weight)
    with pytest.raises(
        RuntimeError, match="failed in an earlier operation: aten::index_select: index out of range"
    ):
        row.sum().item()
    with pytest.raises(RuntimeError, match="failed in an earlier operation"):
        at_once.synchronize()
    at_once.gpu.reset_error()
    assert weight.sum().item() == 12.0


# --- operators ----------------------------------------------------------------------------------


def normalised(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, (16,), weight, bias)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def index(*sizes: int, below: int) -> torch.Tensor:
    return torch.randint(below, sizes)


X, Y, W, B = (4, 16), (4, 16), (8, 16), (8,)
OPERATORS: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {
    # arithmetic
    "add": (lambda x, y: x + y, lambda: (numbers(*X), numbers(*Y))),
    "add a number": (lambda x: 3 + x, lambda: (numbers(*X),)),
    "add with alpha": (lambda x, y: torch.add(x, y, alpha=0.3), lambda: (numbers(*X), numbers(*Y))),
    "sub": (lambda x, y: 1 - (x - y), lambda: (numbers(*X), numbers(*Y))),
    "mul": (lambda x, y: x * y * 0.5, lambda: (numbers(*X), numbers(*Y))),
    "mul broadcast": (lambda x, y: x * y, lambda: (numbers(*X), numbers(16))),
    "div": (lambda x, y: x / (y + 9), lambda: (numbers(*X), numbers(*Y))),
    "floor divide": (lambda x: x // 3, lambda: (index(*X, below=20),)),
    "remainder": (lambda x: x % 3, lambda: (index(*X, below=20),)),
    "pow": (lambda x: x**3 + 2**x, lambda: (numbers(*X),)),
    "neg abs sign": (lambda x: -x.abs() * x.sign(), lambda: (numbers(*X),)),
    "sqrt rsqrt": (lambda x: x.square().sqrt() + (x * x + 1).rsqrt(), lambda: (numbers(*X),)),
    "exp log": (lambda x: x.exp().log1p().expm1(), lambda: (numbers(*X),)),
    "sin cos": (lambda x: x.sin() * x.cos(), lambda: (numbers(*X),)),
    "tanh sigmoid erf": (lambda x: x.tanh() + x.sigmoid() + x.erf(), lambda: (numbers(*X),)),
    "clamp": (lambda x: x.clamp(-0.5, 0.5) + x.clamp_min(0.1), lambda: (numbers(*X),)),
    "maximum minimum": (
        lambda x, y: torch.maximum(x, y) - torch.minimum(x, y),
        lambda: (numbers(*X), numbers(*Y)),
    ),
    "lerp": (lambda x, y: torch.lerp(x, y, 0.3), lambda: (numbers(*X), numbers(*Y))),
    "addcmul addcdiv": (
        lambda x, y: torch.addcmul(x, y, y, value=0.1) + torch.addcdiv(x, y, y * y + 1),
        lambda: (numbers(*X), numbers(*Y)),
    ),
    "where": (lambda x, y: torch.where(x > 0, x, y), lambda: (numbers(*X), numbers(*Y))),
    "masked fill": (lambda x: x.masked_fill(x < 0, -1.0), lambda: (numbers(*X),)),
    "types": (lambda x: x.to(torch.float64).to(torch.bfloat16).float(), lambda: (numbers(*X),)),
    "promotion": (lambda x, y: x * y, lambda: (index(*X, below=9), numbers(*Y))),
    "bf16": (lambda x, y: x * y + 1, lambda: (
        numbers(*X, dtype=torch.bfloat16), numbers(*Y, dtype=torch.bfloat16),
    )),
    "logic": (lambda x, y: (x > y) & ~(x == y) | (x != 0), lambda: (numbers(*X), numbers(*Y))),
    "bits": (lambda x: (x & 3) | (x << 1) ^ 5, lambda: (index(*X, below=20),)),
    "isnan isinf": (lambda x: (x / 0).isnan() | (x / 0).isinf(), lambda: (numbers(*X),)),
    # sums and orders
    "sum": (lambda x: (x.sum(), x.sum(0), x.sum(-1, keepdim=True)), lambda: (numbers(*X),)),
    "mean var std": (lambda x: (x.mean(), x.var(-1), x.std(0)), lambda: (numbers(*X),)),
    "amax amin": (lambda x: (x.amax(-1), x.amin(0), x.max(), x.min()), lambda: (numbers(*X),)),
    "max with indices": (lambda x: tuple(x.max(-1)), lambda: (numbers(*X),)),
    "argmax argmin": (lambda x: (x.argmax(-1), x.argmin()), lambda: (numbers(*X),)),
    "prod": (lambda x: x.prod(-1), lambda: (numbers(*X),)),
    "cumsum": (lambda x: x.cumsum(-1), lambda: (numbers(*X),)),
    "logsumexp": (lambda x: x.logsumexp(-1), lambda: (numbers(*X),)),
    "norm": (lambda x: (x.norm(), torch.linalg.vector_norm(x, dim=1)), lambda: (numbers(*X),)),
    "any all": (lambda x: ((x > 1).any(), (x > 1).all(-1)), lambda: (numbers(*X),)),
    "sort": (lambda x: tuple(x.sort(-1)), lambda: (numbers(*X),)),
    "argsort": (lambda x: x.argsort(dim=-1, stable=True), lambda: (numbers(*X),)),
    "topk": (lambda x: tuple(x.topk(3, -1)), lambda: (numbers(*X),)),
    "count nonzero": (lambda x: (x > 0).count_nonzero(), lambda: (numbers(*X),)),
    # shapes
    "view": (lambda x: x.view(2, 8, 4).transpose(0, 2), lambda: (numbers(*X),)),
    "reshape of a transpose": (lambda x: x.t().reshape(-1), lambda: (numbers(*X),)),
    "permute": (lambda x: x.view(2, 2, 16).permute(2, 0, 1).contiguous(), lambda: (numbers(*X),)),
    "slices": (lambda x: x[1:3, ::2] + x[:2, 8:], lambda: (numbers(*X),)),
    "select": (lambda x: x[1] * x[:, 3].sum(), lambda: (numbers(*X),)),
    "expand": (lambda x: x.unsqueeze(1).expand(4, 3, 16) * 2, lambda: (numbers(*X),)),
    "squeeze": (lambda x: x.unsqueeze(0).squeeze() + 0, lambda: (numbers(*X),)),
    "cat": (lambda x, y: torch.cat([x, y], -1), lambda: (numbers(*X), numbers(*Y))),
    "stack": (lambda x, y: torch.stack([x, y], 1), lambda: (numbers(*X), numbers(*Y))),
    "split": (lambda x: [each * 2 for each in x.split(5, -1)], lambda: (numbers(*X),)),
    "chunk": (lambda x: [each + 1 for each in x.chunk(3, -1)], lambda: (numbers(*X),)),
    "unbind": (lambda x: [each + 1 for each in x.unbind(0)], lambda: (numbers(*X),)),
    "flip roll": (lambda x: x.flip(0).roll(3, 1), lambda: (numbers(*X),)),
    "repeat": (lambda x: x.repeat(2, 3), lambda: (numbers(*X),)),
    "repeat interleave": (lambda x: x.repeat_interleave(3, 0), lambda: (numbers(*X),)),
    "unfold": (lambda x: x.unfold(1, 4, 2) * 1, lambda: (numbers(*X),)),
    "diagonal": (lambda x: x.diagonal() * 2, lambda: (numbers(*X),)),
    "tril triu": (lambda x: x.tril() - x.triu(1), lambda: (numbers(*X),)),
    "pad": (lambda x: F.pad(x, (1, 2), value=3.0), lambda: (numbers(*X),)),
    "meshgrid": (
        lambda x: torch.meshgrid(x, x, indexing="ij"), lambda: (torch.arange(5),),
    ),
    # indices
    "index": (lambda x, i: x[i], lambda: (numbers(*X), index(5, below=4))),
    "index with two": (
        lambda x, i, j: x[i, j], lambda: (numbers(*X), index(5, below=4), index(5, below=16)),
    ),
    "index with a mask": (lambda x: x[x > 0], lambda: (numbers(*X),)),
    "index select": (lambda x, i: x.index_select(0, i), lambda: (numbers(*X), index(5, below=4))),
    "gather": (lambda x, i: x.gather(1, i), lambda: (numbers(*X), index(4, 3, below=16))),
    "scatter": (
        lambda x, i, y: x.scatter(1, i, y), lambda: (numbers(*X), index(4, 1, below=16),
                                                     numbers(4, 1)),
    ),
    "scatter add": (
        lambda x, i, y: x.scatter_add(1, i, y),
        lambda: (numbers(*X), index(4, 3, below=16), numbers(4, 3)),
    ),
    "index add": (
        lambda x, i, y: x.index_add(0, i, y),
        lambda: (numbers(*X), index(4, below=4), numbers(*Y)),
    ),
    "index put": (
        lambda x, i, y: x.clone().index_put_((i,), y, accumulate=True),
        lambda: (numbers(*X), index(4, below=4), numbers(*Y)),
    ),
    "embedding": (lambda w, i: F.embedding(i, w), lambda: (numbers(9, 8), index(4, 5, below=9))),
    "one hot": (lambda i: F.one_hot(i, 7), lambda: (index(5, below=7),)),
    "histc": (lambda x: x.histc(4, 0, 9), lambda: (numbers(*X, grad=False),)),
    "nonzero": (lambda x: (x > 0).nonzero(), lambda: (numbers(*X),)),
    "unique": (lambda x: x.unique(), lambda: (index(*X, below=9),)),
    "bincount": (lambda x: x.flatten().bincount(), lambda: (index(*X, below=9),)),
    # matrices
    "mm": (lambda x, w: x @ w.t(), lambda: (numbers(*X), numbers(*W))),
    "addmm": (
        lambda b, x, w: torch.addmm(b, x, w.t()), lambda: (numbers(*B), numbers(*X), numbers(*W)),
    ),
    "bmm": (lambda x, y: x @ y, lambda: (numbers(3, 4, 5), numbers(3, 5, 6))),
    "baddbmm": (
        lambda z, x, y: torch.baddbmm(z, x, y),
        lambda: (numbers(3, 4, 6), numbers(3, 4, 5), numbers(3, 5, 6)),
    ),
    "matmul of four": (lambda x, y: x @ y, lambda: (numbers(2, 3, 4, 5), numbers(2, 3, 5, 6))),
    "einsum": (
        lambda x, y: torch.einsum("bij,bkj->bik", x, y),
        lambda: (numbers(3, 4, 5), numbers(3, 6, 5)),
    ),
    "linear": (F.linear, lambda: (numbers(2, *X), numbers(*W), numbers(*B))),
    "linear bf16": (F.linear, lambda: tuple(
        numbers(*shape, dtype=torch.bfloat16) for shape in (X, W, B)
    )),
    "outer dot": (lambda x, y: x.outer(y) * x.dot(y), lambda: (numbers(8), numbers(8))),
    "conv2d": (
        lambda x, w, b: F.conv2d(x, w, b, stride=2),
        lambda: (numbers(2, 3, 8, 8), numbers(4, 3, 2, 2), numbers(4)),
    ),
    "conv1d": (
        lambda x, w: F.conv1d(x, w, padding=1), lambda: (numbers(2, 3, 8), numbers(4, 3, 3)),
    ),
    # networks
    "softmax": (lambda x: F.softmax(x, -1), lambda: (numbers(*X),)),
    "log softmax": (lambda x: F.log_softmax(x, -1), lambda: (numbers(*X),)),
    "gelu": (lambda x: F.gelu(x) + F.gelu(x, approximate="tanh"), lambda: (numbers(*X),)),
    "relu silu": (lambda x: F.relu(x) + F.silu(x) + F.leaky_relu(x), lambda: (numbers(*X),)),
    "softplus elu": (lambda x: F.softplus(x) + F.elu(x), lambda: (numbers(*X),)),
    "layer norm": (normalised, lambda: (numbers(*X), numbers(16), numbers(16))),
    "layer norm bf16": (
        normalised,
        lambda: tuple(numbers(*shape, dtype=torch.bfloat16) for shape in (X, (16,), (16,))),
    ),
    "rms norm": (lambda x, w: F.rms_norm(x, (16,), w), lambda: (numbers(*X), numbers(16))),
    "group norm": (
        lambda x, w, b: F.group_norm(x, 2, w, b),
        lambda: (numbers(2, 4, 6), numbers(4), numbers(4)),
    ),
    "batch norm": (
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
        lambda: (numbers(6, 4), numbers(4), numbers(4)),
    ),
    "cross entropy": (
        lambda x, i: F.cross_entropy(x, i, ignore_index=3),
        lambda: (numbers(*X), index(4, below=9)),
    ),
    "mse": (F.mse_loss, lambda: (numbers(*X), numbers(*Y, grad=False))),
    "binary cross entropy": (
        lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()),
        lambda: (numbers(*X), numbers(*Y, grad=False)),
    ),
    "attention": (attention, lambda: tuple(numbers(2, 3, 8, 16) for _ in range(3))),
    "attention with a mask": (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m > 0),
        lambda: (*(numbers(2, 3, 8, 16) for _ in range(3)), numbers(2, 1, 8, 8, grad=False) + 2),
    ),
    "max pool": (lambda x: F.max_pool2d(x, 2), lambda: (numbers(2, 3, 8, 8),)),
    "average pool": (lambda x: F.adaptive_avg_pool2d(x, 2), lambda: (numbers(2, 3, 8, 8),)),
    "dropout of nothing": (lambda x: F.dropout(x, 0.0), lambda: (numbers(*X),)),
    # in place, out
    "in place": (
        lambda x: x.clone().add_(1).mul_(2).clamp_(min=0).copy_(x).neg_(), lambda: (numbers(*X),),
    ),
    "in place of a view": (lambda x: x.clone()[1:3].zero_(), lambda: (numbers(*X),)),
    "out": (
        lambda x: torch.mul(x, 2, out=torch.empty(0, device=x.device)),
        lambda: (numbers(*X, grad=False),),
    ),
    "foreach": (
        lambda x, y: torch._foreach_mul(torch._foreach_add([x, y], 1.0), [y, x]),
        lambda: (numbers(*X), numbers(*Y)),
    ),
    "foreach norm": (
        lambda x, y: torch._foreach_norm([x, y]),
        lambda: (numbers(*X, grad=False), numbers(*Y, grad=False)),
    ),
    # made on the device
    "factories": (
        lambda x: [
            torch.zeros(3, device=x.device), torch.ones_like(x),
            torch.full((2,), 3, device=x.device), torch.arange(2, 9, 3, device=x.device),
            torch.linspace(0, 1, 5, device=x.device),
            torch.eye(3, device=x.device), torch.tril_indices(3, 3, device=x.device),
            torch.tensor([1.5, 2], device=x.device), x.new_zeros(4), x.new_full((2,), 7),
        ],
        lambda: (numbers(*X),),
    ),
    "random numbers": (
        lambda x: [
            torch.randn(5, device=x.device), torch.rand(5, device=x.device),
            torch.randint(9, (5,), device=x.device), torch.randperm(7, device=x.device),
            torch.empty(9, device=x.device).bernoulli_(0.3), torch.empty_like(x).normal_(),
            torch.empty_like(x).uniform_(-1, 1), torch.bernoulli(torch.full_like(x, 0.5)),
            torch.multinomial(torch.ones(9, device=x.device), 3),
        ],
        lambda: (numbers(*X, grad=False),),
    ),
}  # fmt: skip


def results_of(
    function: Callable[..., Any], arguments: tuple[Any, ...]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Results and gradients."""
    torch.manual_seed(7)
    results = flat(function(*arguments))
    differentiable = [result for result in results if result.requires_grad]
    if differentiable:
        loss = sum(result.float().square().sum() for result in differentiable)
        torch.as_tensor(loss).backward()
    gradients = [argument.grad for argument in flat(arguments) if argument.grad is not None]
    return results, gradients


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_have_the_bits_of_the_cpu(gpu: Any, name: str) -> None:
    function, make = OPERATORS[name]
    arguments = make()
    on_gpu = there(arguments)
    expected, expected_gradients = results_of(function, arguments)
    results, gradients = results_of(function, on_gpu)
    assert len(results) == len(expected)
    assert len(gradients) == len(expected_gradients)
    for mine, theirs in zip([*results, *gradients], [*expected, *expected_gradients], strict=True):
        assert mine.device.type == "simgpu"
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        assert torch.equal(mine.detach().cpu(), theirs.detach()) or bool(theirs.isnan().any())


def test_values_that_the_host_asks_for(gpu: Any) -> None:
    x = torch.arange(6, device="simgpu")
    assert x.sum().item() == 15
    assert bool((x > 4).any())
    assert torch.equal(x, torch.arange(6, device="simgpu"))
    assert torch.allclose(x.float(), x.double().float())
    assert "device='simgpu:0'" in repr(x)
    assert x.tolist() == list(range(6))


def test_integers_are_counted_as_a_gpu_counts_them(gpu: Any) -> None:
    counts = torch.tensor([0, 3, 3, 1], device="simgpu", dtype=torch.int32).histc(4, 0, 3)
    assert counts.dtype == torch.int32
    assert counts.tolist() == [1, 1, 0, 2]


@pytest.mark.parametrize("name", ["gpt2", "llama", "opt", "bert", "t5", "vit", "mixtral"])
def test_models_train_with_the_bits_of_the_cpu(gpu: Any, name: str) -> None:
    case = CASES[name]

    def train(model: nn.Module, device: str) -> list[float]:
        model.to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        losses = []
        for seed in range(2):
            batch = {key: value.to(device) for key, value in case.batch(seed).items()}
            loss = case.loss(model(**batch), batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    plain, there = case.model(), case.model()
    assert train(there, "simgpu") == train(plain, "cpu")
    for mine, theirs in zip(there.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.detach().cpu(), theirs)


def test_the_host_goes_on_with_a_step_that_the_device_has_not_begun(at_once: Any) -> None:
    x = torch.ones(64, 64, device="simgpu")
    with at_once._held():
        for _ in range(10):
            x = (x @ x).clamp(max=1.0)
    assert x.unique().tolist() == [1.0]
