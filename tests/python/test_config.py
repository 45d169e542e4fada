"""Arguments: sizes as people write them; each bad one a named exception that names it."""

from dataclasses import FrozenInstanceError
from typing import Any, get_args

import pytest
import torch
from torch import nn

from castor import _C, GeminiPlugin, HybridAdam, HybridParallelPlugin
from castor.config import names, parse_bytes
from helpers import boost, plugin
from zoo import tower

# --- sizes --------------------------------------------------------------------------------------

SIZES = [
    (1, 1), (2**40, 2**40), ("1B", 1), ("1KiB", 1024), ("1kb", 1000), ("2 GB", 2 * 10**9),
    ("24GiB", 24 * 2**30), ("1.5MiB", 3 * 2**19), (" 300MiB ", 300 * 2**20), ("1T", 10**12),
    ("0.5TiB", 2**39),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), SIZES)
def test_size_is_read(text: int | str, expected: int) -> None:
    assert parse_bytes(text, "device_memory") == expected
    assert GeminiPlugin(device="cpu", device_memory=text).config.device_bytes == expected


@pytest.mark.parametrize("argument", ["device_memory", "host_memory", "chunk_bytes"])
@pytest.mark.parametrize(
    "value", [0, -1, "0", "0GiB", "-1GiB", "", "GiB", "1PiB", "a lot", "1,5G", "24"]
)
def test_size_out_of_range_is_a_value_error(argument: str, value: int | str) -> None:
    with pytest.raises(ValueError, match=argument):
        GeminiPlugin(device="cpu", **{argument: value})


@pytest.mark.parametrize("argument", ["device_memory", "host_memory", "chunk_bytes"])
@pytest.mark.parametrize("value", [1.5, True, [1], b"1GiB"])
def test_size_of_another_type_is_a_type_error(argument: str, value: Any) -> None:
    with pytest.raises(TypeError, match=argument):
        GeminiPlugin(device="cpu", **{argument: value})


# --- other arguments ----------------------------------------------------------------------------

OUT_OF_RANGE = [
    ("placement_policy", "gpu"),
    ("tensor_placement_policy", "const"),
    ("precision", "fp8"),
    ("precision", "float32"),
    ("nonfinite", "warn"),
    ("max_norm", -1.0),
    ("max_norm", float("nan")),
    ("max_prefetch", -1),
    ("shard_param_frac", 1.5),
    ("shard_param_frac", -0.1),
    ("shard_param_frac", float("nan")),
    ("warmup_non_model_data_ratio", 1.0),
    ("warmup_non_model_data_ratio", -0.1),
    ("warmup_non_model_data_ratio", float("nan")),
    ("steady_cuda_cap_ratio", 0.0),
    ("steady_cuda_cap_ratio", 1.1),
    ("steady_cuda_cap_ratio", float("nan")),
    ("initial_scale", 0.0),
    ("initial_scale", float("nan")),
    ("initial_scale", 2.0**40),
    ("min_scale", 0.0),
    ("max_scale", 1.0),
    ("growth_factor", 1.0),
    ("growth_factor", float("nan")),
    ("backoff_factor", 1.0),
    ("backoff_factor", 0.0),
    ("growth_interval", 0),
    ("hysteresis", 0),
]


@pytest.mark.parametrize(("argument", "value"), OUT_OF_RANGE)
def test_value_out_of_range_is_a_value_error_that_names_it(argument: str, value: Any) -> None:
    name = "placement_policy" if argument == "tensor_placement_policy" else argument
    with pytest.raises(ValueError, match=name):
        GeminiPlugin(device="cpu", **{argument: value})


WRONG_TYPE = [
    ("placement_policy", 1),
    ("precision", torch.bfloat16),
    ("max_norm", "1"),
    ("max_norm", None),
    ("max_prefetch", 1.5),
    ("max_prefetch", "1"),
    ("shard_param_frac", "1"),
    ("enable_gradient_accumulation", 1),
    ("warmup_non_model_data_ratio", "0.8"),
    ("steady_cuda_cap_ratio", None),
    ("initial_scale", "65536"),
    ("growth_interval", 1.5),
    ("hysteresis", 2.5),
    ("trace_file", 3),
]


@pytest.mark.parametrize(("argument", "value"), WRONG_TYPE)
def test_value_of_another_type_is_a_type_error_that_names_it(argument: str, value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=argument):
        GeminiPlugin(device="cpu", **{argument: value})


@pytest.mark.parametrize("fraction", ["offload_optim_frac", "offload_param_frac"])
@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
def test_static_fraction_out_of_range_is_a_value_error(fraction: str, value: float) -> None:
    with pytest.raises(ValueError, match=fraction):
        GeminiPlugin(device="cpu", placement_policy="static", **{fraction: value})


def test_arguments_that_contradict_each_other_are_a_value_error() -> None:
    with pytest.raises(ValueError, match=r"placement_policy.*tensor_placement_policy"):
        GeminiPlugin(device="cpu", placement_policy="cpu", tensor_placement_policy="auto")
    GeminiPlugin(device="cpu", placement_policy="cpu", tensor_placement_policy="cpu")
    with pytest.raises(ValueError, match="static"):
        GeminiPlugin(device="cpu", placement_policy="auto", offload_optim_frac=0.5)
    with pytest.raises(ValueError, match=r"offload_optim_frac=1\.0"):
        boost(tower(), placement_policy="static", offload_param_frac=0.5)


NOT_YET = [
    ("shard_param_frac", 0.0),
    ("tp_size", 2), ("nvme_dir", "/tmp"),
    ("chunk_config_dict", {}), ("memstats", object()), ("force_outputs_fp32", True),
    ("use_fp8", True), ("master_weights", False),
    ("enable_async_reduce", True), ("search_range_m", 32),
    ("hidden_dim", 1024), ("min_chunk_size_m", 32),
    ("enable_sequence_parallelism", True), ("enable_flash_attention", True),
    ("enable_fused_normalization", True), ("enable_jit_fused", True), ("fp8_communication", True),
    ("enable_all_optimization", True), ("strict_ddp_mode", True), ("norm_type", 1.0),
    ("chunk_init_device", torch.device("cpu")),
]  # fmt: skip


@pytest.mark.parametrize(("argument", "value"), NOT_YET, ids=[str(row[0]) for row in NOT_YET])
def test_what_is_not_supported_yet_is_named_not_ignored(argument: str, value: Any) -> None:
    with pytest.raises(NotImplementedError, match=argument):
        GeminiPlugin(device="cpu", **{argument: value})


def test_values_that_ask_for_nothing_are_accepted() -> None:
    GeminiPlugin(
        device="cpu", tp_size=1, extra_dp_size=1, pin_memory=False, nvme_dir=None, overlap="none",
        master_weights=True, gpu_margin_mem_ratio=0.0, enable_gradient_accumulation=False,
        norm_type=2.0, shard_param_frac=1.0,
    )  # fmt: skip


@pytest.mark.parametrize("device", ["mps", "meta", torch.device("xpu")])
def test_device_that_is_not_supported_is_named(device: Any) -> None:
    with pytest.raises(NotImplementedError, match=torch.device(device).type):
        GeminiPlugin(device=device)


def test_pinned_memory_is_a_gpus() -> None:
    with pytest.raises(ValueError, match="pin_memory=True needs device='cuda'"):
        GeminiPlugin(device="cpu", pin_memory=True)


def test_unknown_argument_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="devce_memory"):
        GeminiPlugin(device="cpu", devce_memory="1GiB")
    with pytest.raises(TypeError, match=r"GeminiPlugin takes arguments by their names.* '22GiB'"):
        GeminiPlugin("22GiB")  # type: ignore[misc]
    with pytest.raises(TypeError, match=r"HybridParallelPlugin takes .* given 2 without one"):
        HybridParallelPlugin("auto", 2)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("literal", "kind"),
    [
        (names.PlacementPolicy, "placement_policy"),
        (names.Overlap, "overlap"),
        (names.Reduction, "reduction"),
        (names.StateFormat, "state_format"),
        (names.ScalarType, "scalar_type"),
        (names.LoadedWeights, "loaded_weights"),
        (names.PipelineStyle, "pipeline_style"),
        (names.PipelinePass, "pipeline_pass"),
    ],
)
def test_names_are_those_of_the_core(literal: Any, kind: str) -> None:
    assert get_args(literal) == _C.NAMES[kind]


def test_name_that_the_core_does_not_know_is_a_value_error_with_those_it_does() -> None:
    with pytest.raises(ValueError, match="unknown placement_policy 'gpu'; there are 'auto', 'cpu'"):
        _C.PlacementOptions(policy="gpu", offload_optim_frac=0.0, offload_param_frac=0.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        _C.PlacementOptions(policy=1, offload_optim_frac=0.0, offload_param_frac=0.0)  # type: ignore[arg-type]


def test_settings_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        plugin().config.max_norm = 1.0  # type: ignore[misc]


BAD_ADAM: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"lr": -1.0}, ValueError, "lr"),
    ({"lr": float("nan")}, ValueError, "lr"),
    ({"eps": -1.0}, ValueError, "eps"),
    ({"weight_decay": -0.1}, ValueError, "weight_decay"),
    ({"betas": (1.0, 0.9)}, ValueError, "beta1 must be in"),
    ({"betas": (0.9, -0.1)}, ValueError, "beta2 must be in"),
    ({"bias_correction": False}, NotImplementedError, "bias_correction"),
    ({"nvme_offload_fraction": 0.5}, ValueError, "nvme_offload_dir"),
    ({"nvme_offload_dir": "/tmp"}, ValueError, "nvme_offload_fraction"),
    ({"momentum": 0.9}, TypeError, "momentum"),
]


@pytest.mark.parametrize(("settings", "error", "match"), BAD_ADAM)
def test_bad_argument_of_hybrid_adam_is_named(
    settings: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        HybridAdam([nn.Parameter(torch.zeros(2))], **settings)


def test_hybrid_adam_alone_refuses_what_it_cannot_update() -> None:
    for param in (torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.complex64)):
        optimizer = HybridAdam([nn.Parameter(param)])
        optimizer.param_groups[0]["params"][0].grad = torch.ones_like(param)
        with pytest.raises(TypeError, match=str(param.dtype)):
            optimizer.step()
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match="sparse"):
        HybridAdam(embedding.parameters()).step()


@pytest.mark.parametrize(
    ("value", "error"),
    [("2GB", ValueError), ("fast/s", ValueError), (0, ValueError), (1.5, TypeError)],
)
def test_bandwidths_that_are_none_are_refused(value, error):
    with pytest.raises(error, match="link_bandwidth is"):
        GeminiPlugin(device="cpu", link_bandwidth=value)


def test_bandwidths_are_bytes_per_second():
    assert (
        GeminiPlugin(device="cpu", link_bandwidth="2GB/s").config.link_bytes_per_second == 2 * 10**9
    )
    assert GeminiPlugin(device="cpu", link_bandwidth=5).config.link_bytes_per_second == 5
