"""Inputs of any model of transformers, made from the names of its forward's arguments.

candidates() gives several ways to call a model, of which the first that plain PyTorch accepts is
taken: with labels of several kinds, else without, with images where there is a place for them.
"""

import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from small_configs import IMAGE, TEXT_IDS, VOCABULARY

Inputs = dict[str, Any]
ROWS, LENGTH = 2, 24


def _find(config: Any, *names: str, default: Any = None) -> Any:
    """The first of these fields that a configuration or one of its parts has."""
    pending, seen = [config], []
    while pending:
        one = pending.pop(0)
        seen.append(one)
        for name in names:
            value = getattr(one, name, None)
            if value is not None:
                return value
        pending += [v for v in vars(one).values() if hasattr(v, "model_type") and v not in seen]
    return default


def _ids(generator: torch.Generator, rows: int = ROWS, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(TEXT_IDS, VOCABULARY - 2, (rows, length), generator=generator)


def _side(config: Any) -> int:
    size = _find(config, "image_size", "img_size", default=IMAGE)
    if isinstance(size, dict):
        size = size.get("height", IMAGE)
    return int(size[0] if isinstance(size, (list, tuple)) else size)


def _channels(config: Any) -> int:
    count = _find(config, "num_channels", "in_channels", "in_chans", default=3)
    return count if isinstance(count, int) and count < 16 else 3


def _images(config: Any, generator: torch.Generator, *more: int, side: int = 0) -> torch.Tensor:
    side = side or _side(config)
    return torch.randn((ROWS, *more, _channels(config), side, side), generator=generator)


def _flat_patches(config: Any, generator: torch.Generator, rows: int) -> torch.Tensor:
    vision = getattr(config, "vision_config", config)
    patch = _find(vision, "patch_size", default=8)
    frames = getattr(vision, "temporal_patch_size", None) or 1
    channels = _find(vision, "in_channels", "in_chans", "num_channels", default=3)
    return torch.randn((rows, channels * frames * patch**2), generator=generator)


def _audio(config: Any, generator: torch.Generator, way: int) -> Inputs:
    """Features of sound: (rows, mels, frames) or (rows, frames, mels)."""
    mels = _find(config, "num_mel_bins", "n_mels", "feature_size", "input_feat_size",
                 "input_dim", "hidden_size", default=80)  # fmt: skip
    frames = 2 * (_find(config, "max_source_positions", default=0) or 64)
    frames = min(frames, 512)
    shape = (ROWS, mels, frames) if way == 0 else (ROWS, 96, mels)
    return {"input_features": torch.randn(shape, generator=generator)}


def _base(model: nn.Module, names: set[str], generator: torch.Generator, way: int) -> Inputs:
    """All inputs but labels, without images in texts."""
    config, given = model.config, {}
    if "input_ids" in names:
        given["input_ids"] = _ids(generator)
        if "attention_mask" in names:
            given["attention_mask"] = torch.ones_like(given["input_ids"])
    if "bbox" in names:
        corners = torch.randint(0, 100, (ROWS, LENGTH, 2), generator=generator)
        given["bbox"] = torch.cat([corners, corners + 100], -1)
    if "input_values" in names:
        samples = 16000 if way < 2 else 3200
        shape: tuple[int, ...] = (ROWS, samples) if way % 2 == 0 else (ROWS, 1, samples)
        if hasattr(config, "frequency_stride"):  # spectrograms
            shape = (ROWS, config.max_length, config.num_mel_bins)
        given["input_values"] = torch.randn(shape, generator=generator) * 0.1
    if "input_features" in names:
        given |= _audio(config, generator, way % 2)
    if "past_values" in names:
        length = _find(config, "context_length", default=32)
        channels = _find(config, "num_input_channels", "input_size", default=1)
        shape = (ROWS, length, channels) if way % 2 == 0 else (ROWS, length)
        given["past_values"] = torch.randn(shape, generator=generator)
    if "pixel_values" in names and "input_ids" not in names:
        frames = _find(config, "num_frames", default=0)
        more = (frames,) if way % 2 and isinstance(frames, int) and frames else ()
        given["pixel_values"] = _images(config, generator, *more)
    if "pixel_values_videos" in names and "input_ids" not in names:
        frames = _find(config, "frames_per_clip", "num_frames", default=4)
        given["pixel_values_videos"] = _images(config, generator, frames)
    if "decoder_input_ids" in names and getattr(config, "is_encoder_decoder", False):
        given["decoder_input_ids"] = _ids(generator)
    return given


def _labels(model: nn.Module, names: set[str], given: Inputs, seed: int) -> Iterator[Inputs]:
    """Kinds of labels that the model may mean, the likeliest first."""
    generator = torch.Generator().manual_seed(1000 + seed)
    kind, count = type(model).__name__, getattr(model.config, "num_labels", 2)
    ids = given.get("decoder_input_ids", given.get("input_ids"))
    of_rows = {"labels": torch.randint(0, max(count, 1), (ROWS,), generator=generator)}
    if "start_positions" in names:
        places = torch.randint(0, LENGTH // 2, (2, ROWS), generator=generator)
        yield {"start_positions": places[0], "end_positions": places[1] + 4}
    if "next_sentence_label" in names and ids is not None:
        yield {"labels": ids.clone(), "next_sentence_label": of_rows["labels"] % 2}
    if "future_values" in names:
        length = getattr(model.config, "prediction_length", 16)
        shape = (ROWS, length, *given["past_values"].shape[2:])
        yield {"future_values": torch.randn(shape, generator=generator)}
    if "target_values" in names:
        yield {"target_values": torch.randn((ROWS, 1), generator=generator)}
        yield {"target_values": torch.zeros(ROWS, dtype=torch.long)}
    if "labels" not in names:
        return
    if "MultipleChoice" in kind or "SequenceClassification" in kind or "Classification" in kind:
        if "TokenClassification" in kind and ids is not None:
            yield {"labels": torch.randint(0, count, ids.shape, generator=generator)}
        yield of_rows
    if "Segmentation" in kind and "pixel_values" in given:
        size = given["pixel_values"].shape[-1]
        yield {"labels": torch.randint(0, count, (ROWS, size, size), generator=generator)}
    if ids is not None:
        yield {"labels": ids.clone()}
    yield {"labels": _ids(generator)}
    yield {"labels": _ids(generator, ROWS, 4)}
    yield of_rows


def _with_images(model: nn.Module, names: set[str], given: Inputs, seed: int) -> Iterator[Inputs]:
    """Images that a text speaks of; their places in it are set by with_places()."""
    if "pixel_values" not in names or "input_ids" not in names:
        return
    config, generator = model.config, torch.Generator().manual_seed(2000 + seed)
    if "image_grid_thw" in names:
        merge = _find(config, "spatial_merge_size", default=2)
        grid = torch.tensor([[1, 2 * merge, 2 * merge]] * ROWS)
        rows = int(grid.prod(-1).sum())
        yield {"pixel_values": _flat_patches(config, generator, rows), "image_grid_thw": grid}
    side = _side(getattr(config, "vision_config", None) or config)
    sizes = {"image_sizes": torch.tensor([[side, side]] * ROWS)} if "image_sizes" in names else {}
    vision = getattr(config, "vision_config", None) or config
    yield {"pixel_values": _images(vision, generator, side=side)} | sizes
    for more in ((1,), (2,), (3,), (5,)):
        yield {"pixel_values": _images(vision, generator, *more, side=side)} | sizes


def candidates(model: nn.Module, seed: int) -> Iterator[Inputs]:
    """Ways to call a model, the best first; each a function of the seed alone."""
    names = set(inspect.signature(model.forward).parameters)
    yield from _candidates(model, names, seed)
    if "use_cache" in names:
        for inputs in _candidates(model, names, seed):
            yield inputs | {"use_cache": False}


def _candidates(model: nn.Module, names: set[str], seed: int) -> Iterator[Inputs]:
    for images in (True, False):
        for way in range(4):
            given = _base(model, names, torch.Generator().manual_seed(seed), way)
            if not (given or way == 0):
                break
            if "MultipleChoice" in type(model).__name__:
                given = {
                    k: v.unsqueeze(1).repeat(1, 2, *[1] * (v.dim() - 1)) for k, v in given.items()
                }
            seen = list(_with_images(model, names, given, seed)) if images else [{}]
            for picture in seen:
                for labels in _labels(model, names, given, seed):
                    yield given | picture | labels
                yield given | picture
            if not any(
                key in given
                for key in ("input_values", "input_features", "past_values", "pixel_values")
            ):
                break


PLACES = re.compile(
    r"tokens:? *(\d+).*?features:? *(\d+)|placeholder tokens \((\d+)\) and features \((\d+)\)", re.I
)


def with_places(model: nn.Module, inputs: Inputs, said: str) -> Inputs | None:
    """The same inputs with as many image tokens as the error asks for, or None."""
    found = PLACES.search(said.replace("\n", " "))
    if not found or "input_ids" not in inputs:
        return None
    count = int(found[2] or found[4]) // ROWS
    token = _find(model.config, "image_token_id", "image_token_index", "media_placeholder_token_id")
    if not isinstance(token, int) or not 0 < count <= 400:
        return None
    ids = inputs["input_ids"]
    if (ids == token).any():
        return None
    start = _find(
        model.config,
        "vision_start_token_id",
        "image_start_token_id",
        "boi_token_id",
        default=TEXT_IDS,
    )
    first = torch.full((ROWS, 1), start if isinstance(start, int) else TEXT_IDS)
    longer = torch.cat([first, torch.full((ROWS, count), token), ids], 1)
    changed = inputs | {"input_ids": longer}
    for name in ("attention_mask", "labels"):
        if name in inputs and inputs[name].shape == ids.shape:
            fill = 1 if name == "attention_mask" else -100
            changed[name] = torch.cat([torch.full((ROWS, count + 1), fill), inputs[name]], 1)
    if "mm_token_type_ids" in inspect.signature(model.forward).parameters:
        changed["mm_token_type_ids"] = (longer == token).long()
    return changed


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _tensors(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)


def loss_of(outputs: Any) -> torch.Tensor:
    """The model's own loss, or the mean square of the first output that has a gradient."""
    own = getattr(outputs, "loss", None)
    if isinstance(own, torch.Tensor) and own.numel() == 1 and own.requires_grad:
        return own.reshape(())
    for tensor in _tensors(outputs):
        if tensor.is_floating_point() and tensor.requires_grad:
            return tensor.float().square().mean()
    raise ValueError("no output has a gradient")
