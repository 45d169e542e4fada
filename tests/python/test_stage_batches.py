"""Batches of every form, divided into micro-batches."""

from typing import Any

import pytest

from rank_processes import found
from stage_batch_cases import FORMS, execute, forms, plain
from tensor_cases import LOSS
from tensor_cases import boost as boost_unsharded


@pytest.fixture(scope="module")
def in_stages(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return found(forms, 2, tmp_path_factory.mktemp("forms"))


@pytest.mark.parametrize("name", [*FORMS, "all labels, zbv", "all labels, tp_size"])
def test_losses_are_plain_pytorchs(name: str, in_stages: Any) -> None:
    assert in_stages[name] == pytest.approx(plain(FORMS[name.partition(",")[0]]), rel=LOSS)


def test_one_process_sums_the_losses_of_all_labels() -> None:
    case = FORMS["all labels"]
    assert execute(boost_unsharded(case, num_microbatches=4), case) == pytest.approx(plain(case))
