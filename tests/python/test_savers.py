"""Other people's savers: every key, every value as it is now, and no memory but each tensor's."""

import copy
import io
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import accelerate
import peft
import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers as hf
from accelerate.state import AcceleratorState, GradientState, PartialState
from safetensors.torch import load_file, load_model, save_file, save_model

import castor
from castor.runtime.engine import engine_of
from castor.runtime.stored_weight import StoredWeight
from helpers import FORMATS, Boosted, assert_equal, boost, copies, go_on, tight_memory, train_on
from stored_tower import CHUNK, WIDTH, go_on_wide, largest_chunk, on_nvme, wide
from zoo import CASES, gpt2, llama, tower, tower_batch

pytestmark = [
    # peft asks transformers for what transformers 6 will rename.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    # It looks for the base model's configuration, which is of no file.
    pytest.mark.filterwarnings("ignore:Could not find a config file in:UserWarning"),
    # torch's own, of a checkpoint of one process.
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
]

Tensors = Mapping[str, torch.Tensor]
CASE = CASES["gpt2"]  # transformers, with tied weights
LAYER = "transformer.h.1"


# --- the savers: each writes to a directory, and gives what is read back from there --------------


def plain_with(load: Callable[[Any], Any]) -> Tensors:
    """What a model without castor holds after `load`."""
    model = CASE.model()
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(float("nan"))
    load(model)
    return dict(model.state_dict())


def torch_save(boosted: Boosted, path: Path) -> Tensors:
    torch.save(boosted.model.state_dict(), path / "state.pt")
    return dict(torch.load(path / "state.pt"))


def torch_save_of_parameters(boosted: Boosted, path: Path) -> Tensors:
    torch.save(dict(boosted.model.named_parameters(remove_duplicate=False)), path / "state.pt")
    return dict(torch.load(path / "state.pt"))


def torch_save_of_a_layer(boosted: Boosted, path: Path) -> Tensors:
    torch.save(boosted.model.get_submodule(LAYER).state_dict(), path / "layer.pt")
    return {f"{LAYER}.{key}": value for key, value in torch.load(path / "layer.pt").items()}


def pickle_of_state(boosted: Boosted, path: Path) -> Tensors:
    return dict(pickle.loads(pickle.dumps(boosted.model.state_dict())))


def pickle_of_model(boosted: Boosted, path: Path) -> Tensors:
    return dict(pickle.loads(pickle.dumps(boosted.model)).state_dict())


def torch_save_of_model(boosted: Boosted, path: Path) -> Tensors:
    torch.save(boosted.model, path / "model.pt")
    return dict(torch.load(path / "model.pt", weights_only=False).state_dict())


def deepcopy_of_model(boosted: Boosted, path: Path) -> Tensors:
    return dict(copy.deepcopy(boosted.model).state_dict())


def deepcopy_of_state(boosted: Boosted, path: Path) -> Tensors:
    return dict(copy.deepcopy(boosted.model.state_dict()))


def safetensors_file(boosted: Boosted, path: Path) -> Tensors:
    state = dict(boosted.model.state_dict())
    del state["lm_head.weight"]  # tied: the library refuses it
    save_file(state, path / "model.safetensors")
    return load_file(path / "model.safetensors")


def safetensors_model(boosted: Boosted, path: Path) -> Tensors:
    save_model(boosted.model, str(path / "model.safetensors"))
    return plain_with(lambda model: load_model(model, path / "model.safetensors"))


def save_pretrained(boosted: Boosted, path: Path) -> Tensors:
    boosted.model.save_pretrained(path)
    assert sorted(load_file(path / "model.safetensors")) == sorted(
        key for key in boosted.model.state_dict() if key != "lm_head.weight"
    )
    return dict(hf.AutoModelForCausalLM.from_pretrained(path).state_dict())


def save_pretrained_in_shards(boosted: Boosted, path: Path) -> Tensors:
    boosted.model.save_pretrained(path, max_shard_size="40KB")
    assert len(list(path.glob("*.safetensors"))) > 3
    return dict(hf.AutoModelForCausalLM.from_pretrained(path).state_dict())


def accelerate_save_model(boosted: Boosted, path: Path) -> Tensors:
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.save_model(boosted.model, path)
    return plain_with(lambda model: load_model(model, path / "model.safetensors"))


def accelerate_get_state_dict(boosted: Boosted, path: Path) -> Tensors:
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.save(accelerator.get_state_dict(boosted.model), path / "state.pt")
    return dict(torch.load(path / "state.pt"))


def accelerate_save_state(boosted: Boosted, path: Path) -> Tensors:
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.prepare_model(boosted.model, device_placement=False)
    accelerator.save_state(str(path))
    return plain_with(lambda model: load_model(model, path / "model.safetensors"))


def trainer_save_model(boosted: Boosted, path: Path) -> Tensors:
    arguments = hf.TrainingArguments(output_dir=str(path), use_cpu=True, report_to="none")
    hf.Trainer(model=boosted.model, args=arguments).save_model(str(path))
    (path / "training_args.bin").unlink()
    return dict(hf.AutoModelForCausalLM.from_pretrained(path).state_dict())


def distributed_checkpoint(boosted: Boosted, path: Path) -> Tensors:
    dcp.save(dict(boosted.model.state_dict()), checkpoint_id=path, no_dist=True)
    state = {key: torch.zeros_like(value) for key, value in CASE.model().state_dict().items()}
    dtype = next(boosted.model.parameters()).dtype
    state = {key: value.to(dtype) for key, value in state.items()}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return state


SAVERS = [
    torch_save,
    torch_save_of_parameters,
    torch_save_of_a_layer,
    torch_save_of_model,
    pickle_of_state,
    pickle_of_model,
    deepcopy_of_model,
    deepcopy_of_state,
    safetensors_file,
    safetensors_model,
    save_pretrained,
    save_pretrained_in_shards,
    accelerate_save_model,
    accelerate_get_state_dict,
    accelerate_save_state,
    trainer_save_model,
    distributed_checkpoint,
]
READ_PARAMETERS = {torch_save_of_parameters, torch_save_of_model, pickle_of_model}
"""They read parameters themselves, of which those on NVMe have no address."""


@pytest.fixture(autouse=True)
def _no_accelerator_before() -> None:
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


# --- when, and from where, they save --------------------------------------------------------------


def after_step(boosted: Boosted) -> None:
    """Updates may be under way."""
    train_on(boosted, CASE, steps=2)


def after_evaluation(boosted: Boosted) -> None:
    """Chunks are on the device, one of them written there."""
    train_on(boosted, CASE, steps=2)
    boosted.model.eval()
    with torch.no_grad():
        boosted.model(**CASE.batch(7))
        boosted.model.transformer.h[2].mlp.c_fc.weight.mul_(1.5)


def after_backward(boosted: Boosted) -> None:
    train_on(boosted, CASE, steps=1)
    boosted.booster.backward(boosted.model(**CASE.batch(5)).loss, boosted.optimizer)


def boosted_at(place: str, path: Path, memory: int = 2**26, **settings: Any) -> Boosted:
    settings = {"chunk_bytes": CHUNK, "overlap": "forward"} | settings
    if place == "nvme":
        nvme = path / "nvme"
        nvme.mkdir()
        formats = {
            key: settings[key] for key in ("precision", "optim_state_format") if key in settings
        }
        chunk = largest_chunk(boost(CASE.model(), chunk_bytes=CHUNK, **formats))
        settings |= on_nvme(nvme, chunk, **formats)
    boosted = boost(CASE.model(), memory, **settings)
    report = boosted.report()
    assert (report.nvme_weight_bytes > 0) == (place == "nvme")
    return boosted


def assert_saves_all(
    save: Callable[[Boosted, Path], Tensors], boosted: Boosted, path: Path
) -> None:
    """Saves first: whatever reads the truth before would wait for updates in its stead."""
    directory = path / "saved"
    directory.mkdir()
    saved = save(boosted, directory)
    named = boosted.model.named_parameters(remove_duplicate=False)
    truth = {name: param.detach().clone() for name, param in named}
    truth |= {name: b.clone() for name, b in boosted.model.named_buffers() if "rotary" not in name}
    if save is torch_save_of_a_layer:
        truth = {name: value for name, value in truth.items() if name.startswith(LAYER + ".")}
    if save is safetensors_file:
        del truth["lm_head.weight"]
    missing, extra = truth.keys() - saved.keys(), saved.keys() - truth.keys()
    assert (missing, extra) == (set(), set())
    dtype = truth[LAYER + ".ln_1.weight"].dtype
    for name, value in truth.items():
        assert torch.equal(saved[name].to(dtype), value), name
    # Headers and padding; a distributed checkpoint pickles tensor by tensor.
    assert_no_bytes_but_theirs(truth, directory, 4096 if save is distributed_checkpoint else 1024)
    if save not in FROM_ONE_FILE:
        assert {n for n, v in saved.items() if v.untyped_storage().nbytes() != v.nbytes} == set()


FROM_ONE_FILE = {safetensors_file, save_pretrained, save_pretrained_in_shards, trainer_save_model}
"""Their readers may give views of a mapped file."""


def assert_no_bytes_but_theirs(truth: Tensors, directory: Path, beside_each: int) -> None:
    """And 32 KiB of configurations and random states."""
    tensors = {id(value): value for name, value in truth.items() if name != "lm_head.weight"}
    of_tensors = sum(value.nbytes for value in tensors.values())
    files = [path for path in directory.rglob("*") if path.is_file()]
    written = sum(path.stat().st_size for path in files)
    assert written <= of_tensors + beside_each * len(tensors) + 2**15


@pytest.mark.parametrize("place", ["memory", "nvme"])
@pytest.mark.parametrize(("precision", "state_format"), FORMATS)
@pytest.mark.parametrize("save", SAVERS)
def test_every_key_and_value_right_after_a_step(
    save: Any, precision: str, state_format: str, place: str, tmp_path: Path
) -> None:
    boosted = boosted_at(place, tmp_path, precision=precision, optim_state_format=state_format)
    after_step(boosted)
    if place == "nvme" and save in READ_PARAMETERS:
        with pytest.raises(RuntimeError, match=r"on NVMe.*model\.state_dict\(\)"):
            save(boosted, tmp_path)
        return
    assert_saves_all(save, boosted, tmp_path)


@pytest.mark.parametrize("place", ["memory", "nvme"])
@pytest.mark.parametrize("prepare", [after_evaluation, after_backward])
@pytest.mark.parametrize("save", SAVERS)
def test_every_key_and_value_in_a_tight_budget(
    save: Any, prepare: Callable[[Boosted], None], place: str, tmp_path: Path
) -> None:
    if place == "nvme" and save in READ_PARAMETERS:
        return  # see above
    memory = tight_memory(
        CASE.model, lambda model, seed: CASE.loss(model(**CASE.batch(seed)), CASE.batch(seed))
    )
    boosted = boosted_at(place, tmp_path, memory)
    prepare(boosted)
    assert boosted.report().evictions > 0
    assert_saves_all(save, boosted, tmp_path)


# --- what is lent ---------------------------------------------------------------------------------


def state_of(boosted: Boosted) -> dict[str, torch.Tensor]:
    return dict(boosted.model.state_dict())


def test_a_state_dict_is_the_parameters_memory_and_no_more() -> None:
    boosted = boost(CASE.model())
    train_on(boosted, CASE, steps=1)
    state = state_of(boosted)
    for name, param in boosted.model.named_parameters(remove_duplicate=False):
        for tensor in (param, param.data, state[name]):
            assert tensor.data_ptr() == param.data_ptr()
            assert tensor.storage_offset() == 0
            assert tensor.untyped_storage().nbytes() == param.nbytes
    assert state["lm_head.weight"].data_ptr() == state["transformer.wte.weight"].data_ptr()


@pytest.mark.usefixtures("same_kernels")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_state_dict_follows_the_training_and_writes_the_weights(precision: str) -> None:
    """As in plain PyTorch: an average that somebody swaps in through a state_dict, say."""
    ended = []
    for held in (False, True):
        memory = 2**26 if not held else 2**14  # chunks come and go under what is held
        boosted = boost(tower(), memory, precision=precision)
        go_on(boosted, 0, 2)
        state = state_of(boosted)
        go_on(boosted, 2, 2)
        assert_equal(list(state.values()), copies(boosted.model.parameters()))
        with torch.no_grad():
            boosted.model(**tower_batch(9))  # leaves chunks on the device
            target = state if held else dict(boosted.model.named_parameters())
            target["layers.1.weight"].mul_(1.5)
            target["head.bias"].fill_(0.25)
        go_on(boosted, 4, 2)
        ended.append(copies(boosted.model.parameters()))
        assert_equal(list(state.values()), ended[-1])
    assert boosted.report().evictions > 0
    assert_equal(ended[1], ended[0])


def test_a_state_dict_outlives_its_model() -> None:
    boosted = boost(tower())
    go_on(boosted)
    state, expected = state_of(boosted), copies(boosted.model.parameters())
    del boosted
    assert_equal(list(state.values()), expected)
    stored = io.BytesIO()
    torch.save(state, stored)
    assert stored.tell() <= sum(value.nbytes for value in expected) + 1024 * len(expected)


def test_a_layer_of_a_chunk_is_saved_without_the_chunk(tmp_path: Path) -> None:
    boosted = boost(tower(), chunk_bytes=2**16)
    assert len(engine_of(boosted.model).session.chunks()) == 1
    for save in (torch.save, lambda state, path: path.write_bytes(pickle.dumps(state))):
        save(boosted.model.layers[1].state_dict(), tmp_path / "layer")
        layer = boosted.model.layers[1]
        of_layer = layer.weight.nbytes + layer.bias.nbytes
        assert (tmp_path / "layer").stat().st_size <= of_layer + 2048
    copied = copy.deepcopy(boosted.model.layers[1].state_dict())
    assert [v.untyped_storage().nbytes() for v in copied.values()] == [32 * 32 * 4, 32 * 4]


def anonymous_peak(do: Callable[[], object]) -> int:
    """Bytes by which resident memory grew at most while `do` ran."""
    Path("/proc/self/clear_refs").write_text("5")
    before = memory_of_process("VmRSS")
    do()
    return memory_of_process("VmHWM") - before


def memory_of_process(name: str) -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith(name + ":")) * 1024


def test_saving_takes_no_second_copy_of_the_model(tmp_path: Path) -> None:
    boosted = boost(gpt2(width=512, layers=6), chunk_bytes=2**24)
    size = sum(param.nbytes for param in boosted.model.parameters())
    assert size > 70 * 2**20
    for save in (
        lambda: torch.save(boosted.model.state_dict(), tmp_path / "state.pt"),
        lambda: save_model(boosted.model, str(tmp_path / "model.safetensors")),
        lambda: boosted.model.save_pretrained(tmp_path / "hf"),
        lambda: accelerate.Accelerator(cpu=True).save_model(boosted.model, tmp_path / "acc"),
    ):
        save()  # what is imported and allocated once
        assert anonymous_peak(save) < size / 4


# --- updates under way ----------------------------------------------------------------------------


def mid_update() -> Boosted:
    """Large enough that updates take a while."""
    boosted = boost(tower(width=1024, depth=6), overlap="forward", placement_policy="cpu")
    go_on(boosted, 0, 2, width=1024)
    return boosted


def test_an_address_of_a_parameter_that_is_being_updated_is_refused() -> None:
    boosted = mid_update()
    last = boosted.model.layers[-1].weight
    for read in (last.data_ptr, last.untyped_storage().data_ptr):
        with pytest.raises(RuntimeError, match=r"still updating.*state_dict\(\)"):
            read()
    with pytest.raises(RuntimeError, match="still updating"):
        save_file({"w": last}, "/nonexistent")
    value = last.clone()
    assert last.data_ptr() != 0
    assert torch.equal(torch.from_numpy(last.detach().numpy()), value)
    go_on(boosted, 2, 1, width=1024)
    boosted.model.state_dict()
    assert all(param.data_ptr() for param in boosted.model.parameters())


def test_an_alias_that_was_held_before_is_read_by_address_after_every_step() -> None:
    boosted = boost(tower(width=256), overlap="forward")
    state = state_of(boosted)
    for step in range(3):
        go_on(boosted, step, 1, width=256)
        arrays = [torch.from_numpy(value.numpy()) for value in state.values()]
        assert_equal(arrays, copies(boosted.model.parameters()))


# --- parameters on NVMe ---------------------------------------------------------------------------


def test_on_nvme_operators_write_the_weight_and_addresses_are_of_a_copy(tmp_path: Path) -> None:
    stored = wide(tmp_path)
    go_on_wide(stored, steps=1)
    weight = stored.model.layers[3].weight
    state = state_of(stored)
    lent = state["layers.3.weight"]
    assert type(lent) is StoredWeight
    assert state.keys() == dict(stored.model.named_parameters()).keys()
    files = sorted(tmp_path.iterdir())
    array = lent.numpy()
    assert sorted(tmp_path.iterdir()) == files  # nameless
    assert torch.equal(torch.from_numpy(array), weight.clone())
    with torch.no_grad():
        lent.mul_(2.0)
        lent.data[0].zero_()
    assert not weight[0].any()
    go_on_wide(stored, first=1, steps=1)
    assert torch.equal(lent, weight)
    for value in (lent, lent.detach(), lent.view(-1).view(WIDTH, WIDTH), lent.t().t(), lent.cpu()):
        assert torch.equal(torch.from_numpy(value.numpy()), weight.clone())
    assert lent.tolist() == weight.clone().tolist()
    assert torch.equal(torch.from_numpy(lent[1:3, ::2].numpy()), weight.clone()[1:3, ::2])
    for plain in (lent + 1, lent.clone(), lent.sum(), copy.deepcopy(lent)):
        assert type(plain) is torch.Tensor
    assert type(stored.model.state_dict(keep_vars=True)["layers.3.weight"]) is not StoredWeight


def test_on_nvme_a_parameter_without_elements_is_saved(tmp_path: Path) -> None:
    stored = wide(tmp_path)
    empty = state_of(stored)["layers.3.weight"][:0]
    assert pickle.loads(pickle.dumps(empty)).shape == (0, WIDTH)


def test_on_nvme_a_full_disk_is_an_error_that_names_the_parameter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = wide(tmp_path)
    go_on_wide(stored, steps=1)
    expected = copies(stored.model.parameters())

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.posix_fallocate", full)
        with pytest.raises(
            castor.IoError,
            match=rf"No space left.*parameter 'layers\.\d+\.\w+'.*{tmp_path}.*save_model",
        ):
            torch.save(stored.model.state_dict(), tmp_path / "state.pt")
    saved = io.BytesIO()
    torch.save(stored.model.state_dict(), saved)
    saved.seek(0)
    assert_equal(list(torch.load(saved).values()), expected)
    go_on_wide(stored, first=1, steps=1)


def test_on_nvme_a_state_dict_of_a_dropped_model_says_so(tmp_path: Path) -> None:
    stored = wide(tmp_path)
    state = state_of(stored)
    del stored
    with pytest.raises(RuntimeError, match="until their model was dropped"):
        torch.save(state, tmp_path / "state.pt")


# --- frameworks -----------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["memory", "nvme"])
def test_adapters_are_written_by_peft(place: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    (tmp_path / "nvme").mkdir()
    settings = {"chunk_bytes": 2**15, "host_memory": 2**20, "nvme_path": tmp_path / "nvme"}
    model = peft.get_peft_model(llama(layers=6, width=96), config)
    boosted = boost(model, **(settings if place == "nvme" else {}), overlap="forward")
    assert (boosted.report().nvme_weight_bytes > 0) == (place == "nvme")
    batch = torch.arange(32).reshape(2, 16) % 64
    for _ in range(3):
        boosted.step(boosted.model(input_ids=batch, labels=batch).loss)
    boosted.model.save_pretrained(tmp_path / "adapter")
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    named = dict(boosted.model.named_parameters())
    assert len(saved) == sum("lora" in name for name in named)
    for key, value in saved.items():
        prefix, _, last = key.rpartition(".")
        assert torch.equal(value, named[f"{prefix}.default.{last}"].detach().clone()), key
    torch.manual_seed(3)
    read = peft.PeftModel.from_pretrained(llama(layers=6, width=96), tmp_path / "adapter")
    assert torch.equal(read(input_ids=batch).logits, boosted.model.eval()(input_ids=batch).logits)


@pytest.mark.parametrize("place", ["memory", "nvme"])
def test_accelerate_goes_on_from_its_own_state(place: str, tmp_path: Path) -> None:
    boosted = boosted_at(place, tmp_path)
    train_on(boosted, CASE, steps=2)
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.prepare_model(boosted.model, device_placement=False)
    accelerator.prepare_optimizer(boosted.optimizer, device_placement=False)
    accelerator.save_state(str(tmp_path / "state"))
    losses = train_on(boosted, CASE, steps=3)
    accelerator.load_state(str(tmp_path / "state"))
    assert train_on(boosted, CASE, steps=3) == losses
