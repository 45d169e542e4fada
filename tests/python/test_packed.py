"""Quantised bases (QLoRA): their bytes go through chunks as they are, and adapters train."""

import copy
import gc
import io
import pickle
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import castor
from castor.runtime.engine import engine_of
from helpers import FORMATS, LR, Boosted, assert_equal, boost, copies, equal
from packed_layers import Linear4bit, Params4bit, Tower4bit, tower_4bit, tower_4bit_loss
from simulated import GpuSimulation, Simulation

STORAGES = [torch.uint8, torch.bfloat16, torch.float16, torch.float32]


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def adam(model: nn.Module, **options: Any) -> castor.HybridAdam:
    return castor.HybridAdam(trainable(model), lr=LR, **options)


def packed_of(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if type(p) is Params4bit}


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).tolist())


@cache
def tight(precision: str = "fp32", *, bias: bool = False) -> int:
    """Device bytes beside activations and unpacked weights: half of the packed ones."""
    roomy = boost(tower_4bit(bias=bias), precision=precision, placement_policy="cpu")
    for seed in range(2):
        roomy.step(tower_4bit_loss(roomy.model, seed))
    packed = sum(p.nbytes for p in packed_of(roomy.model).values())
    return roomy.report().peak_nonmodel_bytes + packed // 2


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_and_weights_have_the_bits_of_plain_pytorch(
    storage: torch.dtype, precision: str
) -> None:
    dtype = castor.runtime.engine.WORKING_DTYPES[precision]  # type: ignore[index]
    plain, mine = (tower_4bit(storage=storage, bias=True) for _ in range(2))
    for model in (plain, mine):
        for param in model.parameters():
            if type(param) is not Params4bit:
                param.data = param.data.to(dtype)
    before = {name: bits(p) for name, p in packed_of(mine).items()}
    memory = tight(precision, bias=True)
    boosted = boost(
        mine, memory, adam(mine), precision=precision, optim_state_format="fp32",
        placement_policy="cpu",
    )  # fmt: skip
    by_hand = adam(plain)
    for seed in range(4):
        torch.manual_seed(seed)
        x = torch.randn(16, 64)
        labels = torch.arange(16) % 4
        loss = plain(x.to(dtype), labels)
        loss.backward()
        own = boosted.model(x, labels)
        boosted.booster.backward(own, boosted.optimizer)
        assert torch.equal(own.cpu(), loss)
        for theirs, param in zip(trainable(plain), trainable(mine), strict=True):
            assert param.grad is not None
            assert theirs.grad is not None
            assert equal(param.grad.cpu(), theirs.grad)
        for optimizer in (by_hand, boosted.optimizer):
            optimizer.step()
            optimizer.zero_grad()
    assert all(map(equal, copies(trainable(mine)), copies(trainable(plain))))
    assert {name: bits(p) for name, p in packed_of(mine).items()} == before
    report = boosted.report()
    assert report.peak_device_bytes <= memory
    assert report.h2d_bytes > 3 * sum(p.nbytes for p in packed_of(mine).values())


@pytest.mark.parametrize(("precision", "state_format"), FORMATS)
def test_host_memory_is_the_packed_bytes_and_what_trains_with_its_states(
    precision: str, state_format: str
) -> None:
    model = tower_4bit(width=256)
    boosted = boost(
        model, "4MiB", adam(model), precision=precision, optim_state_format=state_format,
        placement_policy="cpu",
    )  # fmt: skip
    element = 4 if precision == "fp32" else 2
    states = {"fp32": 8 if precision == "fp32" else 12, "split": 10, "split_bf16": 6}
    trained = sum(p.numel() for p in trainable(model))
    frozen = sum(p.nbytes for p in packed_of(model).values())
    expected = frozen + trained * (2 * element + states.get(state_format, 4 + 1 / 32))
    assert boosted.report().host_bytes == pytest.approx(expected, rel=0.03)
    before = boosted.report().d2h_bytes
    boosted.step(tower_4bit_loss(model, 0, width=256))
    assert boosted.report().d2h_bytes - before == trained * element


def test_parameters_keep_their_class_and_what_stands_beside_them() -> None:
    model = tower_4bit()
    before = {name: (p, p.quant_state, p.dtype) for name, p in packed_of(model).items()}  # type: ignore[attr-defined]
    boosted = boost(model, tight())
    boosted.step(tower_4bit_loss(model, 0))
    for name, (param, state, dtype) in before.items():
        now = model.get_parameter(name)
        assert now is param
        assert type(now) is Params4bit
        assert now.quant_state is state
        assert now.dtype is dtype
    chunks = engine_of(model).session.chunks()
    assert {"uint8", "float32"} == {chunk["dtype"] for chunk in chunks}


@pytest.mark.parametrize(("precision", "state_format"), FORMATS[:4])  # others round by position
def test_an_optimizer_may_hold_what_is_frozen(precision: str, state_format: str) -> None:
    model, other = tower_4bit(depth=4), tower_4bit(depth=4)
    settings: dict[str, Any] = {"precision": precision, "optim_state_format": state_format}
    all_held = boost(model, optimizer=castor.HybridAdam(model.parameters(), lr=LR), **settings)
    trained = boost(other, optimizer=adam(other), **settings)
    for seed in range(2):
        x, labels = torch.randn(16, 64), torch.full((16,), seed)
        assert all_held.step(model(x, labels)) == trained.step(other(x, labels))
    assert all(map(equal, copies(model.parameters()), copies(other.parameters())))


def test_evaluation_leaves_the_layout_that_trains() -> None:
    model = tower_4bit()
    boosted = boost(model, tight())
    before = {name: bits(p) for name, p in packed_of(model).items()}
    with torch.no_grad():
        tower_4bit_loss(model.eval(), 0)
    assert {name: bits(p) for name, p in packed_of(model).items()} == before
    boosted.step(tower_4bit_loss(model.train(), 1))
    assert not any(m.support_avx512bf16_for_cpu for m in model.modules() if type(m) is Linear4bit)
    boosted.booster.release(model)
    assert all(m.support_avx512bf16_for_cpu for m in model.modules() if type(m) is Linear4bit)
    assert {name: bits(p) for name, p in packed_of(model).items()} == before


def deep_copy(model: nn.Module) -> Any:
    return copy.deepcopy(model)


def pickled(model: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(model))


def torch_saved(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [deep_copy, pickled, torch_saved])
def test_copies_are_what_those_of_the_plain_model_are(copied: Callable[[nn.Module], Any]) -> None:
    model = tower_4bit()
    boosted = boost(model, tight())
    boosted.step(tower_4bit_loss(model, 0))
    twin, of_plain = copied(model), copied(tower_4bit())
    for name, param in packed_of(model).items():
        other = twin.get_parameter(name)
        assert type(other) is type(of_plain.get_parameter(name))
        assert not other.requires_grad
        assert bits(other) == bits(param)
        state: Any = param
        assert other.quant_state is not state.quant_state
        assert equal(other.quant_state.scales(), state.quant_state.scales())
        assert other.untyped_storage().nbytes() == other.nbytes
    loss = tower_4bit_loss(twin, 1)
    loss.backward()
    assert boosted.step(tower_4bit_loss(model, 1)) == loss.item()


def test_packed_weights_train_from_nvme(tmp_path: Path) -> None:
    mine, plain = tower_4bit(), tower_4bit()
    boosted = boost(
        mine, tight(), adam(mine), nvme_path=tmp_path,
        host_memory=120 * 2**10, chunk_bytes=2**12,
    )  # fmt: skip
    assert boosted.report().nvme_weight_bytes > 0
    by_hand = adam(plain)
    for seed in range(3):
        loss = tower_4bit_loss(plain, seed)
        loss.backward()
        by_hand.step()
        by_hand.zero_grad()
        assert boosted.step(tower_4bit_loss(mine, seed)) == loss.item()
    assert all(map(equal, copies(trainable(mine)), copies(trainable(plain))))
    with pytest.raises(RuntimeError, match="are on NVMe"):  # a class of its own copies storages
        copy.deepcopy(mine)
    torch.save(mine.state_dict(), tmp_path / "state.pt")
    stored = torch.load(tmp_path / "state.pt")
    for key, value in plain.state_dict().items():
        if "base" in key:
            assert bits(stored[key]) == bits(value), key
    boosted.booster.release(mine)
    assert tower_4bit_loss(copy.deepcopy(mine), 3).item() == tower_4bit_loss(plain, 3).item()


def test_a_state_dict_is_that_of_the_plain_model_and_is_read_by_it() -> None:
    model, plain = tower_4bit(), tower_4bit()
    boost(model, tight())
    own, theirs = model.state_dict(), plain.state_dict()
    assert list(own) == list(theirs)
    assert all(bits(own[key]) == bits(theirs[key]) for key in theirs)
    assert {key: value.dtype for key, value in own.items()} == {
        key: value.dtype for key, value in theirs.items()
    }


def test_a_run_goes_on_and_other_quantisations_are_refused(tmp_path: Path) -> None:
    first = boost(tower_4bit())
    first.step(tower_4bit_loss(first.model, 0))
    first.booster.save(tmp_path / "run", first.model, first.optimizer)
    second = boost(tower_4bit())
    second.booster.load(tmp_path / "run", second.model, second.optimizer)
    for boosted in (first, second):
        boosted.step(tower_4bit_loss(boosted.model, 1))
    assert all(map(equal, copies(second.model.parameters()), copies(first.model.parameters())))

    first.booster.save_model(first.model, tmp_path / "model")
    stored = load_file(tmp_path / "model" / "model.safetensors")
    assert {key: bits(value) for key, value in stored.items()} == {
        key: bits(value) for key, value in first.model.state_dict().items()
    }
    before = copies(second.model.parameters())
    for key in ("weight", "weight.absmax", "weight.nested_absmax"):
        key = f"layers.3.base.{key}"
        changed = {**stored, key: stored[key].float() + 1}
        missing = {k: v for k, v in stored.items() if k != key}
        for i, tensors in enumerate((changed, missing)):
            path = tmp_path / f"{key}{i}"
            path.mkdir()
            save_file(tensors, path / "model.safetensors")
            with pytest.raises(castor.CheckpointError, match=r"layers\.3\.base\.weight"):
                second.booster.load_model(second.model, path)
    assert all(map(equal, copies(second.model.parameters()), before))


def train_on_device(boosted: Boosted, steps: int = 4) -> list[float]:
    device = engine_of(boosted.model).device
    losses = []
    for seed in range(steps):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(seed))
        losses.append(boosted.step(boosted.model(x.to(device), (torch.arange(16) % 4).to(device))))
    return losses


def test_a_device_that_computes_by_itself_gives_the_same_bits(
    simulated: Simulation | GpuSimulation,
) -> None:
    reference = boost(tower_4bit())
    expected = train_on_device(reference)
    gc.collect()
    roomy = simulated.boost(tower_4bit(), gpu_margin_mem_ratio=0.0)
    train_on_device(roomy, steps=2)
    memory = roomy.report().peak_nonmodel_bytes + 2**14
    del roomy
    gc.collect()
    model = tower_4bit()
    boosted = simulated.boost(model, memory, gpu_margin_mem_ratio=0.0)
    assert train_on_device(boosted) == expected
    assert_equal(simulated.state(boosted), simulated.state(reference))
    assert boosted.report().peak_device_bytes <= memory
    device = engine_of(model).device
    for adapted in model.layers:
        state = adapted.base.weight.quant_state
        assert {state.absmax.device, state.code.device, state.state2.absmax.device} == {device}


# --- what is refused ------------------------------------------------------------------------------


def not_quantised(model: Tower4bit) -> None:
    weight = nn.Parameter(torch.zeros(64, 64), requires_grad=False)
    model.layers[0].base.weight = Params4bit(weight.data)


def to_be_trained(model: Tower4bit) -> None:
    weight: Any = model.layers[0].base.weight
    model.layers[0].base.weight = Params4bit(
        weight.data.flatten().view(torch.float32), weight.quant_state
    )
    model.layers[0].base.weight.requires_grad_(True)


def repacked(model: Tower4bit) -> None:
    model.layers[0].base.weight.quant_state.packing_format_for_cpu = True


def eight_bits(model: Tower4bit) -> None:
    weight = Params4bit(torch.zeros(64, 64, dtype=torch.int8), None, has_fp16_weights=False)
    weight.bnb_quantized = True
    model.layers[0].base.weight = weight


def of_integers(model: Tower4bit) -> None:
    weight = nn.Parameter(torch.zeros(64, 64, dtype=torch.int32), requires_grad=False)
    model.layers[0].base.weight = weight


def bias_of_another_type(model: Tower4bit) -> None:
    model.layers[0].base.bias = nn.Parameter(torch.zeros(64), requires_grad=False)
    model.layers[0].base.compute_dtype = torch.float16


class Wrapped(torch.Tensor):
    """As torchao's: made of other tensors, and without memory."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "Wrapped":
        self = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32)
        self.inner = inner
        return self

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(tensors: Any, *_: Any) -> "Wrapped":
        return Wrapped(tensors["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Wrapped(args[0].inner)
        raise NotImplementedError(f"{func}")


def made_of_others(model: Tower4bit) -> None:
    wrapped = nn.Parameter(Wrapped(torch.zeros(64, 64)), requires_grad=False)
    model.layers[0].base.weight = wrapped


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (not_quantised, r"weight' is a Params4bit that is not quantised yet.*model\.to\('cpu'\)"),
        (to_be_trained, r"weight' is quantised, and has requires_grad=True.*enable_lora"),
        (repacked, r"weight' is packed for inference.*model\.state_dict\(\)"),
        (eight_bits, r"weight' is a Params4bit: layers of 8 bits.*load_in_4bit"),
        (of_integers, r"weight' has dtype torch\.int32; .*uint8"),
        (bias_of_another_type, r"'layers\.0\.base' .*computes in torch\.float16, and its bias"),
        (made_of_others, r"weight' is a Wrapped, which is made of other tensors.*load_in_4bit"),
    ],
)
def test_what_chunks_cannot_hold_is_refused_by_name(
    change: Callable[[Tower4bit], None], message: str
) -> None:
    model = tower_4bit()
    change(model)
    params = {name: (p, p.dtype) for name, p in model.named_parameters()}
    with pytest.raises(castor.UsageError, match=message):
        boost(model, 2**20, adam(model))
    for name, param in model.named_parameters():
        assert param is params[name][0]
        assert param.dtype is params[name][1]
