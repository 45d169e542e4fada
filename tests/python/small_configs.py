"""Small configurations of every model type of transformers, made from the default ones by rules.

A rule names fields and the small value they get. A configuration of parts (text_config,
vision_config, ...) is made small part by part.
"""

import contextlib
import re
from collections.abc import Callable, Iterable
from typing import Any

import transformers as hf

WIDTH, HEADS, HEAD, LAYERS, VOCABULARY, IMAGE, PATCH = 64, 4, 16, 2, 256, 32, 8
TEXT_IDS = 64
"""Ids below are special: their places in a text mean something to a model."""

Rule = tuple[str, Callable[[Any], Any]]


def _to(small: Any) -> Callable[[Any], Any]:
    return lambda _: small


def _at_most(bound: int) -> Callable[[Any], Any]:
    return lambda value: min(value, bound)


def _narrower(values: Any) -> Any:
    """Widths of stages, all divided by the same number."""
    flat = [value for value in values if isinstance(value, int)]
    if len(flat) < len(values) or not flat or min(flat) < 16:
        return values
    divisor = next((d for d in (16, 12, 8, 6, 4, 3, 2) if all(v % (8 * d) == 0 for v in flat)), 1)
    return [value // divisor for value in values]


NUMBERS: tuple[Rule, ...] = (
    (r"index_head_dim", _to(HEAD)), (r"index_n_heads", _to(2)), (r"index_topk", _to(8)),
    (r"linear_num_key_heads", _to(2)), (r"linear_num_value_heads", _to(4)),
    (r"linear_(key|value)_head_dim", _to(HEAD)),
    (r"mamba_(n|num)_heads", _to(8)), (r"mamba_(d_head|head_dim)", _to(HEAD)),
    (r"(mamba_|ssm_)?(d_)?state(_size)?", _at_most(16)), (r"(mamba_)?chunk_size", _at_most(8)),
    (r"mamba_dt_rank|time_step_rank", _to(8)), (r"mamba_n_groups|n_groups", _at_most(2)),
    (r"vocab_size|.*_vocab_size|unpadded_vocab_size", _to(VOCABULARY)),
    (r"vocab_size_per_layer_input|visual_vocab_size|type_vocab_size", _at_most(VOCABULARY)),
    (r"num_key_value_heads|.*_key_value_heads|num_kv_heads", _at_most(2)),
    (r"(num|n)_(attention_)?heads?|n_head|.*attention_heads|.*_n_heads?|.*_num_heads|swa_num_.*heads|attention_heads",
     _to(HEADS)),
    (r"num_hidden_layers|num_layers|n_layers?|(en|de)coder_layers|.*_num_hidden_layers|depth|"
     r"num_(en|de)coder_layers|.*_num_layers|.*_(en|de)coder_layers|layers", _at_most(LAYERS)),
    (r"num_(local_|routed_)?experts|n_routed_experts|moe_num_experts", _to(4)),
    (r"num_experts_per_tok(en)?|moe_topk|moe_k|top_k_experts|num_experts_per_token", _at_most(2)),
    (r"n_shared_experts|num_shared_experts|moe_num_shared_experts", _at_most(1)),
    (r"n_group|topk_group|num_expert_group", _to(1)),
    (r"first_k_dense_replace|num_dense_layers", _at_most(1)),
    (r"kv_lora_rank", _to(16)), (r"q_lora_rank", _to(24)), (r"(o|.*)_lora_rank", _at_most(16)),
    (r"qk_rope_head_dim|qk_nope_head_dim", _at_most(8)), (r"v_head_dim|qk_head_dim", _to(HEAD)),
    (r"head_dim|.*_head_dim|d_kv|kv_channels|d_head|dim_head|resampler_dim_head", _to(HEAD)),
    (r"max_position_embeddings|n_positions|max_.*position_embeddings|.*_max_position_embeddings|max_seq_len|"
     r"max_sequence_length|context_length|max_source_positions|max_target_positions|n_ctx|seq_len|model_max_length|"
     r"num_position_embeddings|block_size", _at_most(256)),
    (r"sliding_window|sliding_window_size|local_attention|attention_chunk_size|window_size",
     _at_most(16)),
    (r"(.*_)?intermediate_size|.*ffn_dim|d_ff|n_inner|mlp_dim|ffn_hidden_size|.*_intermediate_dim|"
     r"dim_feedforward|.*feedforward_dim|d_inner|.*expert_dim", _to(96)),
    (r"hidden_size|d_model|n_embd|embed_dim|emb_dim|dim|hidden_dim|width|(.*_)?hidden_size|(.*_)?hidden_dim|"
     r"word_embed_proj_dim|embedding_size|embedding_dim|.*projection_dim|projection_size|.*_embed_dim|output_dim|"
     r"project_dim|.*proj_dim|classifier_proj_size|pooler_output_size|fpn_hidden_size|lru_width|adapter_out_dim|"
     r"attention_hidden_size|projector_(in|out)put_dim|output_proj_dims|.*_embedding_dim|output_channels|conv_dim|"
     r"mask_feature_size|condition_dim|latent_size", _at_most(WIDTH)),
    (r"image_size|.*_image_size|img_size|crop_size", _to(IMAGE)), (r"patch_size", _to(PATCH)),
    (r"frames_per_clip", _at_most(4)),
    (r"num_queries|num_query_tokens|resampler_n_latents", _at_most(8)),
    (r"codebook_size|num_embeddings|audio_vocab_size", _at_most(64)),
    (r"codebook_dim", _at_most(32)),
    (r"pretraining_tp", _to(1)),
    (r"tdnn_dim|xvector_output_dim", _at_most(32)),
    (r"relative_attention_num_buckets|num_buckets", _at_most(8)),
    (r"upsample_groups", _at_most(WIDTH)),
    (r"num_filters|num_groups", _at_most(4)),
    (r"max_img_size", _at_most(2 * IMAGE)),
)  # fmt: skip
"""Fields whose whole name matches, in order, and what becomes of a number there."""
WIDTHS = re.compile(
    r"hidden_sizes|.*hidden_sizes|embed_dims?|depths?_dims|embed_dim_per_stage|out_channels|channels|"
    r"conv_dim|tdnn_dim|embedding_dims|(en|de)coder_channels|dims|stage_.*_channels|"
    r"backbone_channel_list|.*_channels|hidden_dim"
)
DEPTHS = re.compile(r"depths|num_blocks|blocks_per_stage|layers|stage_num_blocks|num_block_repeats")
TOKEN = re.compile(r".*token_(id|index)|.*_token|(unk|mask|pad|bos|eos|cls|sep)_index")
SAME_TOKENS = {"image_token_index": "image_token_id", "video_token_index": "video_token_id",
               "audio_token_index": "audio_token_id"}  # fmt: skip
KINDS = ("layer_types", "layers_block_type", "mlp_layer_types", "block_types")


def _layers(config: Any) -> int:
    for name in ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers"):
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    return 0


def fields(config: Any) -> dict[str, Any]:
    """Arguments of a configuration, with its values."""
    names = [n for n in getattr(type(config), "__dataclass_fields__", {}) if not n.startswith("_")]
    values = {}
    for name in names or list(config.to_dict()):
        with contextlib.suppress(Exception):  # a field of layers alone has no one value
            values[name] = getattr(config, name)
    return values


def _token_ids() -> Iterable[int]:
    yield from range(4, TEXT_IDS)


def _kinds_of_layers(kinds: list[Any]) -> list[Any]:
    """Each kind once, in the order in which it comes first, and two layers at least."""
    unique = list(dict.fromkeys(kinds))
    return unique if len(unique) > 1 else unique * LAYERS


def small_fields(config: Any, tokens: dict[str, int]) -> dict[str, Any]:
    """Arguments of a small configuration of the same type."""
    values, small = fields(config), {}
    stages = isinstance(values.get("depths"), (list, tuple))
    depth = 0 if stages else _layers(config)
    kinds = next((values[k] for k in KINDS if isinstance(values.get(k), list)), None)
    layers = min(depth, LAYERS)
    if kinds and len(kinds) == depth:
        layers = len(_kinds_of_layers(list(kinds)))
    for name, value in values.items():
        if isinstance(value, hf.PreTrainedConfig):
            small[name] = value if type(value) is hf.PreTrainedConfig else of_default(value, tokens)
        elif isinstance(value, bool) or value is None:
            continue
        elif isinstance(value, (list, tuple)):
            small |= _list(name, list(value), depth, layers, kinds)
        elif isinstance(value, int):
            if TOKEN.fullmatch(name):
                if value >= TEXT_IDS:
                    key = SAME_TOKENS.get(name, name)
                    small[name] = tokens.setdefault(key, 4 + len(tokens))
            elif not name.endswith(("_id", "_ids")):
                number = _number(name, value)
                if name == "num_key_value_heads" and value == values.get("num_attention_heads"):
                    number = HEADS
                if number != value:
                    small[name] = number
        elif isinstance(value, float) and name in ("layerdrop", "mask_time_prob"):
            continue
    heads = values.get("num_heads")
    if stages and isinstance(heads, (list, tuple)) and isinstance(values.get("embed_dim"), int):
        small["embed_dim"] = 8 * heads[0]
        small.pop("hidden_size", None)
    for name in ("num_hidden_layers", "n_layer", "num_layers", "n_layers"):
        if stages:
            small.pop(name, None)
        elif isinstance(values.get(name), int) and values[name] == depth and layers:
            small[name] = layers
    return small


def _number(name: str, value: int) -> int:
    for pattern, rule in NUMBERS:
        if re.fullmatch(pattern, name):
            return value if value <= 0 else rule(value)
    return value


def _list(
    name: str, value: list[Any], depth: int, layers: int, kinds: list[Any] | None
) -> dict[str, Any]:
    if not value or isinstance(value[0], hf.PreTrainedConfig):
        return {}
    if kinds and len(value) == depth == len(kinds):  # a value a layer
        first = {kind: place for place, kind in reversed(list(enumerate(kinds)))}
        places = [first[kind] for kind in _kinds_of_layers(list(kinds))]
        return {name: [value[place] for place in places]}
    if depth > LAYERS and len(value) == depth:
        return {name: value[:layers]}
    if DEPTHS.fullmatch(name) and all(isinstance(v, int) for v in value):
        return {name: [min(v, 2 if i == 0 else 1) for i, v in enumerate(value)]}
    if WIDTHS.fullmatch(name):
        return {name: _narrower(value)}
    if name in ("image_size", "img_size") and len(value) == 2:
        return {name: [IMAGE, IMAGE]}
    if name == "patch_size" and len(value) == 2:
        return {name: [PATCH, PATCH]}
    return {}


OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_d_head": HEAD, "attn_layer_indices": [1]},
    "granitemoehybrid": {"mamba_d_head": HEAD,
                         "layer_types": ["linear_attention", "full_attention"]},
    "autoformer": {"prediction_length": 8, "context_length": 16},
    "blt": {"encoder_hash_byte_group_vocab": 256},
    "bit": {"num_groups": 2},
    "canine": {"max_position_embeddings": 256},
    "codegen": {"rotary_dim": 8},
    "cpmant": {"dim_ff": 96, "prompt_length": 4},
    "ctrl": {"dff": 96},
    "dac": {"encoder_hidden_size": 8, "decoder_hidden_size": 128},
    "cohere_compass_text": {"rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
        for kind in ("full_attention", "sliding_attention")}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4},
             "ffn_config": {"ffn_hidden_size": 96, "hidden_size": WIDTH, "moe_num_experts": 4,
                            "moe_top_k": 2}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note_audio_encoder": {"adapter_input_size": WIDTH, "adapter_out_dim": WIDTH},
    "dots3_note_vision_encoder": {"adapter_in_dim": WIDTH, "adapter_out_dim": WIDTH},
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.5, "hidden_dim": 128},
    "align_vision_model": {"width_coefficient": 0.25, "depth_coefficient": 0.5, "hidden_dim": 128},
    "encodec": {"num_filters": 4},
    "esm": {"vocab_size": VOCABULARY, "pad_token_id": 1, "mask_token_id": 32},
    "esmc": {"num_key_value_heads": HEADS},
    "falcon_h1": {"mamba_d_head": HEAD, "mamba_d_ssm": 128},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": WIDTH // 4}},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gemma4_assistant": {"hidden_size_per_layer_input": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]],
                "attention_layers": ["global", "local"]},
    "gptj": {"rotary_dim": 8},
    "hunyuan_v1_dense": {"head_dim": HEAD},
    "hunyuan_v1_moe": {"head_dim": HEAD},
    "hunyuan_vl_text": {"head_dim": HEAD},
    "informer": {"prediction_length": 8, "context_length": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
              "expert_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "llama4_text": {"intermediate_size_mlp": 96},
    "longcat_flash": {"zero_expert_num": 2},
    "mamba2": {"num_heads": 8},
    "ministral": {"head_dim": HEAD},
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "nemotron": {"num_key_value_heads": 2},
    "patchtst": {"context_length": 32, "patch_length": 8, "patch_stride": 8},
    "perceiver": {"d_latents": WIDTH, "num_latents": 8, "num_self_attends_per_block": 2,
                  "num_self_attention_heads": 4, "num_cross_attention_heads": 4},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "time_series_transformer": {"prediction_length": 8, "context_length": 16},
    "vits": {"upsample_initial_channel": 64},
    "wavtokenizer": {"codebook_dim": WIDTH},
    "wavtokenizer_encoder": {"codebook_dim": WIDTH},
    "zamba": {"num_hidden_layers": 6, "layers_block_type": [
        "linear_attention", "linear_attention", "hybrid",
        "linear_attention", "linear_attention", "hybrid"]},
}  # fmt: skip
"""Fields of model types whose rules are their own."""
MROPE = re.compile(
    r"(qwen(2|2_5|3)_vl|qwen3_vl_moe|qwen(2_5|3)_omni.*|qwen3_5|qwen3_5_moe|qwen4_exp|cosmos3_edge|"
    r"paddleocr_vl|ernie4_5_vl_moe|glm4v|glm4v_moe|glm_image|glm_ocr|hy_v4_vl)(_text|_talker)?"
)
"""Types that split a head's rotations over time, height and width, by numbers of their own."""


def small_config(model_type: str) -> Any:
    """A small configuration of a model type."""
    return of_default(hf.CONFIG_MAPPING[model_type](), {})


def of_default(default: Any, tokens: dict[str, int]) -> Any:
    """A small configuration of a default one's type.

    Args:
        default: One as its class gives it without arguments.
        tokens: Ids that special tokens have in other parts of the same configuration, by field.
    """
    given = small_fields(default, tokens)
    for name, value in OVERRIDES.get(default.model_type, {}).items():
        part = getattr(default, name, None)
        if isinstance(value, dict) and isinstance(part, hf.PreTrainedConfig):
            given[name] = type(part)(**(small_fields(part, tokens) | value))
        else:
            given[name] = value
    rope = getattr(default, "rope_parameters", None)
    in_three = MROPE.fullmatch(default.model_type) or (rope and "mrope_section" in rope)
    if in_three and isinstance(rope, dict) and "rope_theta" in rope:
        half = int(given.get("head_dim", HEAD) * rope.get("partial_rotary_factor", 1.0)) // 2
        if half < 4:
            given["head_dim"], half = 4 * HEAD, 4 * half
        section = [half - 2 * (half // 4), half // 4, half // 4]
        given["rope_parameters"] = rope | {"mrope_section": section}
    return type(default)(**given)
