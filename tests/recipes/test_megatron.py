"""Megatron-LM's token files: the layout byte for byte, and files that are none."""

import json
import re
import struct
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from transformers import AutoTokenizer
from typer.testing import CliRunner

import small_model
from castor.cli import app
from castor.errors import UsageError
from castor.recipes.data import megatron
from castor.recipes.data.prepare import prepare
from castor.recipes.recipe import DataSection

DOCUMENTS = [[[5, 6, 7], [8]], [[]], [[65535, 1]]]
"""Three documents of two, one and one sequences."""


def layout() -> tuple[bytes, bytes]:
    """The two files of DOCUMENTS in uint16, put together from the description."""
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 4, 4)
    index += struct.pack("<4i", 3, 1, 0, 2) + struct.pack("<4q", 0, 6, 8, 8)
    return struct.pack("<6H", 5, 6, 7, 8, 65535, 1), index + struct.pack("<4q", 0, 2, 3, 4)


def test_the_layout_is_megatron_s(tmp_path: Path) -> None:
    megatron.write(tmp_path / "data", DOCUMENTS, np.uint16)
    assert (tmp_path / "data.bin").read_bytes() == layout()[0]
    assert (tmp_path / "data.idx").read_bytes() == layout()[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.bin", "data.idx"]


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.int32, np.int64, np.uint16])
def test_what_was_written_is_read(tmp_path: Path, dtype: type[np.integer]) -> None:
    random = np.random.default_rng(0)
    documents = [
        [random.integers(0, 127, random.integers(0, 50)) for _ in range(random.integers(1, 4))]
        for _ in range(100)
    ]
    megatron.write(tmp_path / "data", documents, dtype)
    for name in ("data", "data.bin", "data.idx"):
        found = megatron.TokenFile(tmp_path / name)
        assert len(found) == 100
        assert found.dtype == dtype
        for at, document in enumerate(documents):
            assert (found.document(at) == np.concatenate(document)).all()
    with pytest.raises(IndexError, match=r"document 100 of .*data\.bin, which has 100"):
        found.document(100)


def test_no_documents(tmp_path: Path) -> None:
    megatron.write(tmp_path / "data", [])
    assert len(megatron.TokenFile(tmp_path / "data")) == 0


def broken(index: bytes, at: int, value: bytes) -> bytes:
    return index[:at] + value + index[at + len(value) :]


@pytest.mark.parametrize(
    ("tokens", "index", "said"),
    [
        (0, lambda i: i[:20], r"data\.idx is truncated: it has 20 of the head's 34 bytes"),
        (0, lambda i: b"", r"data\.idx is no index of Megatron-LM: it begins with b''"),
        (0, lambda i: b"PK" + i[2:], r"begins with b'PKIDIDX\\x00\\x00' instead of b'MMIDIDX"),
        (0, lambda i: broken(i, 9, b"\2"), "has version 2; only version 1 can be read"),
        (0, lambda i: broken(i, 17, b"\7"), r"has type code 7 \(float32\), which is none of"),
        (0, lambda i: broken(i, 17, b"\x63"), r"has type code 99 \(unknown\)"),
        (0, lambda i: i[:-8], "is truncated: 4 sequences and 4 document indices take 114 bytes"),
        (0, lambda i: i + b"\0", "is longer than its head says: .* the file has 115"),
        (-2, lambda i: i, r"data\.bin is truncated: 6 tokens of uint16 take 12 bytes, .* has 10"),
        (2, lambda i: i, r"data\.bin is too long: .* the file has 14"),
        (0, lambda i: broken(i, 34, b"\xff" * 4), "sequence 0 has -1 tokens"),
        (0, lambda i: broken(i, 58, b"\4"), "sequence 1 begins at byte 4, .* say 6"),
        (0, lambda i: broken(i, 106, b"\3"), "do not rise from 0 to the number of sequences, 4"),
    ],
)  # fmt: skip
def test_foreign_and_truncated_files_are_refused_by_name_and_numbers(
    tmp_path: Path, tokens: int, index: object, said: str
) -> None:
    data, good = layout()
    data = data[:tokens] if tokens < 0 else data + b"\0" * tokens
    (tmp_path / "data.bin").write_bytes(data)
    (tmp_path / "data.idx").write_bytes(index(good))  # type: ignore[operator]
    with pytest.raises(ValueError, match=said):
        megatron.TokenFile(tmp_path / "data")


def test_a_write_that_fails_leaves_the_files_that_were_there(tmp_path: Path) -> None:
    megatron.write(tmp_path / "data", DOCUMENTS, np.uint16)
    with pytest.raises(ValueError, match=r"document 1 .* has token ids 0 to 65536, which uint16"):
        megatron.write(tmp_path / "data", [[[1]], [[0, 65536]]], np.uint16)
    with pytest.raises(ValueError, match="hold no token ids of type uint32"):
        megatron.write(tmp_path / "data", DOCUMENTS, np.uint32)
    assert (tmp_path / "data.bin").read_bytes() == layout()[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.bin", "data.idx"]


def test_the_type_of_a_vocabulary() -> None:
    assert megatron.smallest_dtype(32000) is np.uint16
    assert megatron.smallest_dtype(65500) is np.int32


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, texts, and recipes of pretrain and sft over them."""
    path = small_model.make(tmp_path_factory.mktemp("written"))
    for method, data in (("pretrain", "text"), ("sft", "chats")):
        (path / f"{method}.yaml").write_text(
            f"model: {{path: {path}/model}}\n"
            f"data: {{train: {path}/{data}.jsonl, held_out: 4, max_length: 32}}\n"
            f"method: {{name: {method}}}\noutput: {{dir: {path}/run}}\n"
        )
    return path


def written(place: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["data", "write", *arguments])


def test_documents_of_a_recipe_are_written_in_full_and_read_again(place: Path) -> None:
    result = written(place, str(place / "pretrain.yaml"), str(place / "files" / "text"))
    assert result.exit_code == 0, result.output
    found = megatron.TokenFile(place / "files" / "text")
    assert found.dtype == np.uint16
    assert f"{small_model.NUM_ROWS - 4} documents, {found.lengths.sum():,} tokens" in result.output
    words = AutoTokenizer.from_pretrained(place / "model")
    documents = [found.document(at).tolist() for at in range(len(found))]
    lines = (place / "text.jsonl").read_text().splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    assert all(one[-1] == words.eos_token_id for one in documents)
    assert {words.decode(one[:-1]) for one in documents} < set(texts)
    assert min(map(len, documents)) > 32  # max_length
    data = {"max_length": 32, "held_out": 0, "packing": False, "truncation": "split"}
    again = prepare(
        DataSection(train=str(place / "files" / "text"), **data), words, method="pretrain"
    )
    assert again.num_counted == found.lengths.sum() - len(found)  # nothing predicts first tokens

    other = written(place, str(place / "pretrain.yaml"), str(place / "held"), "--held-out")
    assert other.exit_code == 0, other.output
    assert len(megatron.TokenFile(place / "held")) == 4


def test_what_cannot_be_written_is_refused_before_anything_is(place: Path) -> None:
    (place / "there.idx").touch()
    for recipe, prefix, said in (
        ("pretrain", "there", r"there\.idx is there already"),
        ("sft", "chats", "which of them the loss counts"),
    ):
        result = written(place, str(place / f"{recipe}.yaml"), str(place / prefix))
        assert isinstance(result.exception, UsageError)
        assert re.search(said, str(result.exception))
        assert not (place / f"{prefix}.bin").exists()
    nothing = written(
        place, str(place / "pretrain.yaml"), str(place / "none"), "--held-out",
        "--set", "data.held_out=0",
    )  # fmt: skip
    assert "data.held_out is 0" in str(nothing.exception)
