"""`castor train`: a recipe's plan, its run in the processes of `castor run`, and its resume."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from castor.config.run_options import RunOptions
from castor.errors import Error, UsageError
from castor.model_files import find_config, most_tokens
from castor.recipes import require
from castor.recipes.budgets import with_budgets
from castor.recipes.data import IGNORED
from castor.recipes.recipe import OF_PAIRS, Recipe, dump, load
from castor.recipes.runs import EVALUATIONS, LOG, RECIPE, checkpoints, versions

if TYPE_CHECKING:
    from castor.recipes.data.prepare import Prepared

_STATE = "trainer_state.json"
"""File that the Trainer writes last, into each checkpoint and at the end into the run's folder."""
_LIBRARIES = ("castor-torch", "torch", "transformers", "trl", "peft", "datasets", "accelerate")
_CONTINUED = ("model", "data", "method", "train", "memory", "parallel")
"""Sections that a run goes on with unchanged."""
_ADAPTER_FILE = "adapter_config.json"
_CAUSAL = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""Ends of the names of models that generate text."""


def start(path: Path, overrides: Sequence[str], *, dry_run: bool) -> int:
    """Runs `castor train`: checks the recipe, prepares the data, and trains or prints the plan.

    A run of the same recipe in the output folder goes on from its last complete checkpoint. Where
    the recipe says so, the trained model is evaluated at the end, in this process.

    Args:
        path: The recipe.
        overrides: Texts SECTION.NAME=VALUE.
        dry_run: Whether the plan is printed and nothing is trained or written.

    Returns:
        The exit status: 0, that of the process that trains, or 1 for a plan that does not fit.

    Raises:
        RecipeError: The recipe cannot be read, or contradicts itself.
        UsageError: Model or tokenizer do not suit it, or the output folder holds another run.
        ModuleNotFoundError: A library is lacking.
        OSError: A file cannot be read or written.
    """
    recipe = load(path, overrides)
    if recipe.method.adapter == "qlora":
        instead = "bitsandbytes, or give adapter: lora"
        require("method.adapter: qlora", "bitsandbytes", remedy=instead)
    for name in recipe.log.to:
        require(f"log.to: {name}", name, remedy=f"{name}, or leave it out")
    questions = recipe.evaluate
    if questions is not None:
        require("evaluate in a recipe", "lm_eval")
        from castor.recipes.evaluation import load_tasks

        load_tasks(questions, {"pretrained": recipe.output.dir})
    _check_model(recipe)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    _compare_versions(path, recipe, console)
    run = Path(recipe.output.dir)
    recipe, chosen = with_budgets(recipe, run)
    _check_place(run)
    if not dry_run:
        _check_run(run, recipe)
        if (run / _STATE).is_file():
            steps = json.loads((run / _STATE).read_text(encoding="utf-8"))["global_step"]
            console.print(
                f"[bold]castor train:[/bold] {escape(str(run))} is finished after {steps} steps; "
                "another output.dir trains again"
            )
            return 0
    if chosen is not None:
        console.print(f"[bold]castor train:[/bold] memory: {escape(chosen)}")
    prepared = _prepare(recipe, load_tokenizer(recipe))
    if dry_run:
        lines, fits = make_plan(recipe, prepared)
        Console(highlight=False, soft_wrap=True).print(escape("\n".join(lines)))
        return 0 if fits else 1
    _write_recipe(run, recipe)
    resumed = last_checkpoint(run, remove_incomplete=True)
    if resumed is not None:
        console.print(f"[bold]castor train:[/bold] goes on from {escape(str(resumed))}")
    from castor import launch

    status = launch.run(
        "castor.recipes.train",
        [str(run / RECIPE)],
        RunOptions(nproc=recipe.parallel.nproc),
        module=True,
        settings=recipe.memory,
    )
    if status == 0 and questions is not None:
        from castor.recipes.evaluate import evaluate_and_write
        from castor.recipes.models import without_training

        settings = without_training(recipe.memory)
        evaluate_and_write(run, questions, settings=settings, output=run / EVALUATIONS)
    return status


def load_tokenizer(recipe: Recipe) -> Any:
    """Returns the recipe's tokenizer, with its chat template.

    Raises:
        UsageError: There is none, it can mark no padding, or it has more tokens than the model.
    """
    from transformers import AutoConfig, AutoTokenizer

    name = recipe.model.tokenizer or recipe.model.path
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{name} has no tokenizer that transformers can read; give model.tokenizer "
            f"({str(error).splitlines()[0]})"
        ) from error
    if recipe.data.chat_template is not None:
        tokenizer.chat_template = Path(recipe.data.chat_template).read_text(encoding="utf-8")
    _check_template(tokenizer, recipe.data.chat_template or f"the chat template of {name}")
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise UsageError(
                f"the tokenizer of {name} has neither a pad_token nor an eos_token; give one of "
                "them in its tokenizer_config.json"
            )
        tokenizer.pad_token = tokenizer.eos_token
    try:
        config = AutoConfig.from_pretrained(recipe.model.path).get_text_config()
    except ValueError as error:
        raise UsageError(
            f"transformers {version('transformers')} has no model of the config of "
            f"{recipe.model.path}: {str(error).split('. ')[0]}"
        ) from error
    if len(tokenizer) > config.vocab_size:
        raise UsageError(
            f"the tokenizer of {name} has {len(tokenizer):,} tokens, and the model "
            f"{recipe.model.path} embeds {config.vocab_size:,}; give the tokenizer that belongs to "
            "the model"
        )
    return tokenizer


def _check_template(tokenizer: Any, name: str) -> None:
    """Raises UsageError for a chat template that is no Jinja, with its line."""
    import jinja2
    from transformers.utils import chat_template_utils

    if isinstance(tokenizer.chat_template, str):
        try:
            chat_template_utils._compile_jinja_template(tokenizer.chat_template)
        except jinja2.TemplateSyntaxError as error:
            raise UsageError(
                f"{name}, line {error.lineno}: the chat template is no Jinja: {error.message}"
            ) from error


def _check_model(recipe: Recipe) -> None:
    """Checks that the model's folder holds what the method trains."""
    path = recipe.model.path
    if (Path(path) / _ADAPTER_FILE).is_file():
        raise UsageError(
            f"{path} holds an adapter, and a recipe begins with a whole model: merge the adapter, "
            "or give its base"
        )
    from castor.recipes.models import read_json

    config = read_json(find_config(path))
    names = config.get("architectures") or []
    if recipe.method.name != "reward" and not any(
        name.endswith(_CAUSAL) for name in map(str, names)
    ):
        has = f"names {names[0]}" if names else "names no architecture"
        raise UsageError(
            f"{find_config(path)} {has}, and {recipe.method.name} trains a model that generates "
            "text, such as LlamaForCausalLM; give a model with a language head"
        )
    if config.get("quantization_config"):
        raise UsageError(
            f"{path} is quantised already; give the model in 16 or 32 bits, which adapter: qlora "
            "quantises itself"
        )
    if Path(path).is_dir() and not recipe.model.random_weights:
        _check_weights(Path(path))
    if recipe.method.lora is not None:
        _check_adapters(recipe)


def _check_weights(folder: Path) -> None:
    """Checks that a folder has weights, and that files of safetensors are whole.

    Raises:
        UsageError: There are none.
        CheckpointError: A file is cut off or damaged.
    """
    from castor.checkpoint.container import read_header

    files = [*folder.glob("*.safetensors"), *folder.glob("*.bin")]
    if not files:
        raise UsageError(
            f"{folder} holds no weights; give the folder of a whole model, or model.random_weights "
            "to pretrain from nothing"
        )
    for file in files:
        if file.suffix == ".safetensors":
            read_header(file)


def _check_adapters(recipe: Recipe) -> None:
    """Checks that the model has the layers that adapters are for.

    Raises:
        UsageError: It has not, or PEFT refuses the arguments of its LoraConfig.
    """
    import torch

    from castor.estimate.adapters import add_adapters
    from castor.estimate.model import build

    assert recipe.method.lora is not None
    options = recipe.method.lora.model_dump()
    model = build(find_config(recipe.model.path), dtype=torch.bfloat16)
    try:
        add_adapters(model, options.pop("r"), options, four_bit_base=False)
    except ValueError as error:
        raise UsageError(
            f"method.lora.target_modules is {recipe.method.lora.target_modules!r}, and PEFT "
            f"refuses that for {recipe.model.path}: {str(error).split('. ')[0].rstrip('.')}; "
            "all-linear takes all linear layers"
        ) from error


def _compare_versions(path: Path, recipe: Recipe, console: Console) -> None:
    installed = versions(_LIBRARIES)
    for name, made_with in recipe.versions.items():
        now = installed.get(name, "none")
        if now != made_with:
            console.print(
                f"[yellow]castor train: warning:[/yellow] {escape(str(path))} was made with {name} "
                f"{made_with}, and {now} is installed; losses may differ in their last digits"
            )


def _check_place(run: Path) -> None:
    """Raises UsageError if no run can be written to a folder."""
    there = next(one for one in (run, *run.parents) if one.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)):
        raise UsageError(
            f"output.dir is {run}, and {there} is no folder that can be written; give another one"
        )


def _check_run(run: Path, recipe: Recipe) -> None:
    """Checks that a run in the output folder is one of this recipe.

    Raises:
        UsageError: It is another one, or no run of castor train.
    """
    kept = run / RECIPE
    if not kept.is_file():
        if any(run.glob("checkpoint-*")):
            raise UsageError(
                f"{run} holds checkpoints and no {RECIPE}, so that castor train cannot tell what "
                "trained them; give another output.dir"
            )
        return
    before, now = (
        one.model_dump(mode="json", include=set(_CONTINUED)) for one in (load(kept), recipe)
    )
    different = next(_differences(before, now), None)
    if different is not None:
        name, old, new = different
        raise UsageError(
            f"{run} holds a run with {name}: {old}, and the recipe says {new}; give another "
            "output.dir, or the same setting to go on with the run"
        )


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Any:
    """Yields name and both values of each setting that differs."""
    for name in {**before, **now}:
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from ((f"{name}.{inner}", a, b) for inner, a, b in _differences(old, new))
        elif old != new:
            yield name, old, new


def _write_recipe(run: Path, recipe: Recipe) -> None:
    from castor.checkpoint.files import write_file

    run.mkdir(parents=True, exist_ok=True)
    made = recipe.model_copy(update={"versions": versions(_LIBRARIES)})
    write_file(run / RECIPE, [dump(made).encode()])


def last_checkpoint(run: Path, *, remove_incomplete: bool = False) -> Path | None:
    """Returns the complete checkpoint of a run with the most steps; None: there is none.

    Args:
        run: Folder of the run.
        remove_incomplete: Whether checkpoints are removed that a killed process left half-written.
    """
    last = None
    for checkpoint in checkpoints(run):
        try:
            json.loads((checkpoint / _STATE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            if remove_incomplete:
                shutil.rmtree(checkpoint)
            continue
        last = checkpoint
    return last


def _prepare(recipe: Recipe, tokenizer: Any) -> Prepared:
    from castor.recipes.data.prepare import prepare

    return prepare(recipe.data, tokenizer, method=recipe.method.name)


def make_plan(recipe: Recipe, prepared: Prepared) -> tuple[list[str], bool]:
    """Counts the work of a recipe and predicts the memory of its step.

    Args:
        recipe: A resolved recipe.
        prepared: Its data.

    Returns:
        The lines to print, and whether the budgets hold a step.

    Raises:
        ValueError: The model's step cannot be predicted; see castor.estimate.
    """
    from castor.estimate.estimator import Estimator
    from castor.estimate.machine import machine
    from castor.estimate.workload import Workload
    from castor.plugins import GeminiPlugin

    train, method = recipe.train, recipe.method
    model = find_config(recipe.model.path)
    positions, length = most_tokens(model), recipe.data.max_length
    if positions is not None and length > positions:
        raise ValueError(
            f"data.max_length is {length}, and the model's config names at most {positions} tokens "
            "of a sample; lower it to that"
        )
    config = GeminiPlugin(**recipe.memory).config
    activations: Any = config.activations
    pairs = method.name in OF_PAIRS
    batch = train.batch_size * (2 if pairs else 1)
    packs = recipe.data.packing
    # The longest batch that can come: rows are padded to the longest of their batch.
    longest = prepared.num_tokens if packs else max(prepared.lengths)
    lora = {} if method.lora is None else method.lora.model_dump(exclude={"r"})
    workload = Workload(
        batch=batch,
        sequence=max(min(length, longest), 2),
        precision=config.precision,
        state_format=config.optim_state_format
        or ("split" if config.precision == "bf16" else "fp32"),
        activations=activations if activations in ("keep", "recompute", "offload") else "auto",
        overlap="none" if config.overlap == "none" else "forward",
        max_prefetch=config.max_prefetch,
        gather_embeddings=config.gather_embeddings,
        lora_rank=None if method.lora is None else method.lora.r,
        lora=lora,
        four_bit_base=method.adapter == "qlora",
        masked=packs or batch > 1,
    )
    # Speeds decide nothing about memory; the plan says nothing about time.
    on = machine(
        "cpu" if config.device == "cpu" else None,
        precision=config.precision,
        device_memory=config.device_bytes,
        host_memory=config.host_bytes,
        h2d="25GB/s",
        dram="60GB/s",
        flops="70T",
        nvme="3GB/s" if config.nvme_paths else None,
    )
    loss = None
    if method.name in ("sft", "dpo"):
        from castor.recipes.fused_loss import FusedLoss

        loss = FusedLoss
    found = Estimator(model, workload, loss=loss).estimate(on)
    unit, ranks = "pairs" if pairs else "sequences", recipe.parallel.nproc or 1
    rows, held_out = len(prepared.train), len(prepared.held_out or ())
    said = [
        f"parameters: {found.parameters:,}, of which {found.trained_parameters:,} train",
        f"data: {rows:,} {unit}, {prepared.num_tokens:,} tokens an epoch; {held_out:,} held out",
        f"steps: {num_steps(recipe, rows):,} of {train.batch_size} x "
        f"{train.gradient_accumulation} x {ranks} {unit} (batch x accumulation x ranks)",
        f"device: {_gib(found.device_bytes)} of a budget of {_gib(config.device_bytes)}",
        f"host: {_gib(found.host_bytes)} of a budget of {_gib(config.host_bytes)}",
    ]
    if found.nvme_bytes:
        said.append(f"NVMe: {_gib(found.nvme_bytes)}")
    if not found.fits:
        said += ["the budgets do not hold a step", *found.remedies]
    if method.name == "dpo" and method.lora is None:
        said.append("the reference model needs its weights besides")
    if method.name == "reward":
        said.append("the prediction has a language head in place of the score")
    said.append(
        f"output: {recipe.output.dir}, a checkpoint every {recipe.output.save_every:,} steps"
    )
    head = f"{method.name} ({method.adapter}) of {recipe.model.path}"
    return [head, *(f"  {line}" for line in said), "nothing was trained"], found.fits


def num_steps(recipe: Recipe, rows: int) -> int:
    """Returns the number of optimizer steps that the Trainer takes."""
    train = recipe.train
    if train.max_steps is not None:
        return train.max_steps
    of_rank = math.ceil(rows / (recipe.parallel.nproc or 1))
    batches = math.ceil(of_rank / train.batch_size)
    return math.ceil(train.epochs * math.ceil(batches / train.gradient_accumulation))


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


class Collator:
    """Pads tokenised rows on the right to the longest of a batch.

    Rows with `seq_lengths` are packed: they go without an attention mask, so that the model keeps
    documents apart by positions that begin again at 0.
    """

    def __init__(self, pad_token_id: int) -> None:
        self._pad = pad_token_id

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Returns tensors of shape (rows, longest), int64, and that the model keeps no cache."""
        import torch

        longest = max(len(row["input_ids"]) for row in rows)

        def padded(name: str, fill: int) -> torch.Tensor:
            return torch.tensor(
                [[*row[name], *[fill] * (longest - len(row[name]))] for row in rows]
            )

        batch: dict[str, Any] = {
            "input_ids": padded("input_ids", self._pad),
            "labels": padded("labels", IGNORED),
            "use_cache": False,  # a cache would switch the mask between packed documents off
        }
        if "seq_lengths" in rows[0]:
            batch["position_ids"] = torch.zeros_like(batch["input_ids"])
            for positions, row in zip(batch["position_ids"], rows, strict=True):
                apart = torch.cat([torch.arange(length) for length in row["seq_lengths"]])
                positions[: len(apart)] = apart
            # No document predicts the first token of the next one.
            batch["labels"][batch["position_ids"] == 0] = IGNORED
        else:
            lengths = torch.tensor([len(row["input_ids"]) for row in rows])
            batch["attention_mask"] = (torch.arange(longest) < lengths[:, None]).long()
        return batch


def fit(recipe: Recipe) -> signal.Signals | None:
    """Trains a recipe in this process, whose Trainers train with castor.

    Args:
        recipe: A resolved recipe.

    Returns:
        The signal that ended the run after a checkpoint; None: the run is finished.

    Raises:
        UsageError: `castor run` has not entered the Trainers of this process.
    """
    import transformers

    from castor.integrations.common import OnCastor
    from castor.recipes.progress import Reporter

    if not issubclass(transformers.Trainer, OnCastor):
        raise UsageError(
            "castor.recipes.train trains in the process that castor train starts: castor train "
            "recipe.yaml; parallel.nproc starts several"
        )
    transformers.set_seed(recipe.train.seed)
    trainer = make_trainer(recipe)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    stop = _stopper(console)
    trainer.add_callback(stop)
    run = Path(recipe.output.dir)
    reporter = Reporter(run / LOG, Console(highlight=False, soft_wrap=True))
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.add_callback(reporter)
    trainer.add_callback(_token_count(trainer))
    resumed = last_checkpoint(run)
    try:
        trainer.train(resume_from_checkpoint=None if resumed is None else str(resumed))
    finally:
        reporter.close()
    if stop.asked is not None and trainer.state.global_step < trainer.state.max_steps:
        asked: signal.Signals = stop.asked
        return asked
    trainer.save_model()
    trainer.save_state()
    return None


def _token_count(trainer: Any) -> Any:
    """Returns a callback with which the count of trained tokens goes on behind a resume.

    TRL 1.16 keeps it in the process, and no checkpoint has it.
    """
    from transformers import TrainerCallback

    class TokenCount(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            counts = [entry["num_tokens"] for entry in state.log_history if "num_tokens" in entry]
            if counts:
                trainer._total_train_tokens = int(counts[-1])

    return TokenCount()


def make_trainer(recipe: Recipe) -> Any:
    """Returns the Trainer of a recipe, with its model and data."""
    tokenizer = load_tokenizer(recipe)
    prepared = _prepare(recipe, tokenizer)
    method = recipe.method
    held_out = (
        prepared.held_out if prepared.held_out is not None and len(prepared.held_out) else None
    )
    common: dict[str, Any] = {
        "train_dataset": prepared.train,
        "eval_dataset": held_out,
        "processing_class": tokenizer,
    }
    arguments = _arguments(recipe, evaluates=held_out is not None)
    if method.name == "pretrain":
        return _pretrainer(recipe, tokenizer, arguments, common)
    import trl

    arguments["model_init_kwargs"] = _loading(recipe)
    common |= {
        "model": recipe.model.path,
        "peft_config": _adapters(recipe),
        "quantization_config": _four_bits(recipe),
    }
    if method.name == "sft":
        # The rows are tokenised, cut and packed already.
        ready = {"dataset_kwargs": {"skip_prepare_dataset": True}, "max_length": None}
        return trl.SFTTrainer(
            args=trl.SFTConfig(**arguments, **ready, remove_unused_columns=False),
            data_collator=Collator(tokenizer.pad_token_id),
            **common,
        )
    arguments["max_length"] = recipe.data.max_length
    if method.name == "dpo":
        return trl.DPOTrainer(args=trl.DPOConfig(**arguments, beta=method.beta), **common)
    return trl.RewardTrainer(args=trl.RewardConfig(**arguments), **common)


def _pretrainer(
    recipe: Recipe, tokenizer: Any, arguments: dict[str, Any], common: dict[str, Any]
) -> Any:
    import transformers

    path = recipe.model.path
    model: Any
    if recipe.model.random_weights:
        config = transformers.AutoConfig.from_pretrained(path)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype="float32")
    else:
        four_bits = _four_bits(recipe)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path,
            **_loading(recipe),
            **({} if four_bits is None else {"quantization_config": four_bits}),
        )
    adapters = _adapters(recipe)
    if adapters is not None:
        import peft

        model = peft.get_peft_model(model, adapters)
    return transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(**arguments, remove_unused_columns=False),
        data_collator=Collator(tokenizer.pad_token_id),
        **common,
    )


def _arguments(recipe: Recipe, *, evaluates: bool) -> dict[str, Any]:
    """Returns the TrainingArguments that all methods share."""
    import torch
    from transformers import TrainingArguments

    train, precision = recipe.train, recipe.memory["precision"]
    warmup: float = train.warmup
    strategy = "no"
    if evaluates:
        strategy = "epoch" if train.evaluate_every is None else "steps"
    device = str(recipe.memory.get("device") or "")
    # transformers 5.24 renamed it; TRL switches it on by default under either name.
    renamed = "activation_checkpointing" in TrainingArguments.__dataclass_fields__
    checkpointing = "activation_checkpointing" if renamed else "gradient_checkpointing"
    return {
        "output_dir": recipe.output.dir,
        "num_train_epochs": train.epochs,
        "max_steps": train.max_steps or -1,
        "per_device_train_batch_size": train.batch_size,
        "per_device_eval_batch_size": train.batch_size,
        "gradient_accumulation_steps": train.gradient_accumulation,
        "learning_rate": train.learning_rate,
        "lr_scheduler_type": train.scheduler,
        "warmup_steps": int(warmup) if warmup >= 1 else warmup,
        "weight_decay": train.weight_decay,
        "adam_beta1": train.betas[0],
        "adam_beta2": train.betas[1],
        "max_grad_norm": train.max_grad_norm,
        "seed": train.seed,
        "bf16": precision == "bf16",
        "fp16": precision == "fp16",
        "use_cpu": device.startswith("cpu") or not torch.cuda.is_available(),
        checkpointing: False,  # memory.activations decides
        "logging_steps": recipe.log.every,
        "disable_tqdm": True,  # castor.recipes.progress tells of the steps
        "report_to": list(recipe.log.to),
        "eval_strategy": strategy,
        "eval_steps": train.evaluate_every if strategy == "steps" else None,
        "prediction_loss_only": recipe.method.name in ("sft", "pretrain"),
        "save_strategy": "steps",
        "save_steps": recipe.output.save_every,
        "save_total_limit": recipe.output.keep,
    }


def _loading(recipe: Recipe) -> dict[str, Any]:
    """Returns from_pretrained's arguments: castor places the weights and makes the precision."""
    return {
        "dtype": "float32" if recipe.memory["precision"] == "fp32" else "auto",
        "device_map": "cpu" if recipe.method.adapter == "qlora" else None,
    }


def _four_bits(recipe: Recipe) -> Any:
    """Returns how bitsandbytes quantises the model; None: it does not."""
    if recipe.method.adapter != "qlora":
        return None
    import torch
    from transformers import BitsAndBytesConfig

    precisions = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=precisions[recipe.memory["precision"]],
    )


def _adapters(recipe: Recipe) -> Any:
    """Returns PEFT's configuration of the adapters; None: all weights train."""
    if recipe.method.lora is None:
        return None
    from peft import LoraConfig

    task = "SEQ_CLS" if recipe.method.name == "reward" else "CAUSAL_LM"
    return LoraConfig(task_type=task, **recipe.method.lora.model_dump())


def _stopper(console: Console) -> Any:
    """Returns a callback that saves a checkpoint and ends the run after SIGTERM or Ctrl-C.

    A second Ctrl-C ends the run at once. It watches a run of one process alone: ranks would see
    the signal in different steps.
    """
    from transformers import TrainerCallback

    class Stopper(TrainerCallback):
        asked: signal.Signals | None = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if args.world_size == 1:
                for number in (signal.SIGTERM, signal.SIGINT):
                    signal.signal(number, self._ask)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if self.asked is not None:
                control.should_save = control.should_training_stop = True

        def _ask(self, number: int, _: Any) -> None:
            self.asked = signal.Signals(number)
            if self.asked is signal.SIGINT:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                console.print(
                    "[bold]castor train:[/bold] ends after this step, with a checkpoint; Ctrl-C "
                    "again ends it at once"
                )

    return Stopper()


def main() -> None:
    """Trains the recipe of the command line, in a process that castor train has started."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    # PEFT 0.21 asks transformers 5.24 by the old name.
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is", FutureWarning)
    try:
        ended = fit(load(sys.argv[1]))
    except Error as error:
        console.print(f"[red]castor: error:[/red] {escape(str(error))}")
        sys.exit(1)
    except KeyboardInterrupt:
        console.print(
            "[bold]castor train:[/bold] SIGINT: the same command goes on from the last checkpoint"
        )
        sys.exit(128 + signal.SIGINT)
    if ended is not None:
        console.print(
            f"[bold]castor train:[/bold] {ended.name}: a checkpoint was saved; the same command "
            "goes on"
        )
        sys.exit(128 + ended)


if __name__ == "__main__":
    main()
