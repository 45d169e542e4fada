"""JSON documents: Python values without loss, and documents that carry their own checksum."""

from __future__ import annotations

import base64
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import xxhash

from castor.checkpoint.container import memory_of
from castor.errors import CheckpointError

# --- Python values as JSON, without loss: decoding gives equal values of the same types -----------

_MAX_TENSOR_BYTES = 16 * 2**20


def encode(value: Any, where: str) -> Any:
    """Returns a JSON document for `value`.

    Takes None, bool, int, float (NaN and infinity too), str, bytes, list, tuple, Counter, and dict
    with any of these as keys. Also takes CPU or CUDA tensors up to 16 MiB.

    Args:
        value: The value to encode.
        where: Name of the value, for errors.

    Raises:
        CheckpointError: The value contains another type, or a tensor that is too large or not
            dense. The message names its key.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode("ascii")}
    if isinstance(value, torch.Tensor):
        return {"$tensor": _encode_tensor(value, where)}
    if isinstance(value, list):
        return [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return {"$tuple": [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]}
    if isinstance(value, dict):
        return _encode_dict(value, where)
    raise CheckpointError(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot hold: it takes numbers, "
        "strings, lists, tuples, dicts and tensors; convert it, or leave it out"
    )


def _encode_dict(value: dict[Any, Any], where: str) -> Any:
    plain = not isinstance(value, Counter) and all(
        isinstance(key, str) and not key.startswith("$") for key in value
    )
    if plain:
        return {str(key): encode(item, f"{where}['{key}']") for key, item in value.items()}
    pairs = [
        [encode(key, f"a key of {where}"), encode(item, f"{where}[{key!r}]")]
        for key, item in value.items()
    ]
    return {"$counter" if isinstance(value, Counter) else "$map": pairs}


def _encode_tensor(tensor: torch.Tensor, where: str) -> dict[str, Any]:
    if tensor.layout != torch.strided or tensor.is_meta or tensor.nbytes > _MAX_TENSOR_BYTES:
        raise CheckpointError(
            f"{where} is a tensor of {tensor.nbytes} bytes on {tensor.device}; only dense ones of "
            f"up to {_MAX_TENSOR_BYTES} bytes go into JSON"
        )
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "data": base64.b64encode(memory_of(flat)).decode("ascii"),
    }


def decode(document: Any) -> Any:
    """Returns the value that `encode` was given; tensors come back on the CPU."""
    if isinstance(document, list):
        return [decode(item) for item in document]
    if not isinstance(document, dict):
        return document
    if len(document) == 1:
        ((tag, content),) = document.items()
        if tag == "$float":
            return float(content)
        if tag == "$bytes":
            return base64.b64decode(content)
        if tag == "$tuple":
            return tuple(decode(item) for item in content)
        if tag == "$tensor":
            return _decode_tensor(content)
        if tag in ("$map", "$counter"):
            pairs = {decode(key): decode(item) for key, item in content}
            return Counter(pairs) if tag == "$counter" else pairs
    return {key: decode(item) for key, item in document.items()}


def _decode_tensor(content: dict[str, Any]) -> torch.Tensor:
    data = bytearray(base64.b64decode(content["data"]))
    dtype = getattr(torch, content["dtype"])
    if not data:
        return torch.empty(content["shape"], dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(content["shape"])


# --- JSON documents that carry their own checksum, each with one canonical text -------------------

_SEAL = "checksum"


def canonical(document: Any) -> bytes:
    """Returns the canonical text of a document: sorted keys, no spaces, ASCII, no NaN."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode("ascii")


def seal(document: dict[str, Any]) -> bytes:
    """Returns the canonical text of `document` with its XXH3-128 added under "checksum"."""
    return canonical({**document, _SEAL: xxhash.xxh3_128_hexdigest(canonical(document))})


def unseal(raw: bytes, path: Path, format_name: str) -> dict[str, Any]:
    """Returns the document whose text `seal` made, after a check of its checksum.

    Args:
        raw: Contents of the file.
        path: Path of the file, for errors.
        format_name: Value that the document's "format" must have.

    Raises:
        CheckpointError: A byte differs from what was written, or the format is another one.
    """
    try:
        document = json.loads(raw)
        checksum = document.pop(_SEAL)
        intact = raw == canonical({**document, _SEAL: checksum})
        intact = intact and checksum == xxhash.xxh3_128_hexdigest(canonical(document))
    # A damaged text may be any JSON, or none.
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        intact = False
    if not intact:
        raise CheckpointError(
            f"{path} is damaged: its {len(raw)} bytes do not match the checksum in it; take an "
            "older checkpoint or another copy"
        )
    if document.get("format") != format_name:
        raise CheckpointError(
            f"{path} has format {document.get('format')!r}; this version reads {format_name!r}"
        )
    return dict(document)


def read_sealed(path: Path, format_name: str) -> dict[str, Any]:
    """Reads a sealed document from a file.

    Raises:
        CheckpointError: The file is missing, unreadable, damaged or of another format.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    return unseal(raw, path, format_name)
