"""Every class of models that transformers builds small, at tight(0.5), against plain PyTorch.

The whole grid takes an hour: CASTOR_WHOLE_GRID=1 runs it. Without, a handful of unlike classes.
`scripts/families.py` writes docs/families.md from the results that `python model_family_cases.py`
leaves.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import grids
from model_family_cases import families, one_of_each, shortcomings

SOME = [
    "BigBirdForCausalLM",  # switches its attention in the first forward
    "BertForMaskedLM",
    "Qwen2VLForConditionalGeneration",  # images among text
    "WhisperForConditionalGeneration",
]
NAMES = [family.name for family in one_of_each()] if grids.WHOLE else SOME
SECONDS = 120


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Any]]:
    """The result of a class; one process runs the classes in turn, each in a fork of its own."""
    path = tmp_path_factory.mktemp("families") / "results.jsonl"
    script = Path(__file__).with_name("model_family_cases.py")
    lines: dict[str, Any] = {}
    with subprocess.Popen(
        [sys.executable, str(script), str(path), *NAMES],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"SECONDS_EACH": str(SECONDS), "OMP_NUM_THREADS": "1"},
    ) as process:

        def result(name: str) -> Any:
            while name not in lines and process.stdout and process.stdout.readline():
                lines.update(
                    (line["class"], line) for line in map(json.loads, path.read_text().splitlines())
                )
            return lines[name]

        yield result
        process.kill()


@pytest.mark.parametrize("name", NAMES)
def test_a_class_trains_saves_and_has_types_as_plain(
    name: str, results: Callable[[str], Any]
) -> None:
    found = results(name)
    if "not built" in found:
        pytest.skip(f"plain transformers: {found['not built']}")
    assert shortcomings(found) == {}


def test_the_classes_are_those_of_all_auto_classes() -> None:
    heads = {family.head for family in families().values()}
    assert {"causal LM", "masked LM", "CTC", "image classification", "base model"} <= heads
    assert len(heads) > 40
    assert sum(family.head == "causal LM" for family in families().values()) >= 140
    types = {family.model_type for family in one_of_each()}
    assert types == {family.model_type for family in families().values()}
