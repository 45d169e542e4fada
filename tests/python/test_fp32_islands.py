"""Parameters and buffers that stay float32 in a 16-bit model: their types, steps, files, bytes."""

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors import safe_open
from torch import nn

import castor
from castor.runtime.engine import engine_of
from castor.runtime.tensor_types import tensor_types
from helpers import GIB, Boosted, assert_equal, boost, copies, equal, exact_state
from islands import EXPERTS, KEPT, Gate, kept, loaded, routed, routed_loss

FORMATS = ("fp32", "split", "split_bf16", "split_int8")
TIGHT: dict[str, Any] = {"memory": 32 << 10, "chunk_bytes": 4096}

TINY: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
DEEPSEEK = TINY | {
    "moe_intermediate_size": 24, "n_routed_experts": 16, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4, "v_head_dim": 4, "first_k_dense_replace": 1, "n_shared_experts": 1,
    "num_key_value_heads": 4,
}  # fmt: skip
MAMBA = {"num_heads": 4, "head_dim": 16, "hidden_size": 32, "state_size": 8, "n_groups": 1}
FAMILIES: dict[str, Callable[[], Any]] = {
    "deepseek_v3": lambda: hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**DEEPSEEK)),
    "gpt_oss": lambda: hf.GptOssForCausalLM(
        hf.GptOssConfig(**TINY, head_dim=8, num_local_experts=4, num_experts_per_tok=2)
    ),
    "mamba2": lambda: hf.Mamba2ForCausalLM(
        hf.Mamba2Config(vocab_size=64, num_hidden_layers=2, expand=2, **MAMBA)
    ),
    "falcon_h1": lambda: hf.FalconH1ForCausalLM(
        hf.FalconH1Config(
            **TINY,
            head_dim=8,
            mamba_d_ssm=32,
            mamba_n_heads=4,
            mamba_d_head=8,
            mamba_n_groups=1,
            mamba_d_state=8,
        )
    ),
    "t5": lambda: hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    ),
    "afmoe": lambda: hf.AfmoeForCausalLM(
        hf.AfmoeConfig(
            **TINY,
            head_dim=8,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            num_dense_layers=1,
        )
    ),
    "qwen3_next": lambda: hf.Qwen3NextForCausalLM(
        hf.Qwen3NextConfig(
            **TINY,
            head_dim=8,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=24,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
        )
    ),
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def types(model: nn.Module) -> dict[str, torch.dtype]:
    """The type of each parameter and buffer."""
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: tensor.dtype for name, tensor in named}


def island_types(model: nn.Module) -> set[torch.dtype]:
    return {param.dtype for param in kept(model)}


def boosted_islands(**settings: Any) -> Boosted:
    """In bf16; the optimizer is castor's, which has the bits of a standalone one."""
    model = loaded(depth=settings.pop("depth", 3))
    optimizer = castor.HybridAdam(model.parameters(), lr=1e-2, weight_decay=0.1)
    settings = {"precision": "bf16"} | settings
    return boost(model, settings.pop("memory", GIB), optimizer, **settings)


def steps(boosted: Boosted, first: int = 0, count: int = 4) -> list[float]:
    return [boosted.step(routed_loss(boosted.model, first + i)) for i in range(count)]


# --- types ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("name", FAMILIES)
def test_types_are_those_of_from_pretrained(name: str, precision: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = FAMILIES[name]()
    model.save_pretrained(tmp_path)
    theirs = type(model).from_pretrained(tmp_path, dtype=DTYPES[precision])
    expected = types(theirs)
    for mine in (model, theirs):
        booster = castor.Booster(
            plugin=castor.GeminiPlugin(
                device="cpu", device_memory="8MiB", host_memory="64MiB", precision=precision
            )
        )
        booster.boost(mine)
        assert types(mine) == expected


def test_tokens_go_to_the_experts_that_they_go_to_in_plain_bfloat16(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = FAMILIES["deepseek_v3"]()
    with torch.no_grad():  # as in checkpoints whose experts were balanced by it
        plain.model.layers[1].mlp.gate.e_score_correction_bias.copy_(8 + 0.01 * torch.rand(16))
    plain.save_pretrained(tmp_path)

    def experts(model: Any) -> torch.Tensor:
        seen: list[torch.Tensor] = []
        of = model.model.layers[1].mlp.experts
        handle = of.register_forward_pre_hook(lambda _, args: seen.append(args[1].clone()))
        with torch.no_grad():
            model(input_ids=torch.arange(64)[None])
        handle.remove()
        return seen[0].sort(-1).values

    theirs = hf.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    ours = boost(plain.eval(), precision="bf16").model
    assert torch.equal(experts(theirs), experts(ours))


def test_what_is_float32_in_a_bfloat16_model_stays_so() -> None:
    boosted = boosted_islands()
    assert island_types(boosted.model) == {torch.float32}
    assert types(boosted.model)["blocks.0.into.weight"] == torch.bfloat16
    assert types(boosted.model)["blocks.0.gate.bias"] == torch.float32


def test_a_float32_model_becomes_bfloat16_but_for_what_is_named() -> None:
    every = boost(routed(), precision="bf16").model
    assert set(types(every).values()) == {torch.bfloat16}
    for names in (KEPT, [Gate, "norm.*"], ["*.gate.weight", "*.gate.bias", nn.RMSNorm]):
        model = boost(routed(), precision="bf16", keep_fp32=names).model
        assert types(model) == types(loaded())


def test_a_kept_parameter_that_is_bfloat16_becomes_float32() -> None:
    model = boost(routed().to(torch.bfloat16), precision="bf16", keep_fp32=["norm"]).model
    assert types(model)["norm.weight"] == torch.float32
    assert types(model)["blocks.0.gate.weight"] == torch.bfloat16


def test_a_tied_parameter_is_kept_under_each_of_its_names() -> None:
    model = routed()
    model.blocks[2].gate.weight = model.blocks[0].gate.weight
    boost(model, precision="bf16", keep_fp32=["blocks.2.gate.weight"])
    assert model.blocks[0].gate.weight.dtype == torch.float32


@pytest.mark.parametrize(
    ("keep_fp32", "error", "match"),
    [
        (["*.gates"], castor.UsageError, r"'\*\.gates'.*nearest are 'blocks\.\d\.gate'"),
        ([nn.Conv2d], castor.UsageError, r"has Conv2d, and Routed has no module of that class"),
        ([nn.Tanh], castor.UsageError, r"has Tanh, and Routed has no module of that class"),
        ("*.gate", TypeError, "give a list of patterns"),
        ([3], TypeError, "keep_fp32 has 3"),
    ],
)
def test_what_matches_nothing_is_refused(
    keep_fp32: Any, error: type[Exception], match: str
) -> None:
    model = routed()
    before = copies(model.parameters())
    with pytest.raises(error, match=match):
        boost(model, precision="bf16", keep_fp32=keep_fp32)
    assert_equal(copies(model.parameters()), before)


def test_in_float32_there_is_nothing_to_keep() -> None:
    with pytest.raises(ValueError, match="precision is 'fp32', in which everything does"):
        boost(routed(), precision="fp32", keep_fp32=KEPT)


def test_lazy_parameters_have_their_types() -> None:
    with castor.LazyInitContext():
        model = routed()
    boosted = boost(model, precision="bf16", keep_fp32=KEPT)
    expected = routed()
    assert types(boosted.model) == types(loaded())
    for name, param in boosted.model.named_parameters():
        assert equal(param, expected.get_parameter(name).to(param.dtype))


# --- steps ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", ["none", "forward", "backward"])
@pytest.mark.parametrize("state_format", FORMATS)
def test_steps_are_those_of_a_standalone_optimizer(state_format: str, overlap: str) -> None:
    """Bit for bit, in every format: the float32 parameters in "fp32"."""
    boosted = boosted_islands(
        optim_state_format=state_format,
        seed=5,
        overlap=overlap,
        nonfinite="ignore",
        enable_gradient_accumulation=overlap != "backward",
        **TIGHT,
    )
    plain = loaded()
    optimizer = castor.HybridAdam(
        plain.parameters(), lr=1e-2, weight_decay=0.1, optim_state_format=state_format, seed=5
    )
    for seed in range(4):
        loss = routed_loss(plain, seed)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert boosted.step(routed_loss(boosted.model, seed)) == loss.item()
    assert_equal(copies(boosted.model.parameters()), copies(plain.parameters()))
    mine, theirs = boosted.optimizer.state_dict()["state"], optimizer.state_dict()["state"]
    for i, entry in theirs.items():
        assert_equal(
            [mine[i][key] for key in ("step", "exp_avg", "exp_avg_sq")],
            [entry[key] for key in ("step", "exp_avg", "exp_avg_sq")],
        )


@pytest.mark.parametrize("state_format", ["fp32", "split"])
def test_five_clipped_steps_are_plain_pytorchs(state_format: str) -> None:
    """AdamW over float32 masters of the 16-bit parameters, and over float32 ones themselves."""
    max_norm = 0.05
    model = loaded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    boosted = boost(
        *(model, TIGHT["memory"], optimizer),
        precision="bf16", optim_state_format=state_format, max_norm=max_norm,
        chunk_bytes=TIGHT["chunk_bytes"],
    )  # fmt: skip
    plain = loaded()
    params = list(plain.parameters())
    masters = [nn.Parameter(param.detach().float()) for param in params]
    reference = torch.optim.AdamW(masters, lr=1e-2, weight_decay=0.1, foreach=False)
    for seed in range(5):
        loss = routed_loss(plain, seed)
        loss.backward()
        squares = [param.grad.double().pow(2).sum() for param in params]
        norm = torch.stack(squares).sum().sqrt().item()
        for param, master in zip(params, masters, strict=True):
            master.grad = param.grad.float() * min(1.0, max_norm / (norm + 1e-6))
        reference.step()
        plain.zero_grad()
        for param, master in zip(params, masters, strict=True):
            param.data.copy_(master)
        assert boosted.step(routed_loss(boosted.model, seed)) == loss.item()
        assert boosted.report().gradient_norm == pytest.approx(norm, rel=1e-6)
    for mine, theirs in zip(boosted.model.parameters(), params, strict=True):
        # One unit in the last place: castor's Adam sums the decayed moments in another order.
        tolerance = 3e-7 if mine.dtype == torch.float32 else 0.0
        torch.testing.assert_close(mine.cpu(), theirs, atol=tolerance, rtol=tolerance)


def test_gradients_have_the_types_of_their_parameters_and_edits_count() -> None:
    boosted = boosted_islands(**TIGHT)
    routed_loss(boosted.model, 0).backward()
    for param in boosted.model.parameters():
        assert param.grad is not None
        assert param.grad.dtype == param.dtype
    boosted.model.norm.weight.grad.zero_()
    with torch.no_grad():
        boosted.model.norm.weight.fill_(3.0)
    before = boosted.model.blocks[0].gate.weight.detach().clone()
    boosted.optimizer.param_groups[0]["weight_decay"] = 0.0
    boosted.optimizer.step()
    assert (boosted.model.norm.weight == 3.0).all()
    assert not equal(boosted.model.blocks[0].gate.weight, before)


@pytest.mark.parametrize("frozen", ["islands", "rest"])
def test_frozen_ones_stay_as_they_are(frozen: str) -> None:
    model = loaded()
    islands = {id(param) for param in kept(model)}
    for param in model.parameters():
        param.requires_grad_((id(param) in islands) != (frozen == "islands"))
    before = copies(model.parameters())
    boosted = boost(model, TIGHT["memory"], precision="bf16", chunk_bytes=TIGHT["chunk_bytes"])
    steps(boosted)
    for param, old in zip(boosted.model.parameters(), before, strict=True):
        assert equal(param, old) != param.requires_grad


def test_a_loss_scale_reaches_both_kinds() -> None:
    model = loaded(torch.float16)
    assert types(boost(model, precision="fp16").model) == types(loaded(torch.float16))

    def trained(scale: float) -> list[torch.Tensor]:
        boosted = boost(
            loaded(torch.float16), TIGHT["memory"], precision="fp16", initial_scale=scale,
            chunk_bytes=TIGHT["chunk_bytes"], max_norm=0.1,
        )  # fmt: skip
        steps(boosted)
        assert boosted.report().skipped_steps == 0
        return copies(kept(boosted.model))

    for one, other in zip(trained(1.0), trained(2.0**8), strict=True):
        assert torch.allclose(one, other, atol=2e-4)


def test_an_optimizer_that_runs_its_own_step_has_them_themselves() -> None:
    model = loaded()
    boosted = boost(
        *(model, TIGHT["memory"], torch.optim.Adagrad(model.parameters(), lr=1e-2)),
        precision="bf16", chunk_bytes=TIGHT["chunk_bytes"],
    )  # fmt: skip
    plain = loaded()
    steps(boosted, count=1)
    routed_loss(plain, 0).backward()
    torch.optim.Adagrad(kept(plain), lr=1e-2).step()
    assert_equal(copies(kept(boosted.model)), copies(kept(plain)))


class Projected(nn.Module):
    """Its inputs go to a module that stays float32, which does not cast."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(4, 8)
        self.out = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.into(x).to(self.out.weight.dtype))


@pytest.mark.parametrize("kept_one", ["into", "out"])
def test_inputs_have_the_type_of_the_module_that_takes_them(kept_one: str) -> None:
    torch.manual_seed(0)
    plain = Projected()
    model = boost(copy.deepcopy(plain), precision="bf16", keep_fp32=[kept_one]).model
    x = torch.randn(3, 4)
    for module in (plain.into, plain.out):
        if module is not getattr(plain, kept_one):
            module.to(torch.bfloat16)
    assert equal(model(x), plain(x.to(plain.into.weight.dtype)))


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("state_format", FORMATS)
def test_a_resumed_run_goes_on_bit_for_bit(state_format: str, tmp_path: Path) -> None:
    boosted = boosted_islands(optim_state_format=state_format, seed=2, **TIGHT)
    steps(boosted)
    boosted.booster.save(tmp_path / "run", boosted.model, boosted.optimizer)
    expected = steps(boosted, first=4)
    resumed = boosted_islands(optim_state_format=state_format, seed=2, **TIGHT)
    resumed.booster.load(tmp_path / "run", resumed.model, resumed.optimizer)
    assert steps(resumed, first=4) == expected
    assert_equal(exact_state(resumed), exact_state(boosted))


@pytest.mark.parametrize("state_format", FORMATS)
def test_states_move_between_formats_and_optimizers(state_format: str) -> None:
    boosted = boosted_islands(optim_state_format=state_format, **TIGHT)
    steps(boosted)
    twin = copy.deepcopy(boosted.optimizer)
    params = [param for group in twin.param_groups for param in group["params"]]
    assert [param.dtype for param in params] == [p.dtype for p in boosted.model.parameters()]
    state = boosted.optimizer.state_dict()
    other = boosted_islands(optim_state_format="split", **TIGHT)
    other.optimizer.load_state_dict(state)
    mine, theirs = other.optimizer.state_dict()["state"], state["state"]
    for i, param in enumerate(other.model.parameters()):
        if param.dtype == torch.float32 or state_format in ("fp32", "split"):
            for key in ("exp_avg", "exp_avg_sq"):
                assert equal(mine[i][key], theirs[i][key])
    plain = loaded()
    standalone = castor.HybridAdam(plain.parameters(), optim_state_format=state_format)
    standalone.load_state_dict(state)
    assert "remainder" not in standalone.state[plain.norm.weight]


def test_saved_weights_have_the_types_of_the_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = FAMILIES["deepseek_v3"]()
    boosted = boost(model, precision="bf16")
    boosted.booster.save_model(boosted.model, tmp_path)
    expected = {name: tensor.dtype for name, tensor in boosted.model.state_dict().items()}
    found = dict(stored_types(tmp_path))
    assert set(found.values()) == {torch.float32, torch.bfloat16}
    for name, dtype in found.items():
        assert expected.get(name, dtype) == dtype
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert types(again) == types(boosted.model)
    assert_equal(copies(again.parameters()), copies(boosted.model.parameters()))
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"


def stored_types(directory: Path) -> Iterator[tuple[str, torch.dtype]]:
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (no dict)
                yield name, file.get_tensor(name).dtype


# --- bytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("state_format", FORMATS)
def test_a_float32_parameter_has_no_master(state_format: str) -> None:
    """Bytes of weight, gradient and states: 16 in float32, 4 and the format's in bfloat16."""
    boosted = boosted_islands(optim_state_format=state_format, chunk_bytes=1 << 20)
    session = engine_of(boosted.model).session
    for i, param in enumerate(boosted.model.parameters()):
        own = "fp32" if param.dtype == torch.float32 else state_format
        assert session.state_format(i) == own
        assert (session.master(i) is None) == (param.dtype == torch.float32)


def test_estimates_count_their_bytes(tmp_path: Path) -> None:
    from castor.estimate.model import build
    from castor.estimate.simulator import lay_out
    from castor.runtime.spec import ModelSpec

    FAMILIES["deepseek_v3"]().config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["architectures"] = ["DeepseekV3ForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = build(tmp_path / "config.json", dtype=torch.bfloat16)
    trained = boost(FAMILIES["deepseek_v3"](), precision="bf16", optim_state_format="split")
    assert types(model) == types(trained.model)
    simulator = lay_out(ModelSpec.structure(model), "bf16", "split", "adam")
    places = simulator.places(
        {"policy": "auto", "offload_optim_frac": 0.0, "offload_param_frac": 0.0,
         "host_bytes": GIB, "nvme_bytes_per_second": 0.0, "ranks_sharing": 1,
         "reduced_on": "host"}
    )  # fmt: skip
    assert places["host_bytes"] == trained.report().host_bytes


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_a_model_of_adapters_keeps_theirs() -> None:
    """PEFT makes adapters of a bfloat16 model float32, and its layers cast for them."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    base = FAMILIES["deepseek_v3"]().to(torch.bfloat16)
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_a_proj", "o_proj"]))
    expected = types(model)
    assert torch.float32 in expected.values()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    boosted = boost(model, GIB, optimizer, precision="bf16")
    assert types(boosted.model) == expected
    ids = torch.arange(32)[None]
    for _ in range(2):
        boosted.step(boosted.model(input_ids=ids, labels=ids).loss)


def test_a_class_of_somebody_else_that_cannot_be_built_again_has_the_lists() -> None:
    class Mine(hf.DeepseekV3ForCausalLM):
        def __init__(self, config: Any, more: int) -> None:
            super().__init__(config)
            self.more = more

    found = tensor_types(Mine(hf.DeepseekV3Config(**DEEPSEEK), 3), torch.bfloat16).tensors
    assert found["model.layers.1.mlp.gate.weight"] == torch.float32
    assert found["model.layers.1.mlp.gate.e_score_correction_bias"] == torch.float32
    assert found["lm_head.weight"] == torch.bfloat16
    assert EXPERTS
