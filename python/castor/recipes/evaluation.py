"""Evaluates a boosted model on tasks of lm-eval, EleutherAI's Language Model Evaluation Harness."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed
from jinja2 import TemplateError
from lm_eval import simple_evaluate
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
from lm_eval.loggers import EvaluationTracker
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml
from lm_eval.utils import handle_non_serializable, hash_string, sanitize_list

from castor.checkpoint import latest
from castor.checkpoint.files import write_file
from castor.config import did_you_mean
from castor.errors import UsageError
from castor.recipes.evaluate import Questions
from castor.recipes.models import InferenceModel, find_model, load_for_inference
from castor.recipes.runs import EVALUATIONS, RECIPE, checkpoints

_YAML = (".yaml", ".yml")


class BoostedLM(HFLM):  # type: ignore[misc]
    """lm-eval's model over a boosted one. Data-parallel ranks divide the documents of a task."""

    def __init__(self, model: InferenceModel, *, batch_size: int, max_length: int | None) -> None:
        logger = logging.getLogger(HFLM.__module__)
        logger.addFilter(_not_about_objects)
        try:
            super().__init__(
                pretrained=model.model, tokenizer=model.tokenizer, backend="causal",
                batch_size=batch_size, max_length=max_length,
            )  # fmt: skip
        finally:
            logger.removeFilter(_not_about_objects)
        self._device = model.device
        if torch.distributed.is_initialized():
            self._rank = torch.distributed.get_rank()
            self._world_size = torch.distributed.get_world_size()

    def _model_call(self, inps: torch.Tensor) -> torch.Tensor:
        """Returns logits, without the cache of keys and values that HFLM makes and drops."""
        with torch.no_grad():
            logits: torch.Tensor = self.model(inps, use_cache=False).logits
        return logits

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the numbers of all ranks, of shape (ranks,), where each gives one."""
        if self.world_size == 1:
            return tensor
        numbers: list[Any] = [None] * self.world_size
        torch.distributed.all_gather_object(numbers, tensor.item())
        return torch.tensor(numbers)

    def barrier(self) -> None:
        """Waits until all ranks are here."""
        if self.world_size > 1:
            torch.distributed.barrier()


def _not_about_objects(record: logging.LogRecord) -> bool:
    """Whether a line of the log is another one than HFLM's on models that are loaded already."""
    return "`pretrained`" not in record.getMessage()


def evaluate(
    path: Path,
    questions: Questions,
    *,
    settings: Mapping[str, Any],
    base: Path | None = None,
    tokenizer: Path | None = None,
) -> dict[str, Any] | None:
    """Evaluates a model in a memory budget, with the numbers of lm-eval's `hf` model.

    All tasks are loaded before the model. Progress goes to stderr.

    Args:
        path: The model, as in `load_for_inference`.
        questions: The tasks.
        settings: Arguments of GeminiPlugin.
        base: The model folder that adapters belong to; by default the one that they name.
        tokenizer: Folder of the tokenizer; by default the model's.

    Returns:
        lm-eval's results, and `castor` with the device's memory in bytes. None on ranks above 0.

    Raises:
        UsageError: A task is unknown or cannot be loaded, or the model does not suit it;
            besides what `load_for_inference` raises.
    """
    named = {"pretrained": str(path), **({"tokenizer": str(tokenizer)} if tokenizer else {})}
    find_model(path)
    # As in simple_evaluate, whose tasks may draw random numbers while they load and later on.
    seed = questions.seed
    seeds = {
        "random_seed": DEFAULT_RANDOM_SEED if seed is None else seed,
        **dict.fromkeys(
            ("numpy_seed", "torch_seed", "fewshot_seed"),
            DEFAULT_OTHER_SEED if seed is None else seed,
        ),
    }
    random.seed(seeds["random_seed"])
    np.random.seed(seeds["numpy_seed"])
    tracker = EvaluationTracker()
    with contextlib.redirect_stdout(sys.stderr):
        tasks = load_tasks(questions, named)
        model = load_for_inference(path, settings=settings, base=base, tokenizer=tokenizer)
        _check_fit(questions, model)
        lm = BoostedLM(model, batch_size=questions.batch_size, max_length=questions.max_length)
        if lm.world_size > 1:
            check_ranks(questions, tasks, lm.world_size)
        try:
            results: dict[str, Any] | None = simple_evaluate(
                model=lm,
                model_args={**named, **settings},
                tasks=tasks,
                # The tasks are objects already: this one loads nothing.
                task_manager=TaskManager(include_defaults=False),
                num_fewshot=questions.num_fewshot,
                batch_size=questions.batch_size,
                device=str(model.device),
                limit=questions.limit,
                gen_kwargs=dict(questions.gen_kwargs),
                log_samples=questions.log_samples,
                evaluation_tracker=tracker,
                apply_chat_template=questions.apply_chat_template,
                fewshot_as_multiturn=questions.apply_chat_template,
                random_seed=None,
                numpy_random_seed=None,
                torch_random_seed=seeds["torch_seed"],
                fewshot_random_seed=seeds["fewshot_seed"],
                confirm_run_unsafe_code=questions.confirm_run_unsafe_code,
            )
        except BaseException as error:
            print(file=sys.stderr)  # ends the line of a progress bar
            if isinstance(error, AssertionError | TemplateError):
                raise UsageError(f"lm-eval refuses: {_first_line(error)}") from error
            raise
    if results is None:
        return None
    tracker.general_config_tracker.log_end_time()
    results["config"].update(seeds)
    report = model.booster.report()
    results["castor"] = {
        "peak_device_bytes": report.peak_device_bytes,
        "device_budget_bytes": report.device_budget_bytes,
    }
    return results | asdict(tracker.general_config_tracker)


def load_tasks(questions: Questions, metadata: Mapping[str, Any]) -> list[Any]:
    """Returns lm-eval's Task and Group objects of the questions, with their data.

    Args:
        questions: The tasks.
        metadata: What tasks are told of the model: "pretrained", and "tokenizer" if it is another.

    Raises:
        UsageError: A task is unknown, cannot be loaded, is there twice, or runs the model's code;
            or arguments of generation are given, and no task generates.
    """
    shared = {"metadata": dict(metadata)}
    manager = None
    if questions.include is not None:
        if not questions.include.is_dir():
            raise UsageError(f"there is no folder {questions.include}; give one with --include")
        manager = TaskManager(include_path=questions.include, include_defaults=False, **shared)
    known = set() if manager is None else set(manager.all_subtasks)
    # A folder by its bare name may be a task of lm-eval's, which it does not hide.
    if not all(
        name in known or (os.sep in name and Path(name).is_dir()) for name in questions.tasks
    ):
        # It reads the 15,000 YAML files of lm-eval: 5 seconds that local tasks do without.
        manager = TaskManager(include_path=questions.include, **shared)
    found: list[Any] = []
    for name in questions.tasks:
        loader, names = manager, [name]
        if Path(name).suffix in _YAML:
            if not Path(name).is_file():
                raise UsageError(f"there is no file {name}; give a YAML file of lm-eval's format")
        elif manager is not None and (matching := manager.match_tasks([name])):
            names = matching
        elif Path(name).is_dir():
            loader = TaskManager(include_path=name, include_defaults=False, **shared)
            names = loader.all_subtasks
            if not names:
                _check_files(Path(name))
                raise UsageError(f"{name} holds no task: give a folder of lm-eval's YAML files")
        else:
            _check_files(questions.include)
            alike = did_you_mean(name, manager.all_tasks if manager else [])
            raise UsageError(
                f"there is no task {name!r}{alike or ';'} give a name that `lm-eval ls tasks` "
                "prints, a YAML file, or the folder of your own tasks with --include"
            )
        for one in names:
            found += _load(loader, one)
    try:
        loaded = TaskManager(include_defaults=False).load(found)["tasks"]
    except ValueError as error:
        raise UsageError(f"{_first_line(error)}; name it once in --tasks") from error
    unsafe = next((name for name, one in loaded.items() if getattr(one, "UNSAFE_CODE", 0)), None)
    if questions.gen_kwargs and not any(
        one.get_config("output_type") == "generate_until" for one in loaded.values()
    ):
        raise UsageError(
            f"--gen-kwargs is given, and none of the tasks {', '.join(loaded)} generates text; "
            "leave it out"
        )
    if unsafe is not None and not questions.confirm_run_unsafe_code:
        raise UsageError(
            f"the task {unsafe!r} runs code that the model writes, on this machine; "
            "--confirm-run-unsafe-code allows it"
        )
    return found


def _load(manager: Any, name: str) -> list[Any]:
    """Returns the group of a name, or its tasks."""
    try:
        loaded = manager.load([name])
    except ConnectionError as error:
        from datasets.config import HF_DATASETS_CACHE

        raise UsageError(
            f"the task {name!r} needs data of the hub: {_first_line(error)}; load it once where "
            f"the hub can be reached and bring its cache here ({HF_DATASETS_CACHE}), or give a "
            "task over local files with --include"
        ) from error
    except Exception as error:  # a task's YAML and its own code raise what they want
        said = f"{type(error).__name__}: {_first_line(error)}".rstrip(".")
        raise UsageError(f"the task {name!r} cannot be loaded: {said}; see its YAML") from error
    return [*loaded["groups"].values()][:1] or [*loaded["tasks"].values()]


def _check_files(folder: Path | None) -> None:
    """Raises UsageError for a YAML file that cannot be read: lm-eval leaves such tasks out."""
    for path in sorted(folder.rglob("*.yaml")) if folder is not None else []:
        try:
            load_yaml(path, resolve_func=False)
        except Exception as error:  # YAML's errors, and those of files that it includes
            said = " ".join(str(error).split())
            raise UsageError(f"{path} is no task of lm-eval: {said}") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def _check_fit(questions: Questions, model: InferenceModel) -> None:
    """Checks that the model has the chat template and the positions that are asked for."""
    if questions.apply_chat_template and not model.tokenizer.chat_template:
        raise UsageError(
            f"the tokenizer of {model.name} has no chat template: add one to its folder "
            "(chat_template.jinja), or leave --apply-chat-template out"
        )
    most, asked = model.max_positions, questions.max_length
    if most is not None and asked is not None and asked > most:
        raise UsageError(f"--max-length is {asked:,}, and {model.name} takes {most:,} tokens")


def check_ranks(questions: Questions, tasks: Sequence[Any], ranks: int) -> None:
    """Checks that each rank gets a document of each task, as lm-eval needs.

    Args:
        questions: The tasks and their limit.
        tasks: What `load_tasks` returned.
        ranks: Number of data-parallel ranks.

    Raises:
        UsageError: A task has too few.
    """
    for name, task in TaskManager(include_defaults=False).load(list(tasks))["tasks"].items():
        documents = len(task.eval_docs)
        limit = questions.limit
        if limit is not None:
            documents = min(documents, int(limit if limit >= 1 else -(-documents * limit // 1)))
        if documents < ranks:
            raise UsageError(
                f"the task {name!r} has fewer documents ({documents}) than there are ranks "
                f"({ranks}); start fewer ranks"
            )


def results_file(path: Path, output: Path | None) -> Path | None:
    """Returns the file for the results of a model; None: they are printed alone.

    Args:
        path: The model. Results of a run go to its folder `evaluations`.
        output: A folder, or a file with the suffix .json; None: the run's.

    Raises:
        UsageError: The file cannot be made there.
    """
    if output is None:
        is_run = (path / RECIPE).is_file() or checkpoints(path) or latest(path) is not None
        if not is_run:
            return None
        output = path / EVALUATIONS
    date = datetime.now().isoformat().replace(":", "-")
    file = output if output.suffix == ".json" else output / f"results_{date}.json"
    there = next(one for one in file.absolute().parents if one.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)) or file.is_dir():
        raise UsageError(f"{file} cannot be written; give another folder or file with --output")
    return file


def save(results: dict[str, Any], file: Path) -> list[Path]:
    """Writes results as lm-eval does, and the samples in them to files beside: all, or none.

    Args:
        results: What `evaluate` returned.
        file: The file for the results, JSON.

    Returns:
        The files that were written.

    Raises:
        OSError: The disk refuses.
    """
    samples: dict[str, list[dict[str, Any]]] = results.get("samples", {})
    hashes = {
        task: hash_string("".join(f"{row['doc_hash']}{row['prompt_hash']}{row['target_hash']}"
                                  for row in rows))
        for task, rows in samples.items()
    }  # fmt: skip
    document = {name: value for name, value in results.items() if name != "samples"}
    stem = file.stem.removeprefix("results_")
    texts = {
        file.with_name(f"samples_{task.replace(os.sep, '_')}_{stem}.jsonl"): "".join(
            _dumped(_row(row)) + "\n" for row in rows
        )
        for task, rows in samples.items()
    }
    texts[file] = _dumped(document | {"task_hashes": hashes}, indent=2)
    file.parent.mkdir(parents=True, exist_ok=True)
    written = list[Path]()
    try:
        for one, text in texts.items():
            write_file(one, [text.encode()])
            written.append(one)
    except BaseException:
        for one in written:
            one.unlink(missing_ok=True)
        raise
    return written


def _row(sample: dict[str, Any]) -> dict[str, Any]:
    """Returns a sample as lm-eval writes it, so that `datasets` can load the file."""
    arguments = {
        f"gen_args_{i}": {f"arg_{j}": value for j, value in enumerate(given)}
        for i, given in enumerate(sample["arguments"])
    }
    return sample | {
        "resps": sanitize_list(sample["resps"]),
        "filtered_resps": sanitize_list(sample["filtered_resps"]),
        "arguments": arguments,
        "target": str(sample["target"]),
    }


def _dumped(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, indent=indent, default=handle_non_serializable, ensure_ascii=False)
