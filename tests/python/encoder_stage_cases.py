"""What tests of encoder-decoders in stages run on several ranks; as pipeline_cases.py."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import distributed, nn

import as_rank
import grids
from pipeline_cases import SCHEDULES, ZERO_BUBBLE, _train_on, batch, boost, train
from stage_call_cases import WAYS
from tensor_cases import of_all, said, save_and_go_on, write, write_own
from zoo import VOCABULARY, Batch, Case

STEPS = grids.steps(10)
SOURCE, TARGET = 20, 12
STYLES: dict[str, dict[str, Any]] = {
    "1f1b": {}, "gpipe": {"pp_style": "gpipe"}, "interleaved": SCHEDULES["interleaved"],
    "zbv": ZERO_BUBBLE,
}  # fmt: skip
CUTS: dict[str, dict[str, Any]] = {
    "in encoder": {"num_layers_per_stage": [2, 6]},
    "in decoder": {"num_layers_per_stage": [5, 3]},
    "between": {"num_layers_per_stage": [4, 4]},
}


def _sequences(seed: int) -> Batch:
    """Two pairs of other lengths; padding in one source and one target."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (2, SOURCE), generator=generator)
    labels = torch.randint(3, VOCABULARY, (2, TARGET), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, -4:] = 0
    labels[0, -3:] = labels[1, 2:5] = -100  # as many in each: a mean of means is the mean
    # The first tensor is none of the encoder's: sizes come by name.
    return {"labels": labels, "input_ids": ids, "attention_mask": mask}


def _family(name: str, config: type, **settings: Any) -> Case:
    common: dict[str, Any] = {
        "vocab_size": VOCABULARY, "d_model": 48, "d_ff": 96, "d_kv": 12, "num_layers": 4,
        "num_heads": 4, "dropout_rate": 0.0, "decoder_start_token_id": 0,
        "feed_forward_proj": "gated-gelu", "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 12,
    }  # fmt: skip
    return Case(
        name,
        lambda: hf.AutoModelForSeq2SeqLM.from_config(config(**common | settings)),
        _sequences,
    )


def _untied() -> nn.Module:
    """T5 v1.1: outputs that are not scaled, and an output embedding of its own."""
    model: Any = _family("", hf.T5Config, tie_word_embeddings=False).build()
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn((VOCABULARY, 48), generator=generator) * 0.05
    model.lm_head.weight = nn.Parameter(weight)
    return model  # type: ignore[no-any-return]


FAMILIES = {
    case.name: case
    for case in (
        _family("t5", hf.T5Config),
        Case("untied", _untied, _sequences),
        _family("mt5", hf.MT5Config),
        _family("umt5", hf.UMT5Config),
    )
}
T5 = FAMILIES["t5"]
SOME = grids.some(tuple(FAMILIES), "t5", "untied", "umt5")
TRAINED = grids.some(
    tuple(f"{name} {style}" for name in FAMILIES for style in STYLES),
    *("t5 1f1b", "untied zbv", "umt5 gpipe"),
)
"""Families and schedules; T5 goes through others as it is called."""
COMPOSED = grids.some(
    tuple(
        f"{name} {kind}"
        for name in ("t5", "untied")
        for kind in ("pp 4 1f1b", "pp 4 gpipe", *(f"tp 2 {style}" for style in STYLES), "dp 2")
    ),
    *("t5 pp 4 1f1b", "t5 tp 2 zbv", "t5 dp 2"),
)
LATER = grids.some(("pp 4", "tp 2"), "tp 2")
SAVED = grids.some(tuple(FAMILIES), "t5", "untied")
CALLED = grids.some(tuple(STYLES), "1f1b", "interleaved", "zbv")
UNEVEN = _family("uneven", hf.T5Config, num_layers=2, num_decoder_layers=6)
TALKING = _family("talking", hf.T5Config, initializer_factor=2.0)
"""Whose tokens are not all the same."""


def families(directory: Path) -> None:
    """Losses of every family in two stages by every schedule, and at every cut."""
    found: dict[str, Any] = {}
    for trained in TRAINED:
        name, style = trained.split()
        case = FAMILIES[name]
        boosted = boost(case, **STYLES[style])
        found[trained] = train(case, boosted, 0, STEPS)
        shares = of_all(sum(param.numel() for param in boosted.model.parameters()))
        found[f"{name} shares"] = sum(shares) / sum(p.numel() for p in case.model().parameters())
    for cut, given in CUTS.items():
        found[f"t5 {cut}"] = train(T5, boost(T5, **given), 0, STEPS)
    found["uneven"] = train(UNEVEN, boost(UNEVEN), 0, STEPS)
    write(directory, "families", found)


def composed(directory: Path) -> None:
    """On four ranks: four stages, and two with two copies or two parts of each layer."""
    rank, found = distributed.get_rank(), {}
    for key in COMPOSED:
        name, kind = key.split(" ", 1)
        case = FAMILIES[name]
        if kind != "dp 2":
            parts, _, style = kind.rpartition(" ")
            boosted = boost(case, **_divided(parts), **STYLES[style])
            found[key] = train(case, boosted, 0, STEPS)
            continue
        copies = boost(case)
        losses = []
        for seed in range(STEPS):
            half = {key: value[rank // 2 :: 2] for key, value in batch(case, seed).items()}
            losses += _train_on(copies, half)
        found[key] = torch.tensor(of_all(losses)).mean(0).tolist()
    for kind in LATER:
        boosted = boost(T5, **_divided(kind))
        train(T5, boosted, 0, 3)
        boosted.booster.save(directory / kind, boosted.model, boosted.optimizer)
        later = train(T5, boosted, 3, 2)
        again = boost(T5, lazy=True)  # of two stages, and two copies
        again.booster.load(directory / kind, again.model, again.optimizer)
        found[f"{kind} later"] = [later, train(T5, again, 3, 2)]
    found["pp 4 tokens"] = of_all(generate(boost(TALKING, pp_size=4).model))
    write(directory, "composed", found)


def _divided(kind: str) -> dict[str, Any]:
    """Settings of "pp 4" or "tp 2"."""
    what, number = kind.split()
    return {f"{what}_size": int(number)}


def saved(directory: Path) -> None:
    """Models and runs written in stages, and read; and one that a process alone has written."""
    found: dict[str, Any] = {}
    for name in SAVED:
        case = FAMILIES[name]
        make = functools.partial(boost, case)
        found[name] = save_and_go_on(directory, name, make, functools.partial(train, case))
    alone = boost(T5)
    alone.booster.load(directory / "alone", alone.model, alone.optimizer)
    found["alone"] = train(T5, alone, 3, 3)
    write(directory, "saved", found)


def prompts() -> Batch:
    """Two sources, one of them padded."""
    given = batch(T5, 0)
    return {name: given[name][:2] for name in ("input_ids", "attention_mask")}


def generate(model: Any, **how: Any) -> list[list[int]]:
    """Some tokens; they do not end early."""
    torch.manual_seed(3)
    model.eval()
    lengths = {"do_sample": False, "min_new_tokens": 7, "max_new_tokens": 7}
    tokens: torch.Tensor = model.generate(**prompts(), **lengths | how)
    return tokens.tolist()


def calls(directory: Path) -> None:
    """Evaluation through the schedule, calls without gradients, and tokens."""
    found: dict[str, Any] = {}
    for style in CALLED:
        given = STYLES[style]
        boosted = boost(T5, **given)
        boosted.model.eval()
        execute = boosted.booster.execute_pipeline
        with torch.no_grad():
            done = execute(iter([batch(T5, 0)]), boosted.model, return_outputs=True)
            outputs: Any = boosted.model(**batch(T5, 0))
            states = boosted.model.get_encoder()(**prompts()).last_hidden_state
        found[f"{style} evaluated"] = done["loss"].item()
        logits = done["outputs"] and torch.cat([one.logits for one in done["outputs"]]).tolist()
        found[f"{style} logits"] = next(one for one in of_all(logits) if one)
        found[f"{style} called"] = of_all([outputs.loss.item(), outputs.logits.tolist()])
        found[f"{style} encoded"] = of_all(states.tolist())
        talking = boost(TALKING, **given)
        for way, how in ways().items():
            if f"{style} {way}" in GENERATED:
                found[f"{style} {way}"] = of_all(generate(talking.model, **how))
        boosted.model.train()
        found[f"{style} trained"] = train(T5, boosted, 0, STEPS)
        # Two batches a step, of other lengths; what is shared counts once in the norm.
        for cut in (10, 8):
            short = {key: value[:, :cut].contiguous() for key, value in batch(T5, STEPS).items()}
            execute(iter([short]), boosted.model, None, boosted.optimizer)
        boosted.optimizer.step()
        found[f"{style} norm"] = boosted.report().gradient_norm
    write(directory, "calls", found)


def ways() -> dict[str, dict[str, Any]]:
    """Of generating, which an encoder-decoder has as well."""
    return {name: how for name, how in WAYS.items() if name != "in chunks"}


GENERATED = grids.some(
    tuple(f"{style} {way}" for style in STYLES for way in ways()),
    *(f"1f1b {way}" for way in ways()),
    *("interleaved beams", "zbv sampled"),
)


def refused(directory: Path) -> None:
    """What a rank says to what does not go, and that the model works afterwards."""
    boosted = boost(T5)
    whole = batch(T5, 0)

    def run(given: Any) -> str:
        execute = boosted.booster.execute_pipeline
        return said(lambda: execute(iter([given]), boosted.model, None, boosted.optimizer))

    def without_gradients(**given: Any) -> str:
        with torch.no_grad():
            return said(lambda: boosted.model(**given))

    def built(build: Callable[[], nn.Module]) -> str:
        return said(lambda: boost(Case("other", build, _sequences)))

    config: Any = T5.model().config
    longer = hf.LongT5Config(vocab_size=VOCABULARY, d_model=48, d_ff=96, d_kv=12, num_layers=2)
    bart = hf.BartConfig(vocab_size=VOCABULARY, d_model=48, encoder_layers=2, decoder_layers=2)
    found = {
        "longt5": built(lambda: hf.LongT5ForConditionalGeneration(longer)),
        "bart": built(lambda: hf.BartForConditionalGeneration(bart)),
        "model": built(lambda: hf.T5Model(config)),
        "questions": built(lambda: hf.T5ForQuestionAnswering(config)),
        "encoder": built(lambda: hf.T5EncoderModel(config)),
        "blocks": said(lambda: boost(T5, num_layers_per_stage=[4, 5])),
        "sequences": said(lambda: boost(T5, sp_size=2, pp_size=1)),
        "gradients": said(lambda: boosted.model(**whole)),
        "encoder gradients": said(
            lambda: boosted.model.get_encoder()(input_ids=whole["input_ids"])
        ),
        "outputs": run(whole | {"encoder_outputs": (torch.zeros(8, SOURCE, 48),)}),
        "no inputs": run({"labels": whole["labels"]}),
        "no decoder": run({"input_ids": whole["input_ids"]}),
        "called without": without_gradients(input_ids=whole["input_ids"]),
        "hidden": run(whole | {"output_hidden_states": True}),
        "inputs": run(batch(T5, distributed.get_rank())),
        "works": train(T5, boosted, 0, 1),
    }  # fmt: skip
    write_own(directory, "refused", found)


if __name__ == "__main__":
    as_rank.run(globals())
