"""What tests of expert parallelism run on several ranks: `python expert_cases.py NAME DIRECTORY`.

As in tensor_cases: a scenario is a function of the directory that the ranks share.
"""

import functools
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
import transformers as hf
from torch import distributed, nn

import castor
import grids
import pipeline_cases
from castor.distributed.expert_exchange import Routes
from castor.runtime.parallel_dims import ParallelDims
from helpers import Boosted
from tensor_cases import (
    EXPERTS,
    FAMILIES,
    LR,
    MAX_NORM,
    STEPS,
    boost,
    decoder,
    die,
    half_of,
    of_all,
    said,
    say_who_died,
    write,
    write_own,
)
from zoo import Batch, Case

EXPERT_SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {}, "layers too": {"size": 2}, "recompute": {"activations": "recompute"},
    "lazy": {"lazy": True}, "forward": {"overlap": "forward"}, "sequences too": {"sp_size": 2},
}  # fmt: skip
"""With two ranks that divide experts."""
BUDGETS = ("tight", "NVMe")
SOME_SETTINGS = {
    2: grids.some((*EXPERT_SETTINGS, *BUDGETS), "plain", "recompute", "lazy", "forward", *BUDGETS),
    4: grids.some((*EXPERT_SETTINGS, *BUDGETS), "plain", "layers too", "sequences too"),
}
SOME_EXPERTS = {
    2: grids.some(EXPERTS, "mixtral", "gpt_oss", "router_loss", "grouped"),
    3: grids.some(EXPERTS, "qwen2_moe"),  # four experts
    4: grids.some(EXPERTS, "qwen3_moe"),  # six
}
"""Families by the number of ranks."""


def batch_of(case: Case, step: int, who: int, of: int, *, uneven: bool = True) -> Batch:
    """A step's batch of one of several; uneven: of other rows and lengths than the others'."""
    given = case.batch(step * of + who)
    if uneven:
        given = {key: x[: 2 - who % 2, : x.shape[1] - 2 * who] for key, x in given.items()}
    return given


@functools.cache
def alone(
    case: Case, of: int, steps: int = STEPS, *, uneven: bool = True, first: int = 0
) -> list[list[float]]:
    """Losses of plain PyTorch, of each step's micro-batches: those of the ranks."""
    model = case.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    losses = []
    for step in range(first, first + steps):
        mine = []
        for who in range(of):
            given = batch_of(case, step, who, of, uneven=uneven)
            loss = case.loss(model(**given), given)
            (loss / of).backward()
            mine.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mine)
    return losses


def train(
    case: Case, boosted: Boosted, who: int, of: int, first: int = 0, steps: int = STEPS,
    *, uneven: bool = True,
) -> list[list[float]]:  # fmt: skip
    """Losses of all ranks, of each step."""
    losses = []
    for step in range(first, first + steps):
        given = batch_of(case, step, who, of, uneven=uneven)
        losses.append(boosted.step(case.loss(boosted.model(**given), given)))
    return [list(of_step) for of_step in zip(*of_all(losses), strict=True)]


def place(experts: int, sharing: int = 1) -> tuple[int, int]:
    """Whose data are this rank's, of how many."""
    replica = ParallelDims.of_one_replica(ep=experts, pp=sharing)
    return castor.distributed.data_rank_and_size(replica)


def experts(directory: Path) -> None:
    """Losses of families whose experts are divided, and the part of its parameters a rank has."""
    size, rank, found = distributed.get_world_size(), distributed.get_rank(), {}
    for name, case in SOME_EXPERTS[size].items():
        boosted = boost(case, ep_size=size)
        losses = train(case, boosted, rank, size)
        own = sum(param.numel() for param in boosted.model.parameters())
        found[name] = [losses, own]
        report = boosted.report()
        assert (report.rank, report.ranks) == (rank, size)
    write(directory, "experts", found)


def expert_settings(directory: Path) -> None:
    """Losses of Mixtral with settings, copies of the model, files."""
    case, found = EXPERTS["mixtral"], {}
    size = distributed.get_world_size()
    for name, given in EXPERT_SETTINGS.items():
        sharing = 2 if given.keys() & {"size", "sp_size"} else 1
        if name not in SOME_SETTINGS[size] or size % (4 if "sp_size" in given else 2):
            continue
        boosted = boost(case, **{"ep_size": 2} | given)  # type: ignore[arg-type]
        who, of = place(1 if "size" in given else 2, sharing)
        found[name] = [of, train(case, boosted, who, of, uneven="sp_size" not in given)]
    who, of = place(2)
    ample = boost(case, ep_size=2)
    train(case, ample, who, of, 0, 3)
    tight = half_of(ample)
    for name, given in {
        "tight": {"device_memory": tight},
        "NVMe": {"device_memory": tight, "nvme_path": directory, "nvme_offload_fraction": 1.0},
    }.items():
        if name not in SOME_SETTINGS[size]:
            continue
        boosted = boost(case, ep_size=2, **given)  # type: ignore[arg-type]
        found[name] = [of, train(case, boosted, who, of)]
        assert boosted.report().peak_device_bytes <= tight
    ample.booster.save(directory / "run", ample.model, ample.optimizer)
    found["later"] = [of, train(case, ample, who, of, 3, 3)]
    again = boost(case, ep_size=2, lazy=True)
    again.booster.load(directory / "run", again.model, again.optimizer)
    assert train(case, again, who, of, 3, 3) == found["later"][1]
    loader = ample.booster.plugin.prepare_dataloader(list(range(2 * of)), 2)
    found["data"] = of_all([batch.tolist() for batch in loader])
    write(directory, "expert_settings", found)


def unchosen_experts(directory: Path) -> None:
    """Steps over one token, which chooses one expert: the other rank's get none."""
    case = decoder("one", hf.MixtralConfig, num_local_experts=4, num_experts_per_tok=1)

    def decaying(params: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=0.01, weight_decay=0.5)

    boosted, model = boost(case, ep_size=2, optimizer=decaying), case.model()
    optimizer = decaying(model.parameters())
    ids = case.batch(0)["input_ids"]
    found = []
    for step in range(4):
        given = {"input_ids": ids[:1, step : step + 2], "labels": ids[:1, step : step + 2]}
        given["attention_mask"] = torch.ones_like(given["input_ids"])
        loss = model(**given).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        found.append([boosted.step(boosted.model(**given).loss), loss.item()])
    far, divided = 0.0, cast("Any", boosted.model)
    for mine, whole in zip(divided.model.layers, model.model.layers, strict=True):
        theirs = whole.mlp.experts.down_proj.detach().chunk(2)[distributed.get_rank()]
        far = max(far, (mine.mlp.experts.down_proj.detach() - theirs).abs().max().item())
    found.append([max(of_all(far)), 0.0])
    write(directory, "unchosen_experts", found)


class Branched(nn.Module):
    """A mixture of which some batches use a part that others do not."""

    def __init__(self) -> None:
        super().__init__()
        self.mixture: Any = EXPERTS["mixtral"].model()
        self.branch = nn.Linear(1, 1)
        self.never = nn.Linear(1, 1)

    def forward(self, *, branch: bool, **given: Any) -> torch.Tensor:
        loss: torch.Tensor = self.mixture(**given).loss
        given_loss = loss.reshape(1, 1).to(self.branch.weight.dtype)
        return loss + self.branch(given_loss).float().sum() if branch else loss


def branches(directory: Path) -> None:
    """Steps in which some ranks have no gradient of a part, in several precisions."""
    case, found = Case("branched", Branched, EXPERTS["mixtral"].batch), {}
    who, of = place(2)

    def uses(step: int, rank: int) -> bool:
        return step < 3 and rank == step % of

    settings: dict[str, dict[str, Any]] = {
        "fp32": {}, "fp16": {"precision": "fp16", "initial_scale": 2.0**24},
        "bf16": {"precision": "bf16"},
        "NVMe": {"nvme_path": directory, "nvme_offload_fraction": 1.0, "nvme_memory": "64MiB"},
    }  # fmt: skip
    if distributed.get_world_size() == 4:
        settings = grids.some(settings, "fp32", "fp16")
    for name, given in settings.items():
        boosted = boost(case, ep_size=2, **given)
        losses = []
        for step in range(5):
            batch = batch_of(case, step, who, of)
            losses.append(boosted.step(boosted.model(branch=uses(step, who), **batch)))
        report = boosted.report()
        whole = {name: param.detach().double().sum().item()
                 for name, param in boosted.model.named_parameters()
                 if ".experts." not in name}  # fmt: skip
        ends = of_all([report.skipped_steps, repr(report.gradient_norm), whole])
        assert ends == [ends[0]] * len(ends), name
        found[name] = [of_all(losses), report.skipped_steps]
    if distributed.get_rank() > 0:
        return
    model = case.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    plain = []
    for step in range(5):
        mine = [model(branch=uses(step, rank), **batch_of(case, step, rank, of))
                for rank in range(of)]  # fmt: skip
        (torch.stack(mine).sum() / of).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        plain.append([loss.item() for loss in mine])
    found["plain"] = [[list(one) for one in zip(*plain, strict=True)], 0]
    write(directory, "branches", found)


def accumulated(directory: Path) -> None:
    """Two micro-batches a rank, of which the first is not synchronised.

    Of all parameters, of all but routers and embeddings, and with blocks that torch runs again.
    """
    case, found = EXPERTS["mixtral"], {}
    who, of = place(2)

    def micro(step: int, rank: int, number: int) -> Batch:
        return batch_of(case, 2 * step + number, rank, of)

    def trained(model: nn.Module) -> nn.Module:
        for name, param in model.named_parameters():
            param.requires_grad_("gate.weight" not in name and "embed" not in name)
        return model

    frozen = Case("frozen", lambda: trained(case.model()), case.batch)
    checkpointed = Case("again", lambda: case.model(checkpointing=True), case.batch)
    kinds = {"all": case, "frozen": frozen, "checkpointed": checkpointed}
    if distributed.get_world_size() == 4:
        kinds = grids.some(kinds, "all")
    for name, kind in kinds.items():
        boosted, losses = boost(kind, ep_size=2), []
        for step in range(STEPS):
            first, second = micro(step, who, 0), micro(step, who, 1)
            with boosted.booster.no_sync(boosted.model, boosted.optimizer):
                loss = kind.loss(boosted.model(**first), first)
                boosted.booster.backward(loss / 2, boosted.optimizer)
            losses.append(loss.item())
            loss = kind.loss(boosted.model(**second), second)
            boosted.booster.backward(loss / 2, boosted.optimizer)
            boosted.optimizer.step()
            boosted.optimizer.zero_grad()
            losses.append(loss.item())
        found[name] = [of_all(losses)]
        if distributed.get_rank() > 0:
            continue
        model = kind.model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
        plain: list[list[float]] = [[] for _ in range(of)]
        for step in range(STEPS):
            for rank in range(of):
                for number in range(2):
                    given = micro(step, rank, number)
                    loss = kind.loss(model(**given), given)
                    (loss / 2 / of).backward()
                    plain[rank].append(loss.item())
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
        found[name].append(plain)
    write(directory, "accumulated", found)


STAGED = decoder(
    "staged", hf.MixtralConfig, num_hidden_layers=4, num_local_experts=4, num_experts_per_tok=2,
    output_router_logits=True, router_aux_loss_coef=0.1,
)  # fmt: skip
STYLES: dict[str, dict[str, Any]] = grids.some({
    "1f1b": {}, "gpipe": {"pp_style": "gpipe", "activations": "recompute"},
    "interleaved": {"pp_style": "interleaved", "num_model_chunks": 2},
    "zbv": {"pp_style": "zbv", "num_model_chunks": 2},
}, "gpipe", "zbv")  # fmt: skip


def staged(directory: Path) -> None:
    """Two stages, two parts of the experts of each, other batches in each pipeline."""
    who, _ = place(2, 2)
    found: dict[str, Any] = {}
    for style, given in STYLES.items():
        boosted = pipeline_cases.boost(STAGED, ep_size=2, **given)
        losses = []
        for step in range(STEPS):
            data = iter([pipeline_cases.batch(STAGED, 2 * step + who)])
            done = boosted.booster.execute_pipeline(data, boosted.model, None, boosted.optimizer)
            boosted.optimizer.step()
            boosted.optimizer.zero_grad()
            losses.append(done["loss"].item())
        found[style] = of_all(losses)
    ids = STAGED.batch(who)["input_ids"]
    generated = cast("Any", boosted.model).generate(
        ids, max_new_tokens=3 + 4 * who, do_sample=False, pad_token_id=0, output_router_logits=False
    )
    found["generated"] = of_all(generated.shape[1] - ids.shape[1])
    if distributed.get_rank() > 0:
        return
    count = pipeline_cases.MICROBATCHES
    model = STAGED.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    plain: list[list[float]] = [[], []]
    for step in range(STEPS):
        for rank in range(2):
            whole, total = pipeline_cases.batch(STAGED, 2 * step + rank), 0.0
            for i in range(count):
                loss = model(**{key: x.chunk(count)[i] for key, x in whole.items()}).loss / count
                (loss / 2).backward()
                total += loss.item()
            plain[rank].append(total)
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    found["plain"] = plain
    write(directory, "staged", found)


def pipelines_apart(directory: Path) -> None:
    """One pipeline has more micro-batches than the other."""
    who, _ = place(2, 2)
    boosted = pipeline_cases.boost(STAGED, ep_size=2, num_microbatches=None, microbatch_size=2)
    data = iter([pipeline_cases.batch(STAGED, 0, 8 if who else 4)])

    def work() -> None:
        boosted.booster.execute_pipeline(data, boosted.model, None, boosted.optimizer)
        boosted.optimizer.step()

    distributed.barrier()
    start = time.monotonic()
    found = [said(work), time.monotonic() - start]
    write_own(directory, "pipelines_apart", found)
    sys.stdout.flush()
    os._exit(0)  # the stages have let go of each other


def exchanged_bytes(directory: Path) -> None:
    """What goes from rank to rank at the experts in a step, and what the formula says."""
    case = EXPERTS["mixtral"]
    boosted = boost(case, ep_size=2, activations="keep")
    rank, size = distributed.get_rank(), 2
    rooms: list[int] = []
    sent = [0]
    exchanged = Routes._all_to_all

    def counting(routes: Routes, given: Any) -> list[torch.Tensor]:
        rooms.append(routes.room)
        sent[0] += sum(one.nbytes for one in given) * (size - 1) // size
        return exchanged(routes, given)

    Routes._all_to_all = counting  # type: ignore[method-assign]
    train(case, boosted, rank, size, 0, 1)
    config = cast("Any", boosted.model).config
    width, choices = config.hidden_size, config.num_experts_per_tok
    # Hidden states and routing weights there, outputs back; the same of their gradients, and the
    # numbers of experts.
    a_row = 4 * (4 * width + 2 * choices) + 4 * choices
    expected = sum(rooms) // 4 * (size - 1) * a_row
    write(directory, "exchanged_bytes", [sent[0], expected, len(rooms), max(rooms)])


def uses(directory: Path) -> None:
    """Generate with prompts and lengths of each rank's own, evaluation, training behind it."""
    case, found = EXPERTS["mixtral"], {}
    rank, size = distributed.get_rank(), distributed.get_world_size()
    boosted = boost(case, ep_size=size)
    model = cast("Any", case.model())
    for name, lengths, given in (
        ("greedy", (8, 2), {"do_sample": False}),
        ("beams", (1, 6), {"do_sample": False, "num_beams": 2}),
    ):
        ids = case.batch(rank)["input_ids"][:, : 6 + rank]
        options = {"max_new_tokens": lengths[rank], "pad_token_id": 0} | given
        mine = cast("Any", boosted.model).generate(ids, **options)
        theirs = model.generate(ids, **options)
        found[name] = of_all([mine.tolist(), theirs.tolist()])
    with torch.no_grad():
        batch = batch_of(case, 7, rank, size)
        mine = boosted.model(**batch).logits
        found["far"] = max(of_all((mine - model(**batch).logits).abs().max().item()))
    found["losses"] = train(case, boosted, rank, size, 0, 3)
    write(directory, "uses", found)


def apart(directory: Path) -> None:
    """What ranks hear that do other things than the others."""
    case, found = EXPERTS["mixtral"], {}
    rank = distributed.get_rank()
    boosted = boost(case, ep_size=2)
    batch = case.batch(rank)

    def backward() -> None:
        boosted.booster.backward(boosted.model(**batch).loss, boosted.optimizer)

    def forward() -> None:
        boosted.model(**batch)

    def evaluation() -> None:
        with torch.no_grad():
            forward()

    def step() -> None:
        boosted.optimizer.step()

    def save() -> None:
        boosted.booster.save_model(boosted.model, directory / "model")

    for name, works in {
        "evaluation": (evaluation, forward), "micro-batches": (forward, step),
        "epochs": (forward, save),
    }.items():  # fmt: skip
        backward()
        distributed.barrier()
        start = time.monotonic()
        found[name] = [said(works[rank]), time.monotonic() - start]
        boosted.optimizer.zero_grad()
        boosted = boost(case, ep_size=2)
    reduced = boost(case, ep_size=2, precision="fp16", initial_scale=4.0)
    loss = reduced.model(**batch).loss
    if rank:
        reduced.booster.backward(loss, reduced.optimizer)
    else:
        loss.backward()
    found["scales"] = [said(reduced.optimizer.step), 0.0]
    write_own(directory, "apart", found)


def one_dies(directory: Path) -> None:
    """Rank 1 is killed within a forward, or in generate; rank 0 says what it hears."""
    case = EXPERTS["mixtral"]
    boosted = boost(case, ep_size=2)
    rank = distributed.get_rank()
    train(case, boosted, rank, 2, 0, 1)
    if rank == 1:
        cast("Any", boosted.model).model.layers[1].register_forward_pre_hook(die)
    ids = case.batch(rank)["input_ids"]

    def work() -> None:
        if os.environ["PHASE"] == "generate":
            cast("Any", boosted.model).generate(ids, max_new_tokens=2, pad_token_id=0)
        else:
            boosted.model(input_ids=ids)

    say_who_died(directory, work)


def experts_refused(directory: Path) -> None:
    """What has no experts that can be divided."""
    mixtral = EXPERTS["mixtral"]
    found = {
        "none": said(lambda: boost(FAMILIES["llama"], ep_size=2)),
        "few": said(
            lambda: boost(decoder("one", hf.MixtralConfig, num_local_experts=1,
                                   num_experts_per_tok=1), ep_size=2)
        ),
        "list": said(lambda: boost(Case("mixture", Mixture, mixtral.batch), ep_size=2)),
        "ranks": said(lambda: boost(mixtral, ep_size=3)),
        "muon": said(
            lambda: boost(mixtral, ep_size=2, optimizer=lambda p: torch.optim.RMSprop(p, lr=0.1))
        ),
    }  # fmt: skip
    found["works"] = train(mixtral, boost(mixtral, ep_size=2), distributed.get_rank(), 2, 0, 1)
    write_own(directory, "experts_refused", found)


class Mixture(nn.Module):
    """Experts as modules of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))


if __name__ == "__main__":
    torch.set_num_threads(1)
    castor.launch_from_torch()
    globals()[sys.argv[1]](Path(sys.argv[2]))
    distributed.barrier()
