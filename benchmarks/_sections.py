"""The sections of the benchmark page: what of each record is shown, and how."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from _plots import COLOURS, Bar, Bars, Line, Panel, inline

Record = dict[str, Any]
MIB = 1 << 20


def table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Text and numbers as an HTML table; the first column is text."""
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def bar(name: str, seconds: dict[str, float], index: int, scale: float = 1.0) -> Bar:
    """The median of a spread, and its quartiles, times `scale`."""
    return Bar(
        name=name,
        value=scale * seconds["median"],
        low=scale * seconds["lower_quartile"],
        high=scale * seconds["upper_quartile"],
        colour=COLOURS[index % len(COLOURS)],
    )


def ratio_rows(ratios: dict[str, Any]) -> list[list[str]]:
    """Name, median, quartiles, target and verdict of each ratio."""
    return [
        [
            name,
            f"{ratio['median']:.3f}",
            f"{ratio['lower_quartile']:.3f} to {ratio['upper_quartile']:.3f}",
            ratio.get("bar", ""),
            verdict(ratio["met"]) if "met" in ratio else "",
        ]
        for name, ratio in ratios.items()
    ]


def verdict(met: bool) -> str:
    return "met" if met else "missed"


RATIO_HEADINGS = ("paired within a run", "median", "quartiles", "target", "")


def step(record: Record) -> list[str]:
    results = record["results"].values()
    bars = [bar(result["name"], result["seconds"], i) for i, result in enumerate(results)]
    memory = [
        [
            result["name"],
            f"{result['peak_resident_bytes'] / MIB:.0f}",
            f"{device / MIB:.0f}" if (device := result.get("peak_device_bytes")) else "",
        ]
        for result in results
    ]
    return [
        inline(Bars(title="one training step, median and quartiles", unit="s", bars=bars)),
        table(RATIO_HEADINGS, ratio_rows(record["ratios"])),
        table(("peak of", "the process's resident MiB", "device MiB"), memory),
    ]


def sweep(record: Record) -> list[str]:
    return [*_budgets(record["budgets"]), *_sizes(record["sizes"])]


def _budgets(budgets: Record) -> list[str]:
    shares = {float(key): result for key, result in budgets.items() if key[0].isdigit()}
    x = list(shares)
    ratios = [result["over_plain"] for result in shares.values()]
    ample = budgets["ample"]["over_plain"]["median"]

    def of(key: str) -> list[float]:
        return [ratio[key] for ratio in ratios]

    times = Panel(
        title="step over plain PyTorch's by device budget",
        x_label="x of tight(x): share of the parameters' bytes beside the non-model peak",
        lines=[
            Line(name="median", colour=COLOURS[0], x=x, y=of("median")),
            Line(name="lower quartile", colour=COLOURS[5], x=x, y=of("lower_quartile")),
            Line(name="upper quartile", colour=COLOURS[5], x=x, y=of("upper_quartile")),
            Line(name="no limit", colour=COLOURS[2], x=[x[0], x[-1]], y=[ample] * 2, dashed=True),
        ],
    )
    rows = []
    for result in budgets.values():
        report = result["report"]
        row = [result["name"], f"{result['seconds']['median']:.3f}"]
        if "steps" in report:
            row += [
                f"{report['peak_device_bytes'] / MIB:.0f}",
                f"{report['h2d_bytes'] / report['steps'] / MIB:.0f}",
                f"{report['demand_fetches'] / report['steps']:.1f}",
            ]
        rows.append(row)
    headings = ("", "s a step", "peak device MiB", "fetched MiB a step", "demand fetches a step")
    return [inline(times), table(headings, rows)]


def _sizes(sized: Record) -> list[str]:
    sizes = sized["sizes"]
    x = [size["num_params"] / 1e6 for size in sizes]

    def seconds(key: str) -> list[float]:
        return [size["results"][key]["seconds"]["median"] for size in sizes]

    def report(key: str) -> list[float]:
        return [size["results"]["castor"]["report"][key] / MIB for size in sizes]

    names = [(value, f"{value:.0f} M") for value in x]
    about = f"device budget {sized['budget_bytes'] / MIB:.0f} MiB for all"
    times = Panel(
        title=f"seconds a step by model size, {about}",
        x_label="parameters",
        x_scale="log",
        y_scale="log",
        x_names=names,
        lines=[
            Line(name="castor", colour=COLOURS[0], x=x, y=seconds("castor")),
            Line(name="plain PyTorch", colour=COLOURS[1], x=x, y=seconds("plain")),
        ],
    )
    memory = Panel(
        title="memory by model size (MiB)",
        x_label="parameters",
        x_scale="log",
        y_scale="log",
        x_names=names,
        lines=[
            Line(name="castor, device", colour=COLOURS[0], x=x, y=report("peak_device_bytes")),
            Line(name="castor, host", colour=COLOURS[2], x=x, y=report("host_bytes")),
            Line(
                name="plain PyTorch",
                colour=COLOURS[1],
                x=x,
                y=[size["plain_bytes"] / MIB for size in sizes],
            ),
        ],
    )
    rows = [[name.replace("_", " "), f"{power:.2f}"] for name, power in sized["exponent"].items()]
    return [
        inline(times),
        inline(memory),
        table(("grows as a power of the number of parameters", "exponent"), rows),
    ]


def adam(record: Record) -> list[str]:
    bars = [
        bar(result["name"], result["seconds"], 0 if "castor" in result["name"] else 1, 1e3)
        for result in record["results"].values()
    ]
    title = f"Adam over {record['numel'] / 1e6:.0f}M parameters"
    return [
        inline(Bars(title=title, unit="ms", bars=bars)),
        table(RATIO_HEADINGS, ratio_rows(record["ratios"])),
    ]


def planner(record: Record) -> list[str]:
    lines = []
    for i, result in enumerate(record["results"]):
        points = result["points"]
        lines.append(
            Line(
                name=result["name"],
                colour=COLOURS[i % len(COLOURS)],
                x=[point["accesses"] for point in points],
                y=[point["seconds"]["median"] for point in points],
                dashed=i >= len(COLOURS),
            )
        )
    panel = Panel(
        title="seconds to plan a step",
        x_label="accesses",
        x_scale="log",
        y_scale="log",
        lines=lines,
    )
    rows = []
    for result in record["results"]:
        grown = result["growth"]
        rows.append(
            [
                result["name"],
                f"{result['points'][-1]['seconds']['median']:.3f}",
                f"{grown['per_doubling']:.2f} ({grown['n_log_n_per_doubling']:.2f})",
                verdict(result["met"]),
            ]
        )
    longest = record["results"][0]["points"][-1]["accesses"]
    headings = ("", f"s for {longest:,}", "growth per doubling (n log n)", "")
    return [inline(panel), table(headings, rows)]


def copy_engines(record: Record) -> list[str]:
    lines = []
    for i, (key, name) in enumerate(record["names"].items()):
        points = [r for r in record["results"] if key in r["bytes_per_second"]]
        lines.append(
            Line(
                name=name,
                colour=COLOURS[i],
                x=[point["piece_bytes"] for point in points],
                y=[point["bytes_per_second"][key] / 1e9 for point in points],
                dashed=key.startswith("memcpy"),
            )
        )
    sizes = [result["piece_bytes"] for result in record["results"]]
    ticks = [(s, f"{s // MIB} MiB" if s >= MIB else f"{s // 1024} KiB") for s in sizes]
    panel = Panel(
        title="GB/s by the size of a copy",
        x_label="bytes of a copy",
        x_scale="log",
        x_names=ticks,
        lines=lines,
    )
    rows = [
        [f"{name}, {tick}", f"{result['ratios'][name]['median']:.3f}", verdict(met)]
        for result, (_, tick) in zip(record["results"], ticks, strict=True)
        for name, met in result["met"].items()
    ]
    return [inline(panel), table(("of the baseline", "median", ""), rows)]


def hooks(record: Record) -> list[str]:
    targets = record["targets_us"]
    rows = []
    for name, us in record["added_us_per_module"].items():
        quartiles = f"{us['lower_quartile']:.2f} to {us['upper_quartile']:.2f}"
        bound = f"at most {targets['total']:g}" if name == "forward + backward" else ""
        rows.append([name, f"{us['median']:.2f}", quartiles, bound])
    for name, result in (record["core"] or {}).items():
        us = result["ns_per_module"]
        extremes = f"{us['min'] / 1e3:.2f} to {us['max'] / 1e3:.2f} (extremes)"
        bound = f"at most {targets['core']:g}"
        rows.append([f"core alone, {name}", f"{us['median'] / 1e3:.2f}", extremes, bound])
    title = f"us added to each of {record['modules']:,} modules"
    return [table((title, "median", "quartiles", "target"), rows)]


def build(record: Record) -> list[str]:
    rows = [
        [
            way,
            f"{found['num_params'] / 1e6:.0f} M",
            f"{found['final_host_bytes'] / MIB:.0f}",
            f"{found['peak_bytes'] / MIB:.0f}",
            f"{found['peak_bytes'] / found['final_host_bytes']:.3f}",
            verdict(found["within_target"]),
        ]
        for way, found in record["results"].items()
    ]
    return [table(("", "parameters", "final MiB", "peak MiB", "peak / final", ""), rows)]


def formats(record: Record) -> list[str]:
    lines = []
    for i, (name, runs) in enumerate(record["losses"].items()):
        means = [statistics.fmean(values) for values in zip(*runs, strict=True)]
        width = max(1, len(means) // 20)
        smooth = [statistics.fmean(means[i : i + width]) for i in range(0, len(means), width)]
        x = [float(min(len(means), step + width)) for step in range(0, len(means), width)]
        lines.append(Line(name=name, colour=COLOURS[i], x=x, y=smooth, dashed=name == "split"))
    panel = Panel(title="loss (nats), mean of the seeds", x_label="step", lines=lines)
    rows = [
        [name, f"{figures['mean_excess_over_fp32']:+.4f}"]
        for name, figures in record["summary"].items()
    ]
    return [inline(panel), table(("last tenth", "nats above fp32"), rows)]


def overlap(record: Record) -> list[str]:
    link = record["link_bytes_per_second"] / 1e9
    headings = ("", "compute s", "link s", "DRAM s", "step / longest", "step / (compute + DRAM)")
    parts = []
    for case in record["cases"].values():
        results = case["results"].values()
        bars = [bar(result["name"], result["seconds"], i) for i, result in enumerate(results)]
        rows = [
            [
                result["name"],
                *(f"{result['floors'][key]:.3f}" for key in ("compute", "link", "dram")),
                f"{result['over_longest']['median']:.3f}",
                f"{result['over_compute_and_dram']['median']:.3f}",
            ]
            for result in results
        ]
        title = f"{case['title']}: a step behind a link of {link:g} GB/s"
        parts += [inline(Bars(title=title, unit="s", bars=bars)), table(headings, rows)]
    return parts


def _token(result: Record) -> list[str]:
    """Returns the milliseconds of a token and of its link, and their ratio."""
    return [
        f"{1e3 * result['seconds']['median']:.1f}",
        f"{1e3 * result['link_seconds']['median']:.1f}",
        f"{result['over_link']['median']:.3f}",
    ]


def generation(record: Record) -> list[str]:
    link = record["link_bytes_per_second"] / 1e9
    headings = ("", "ms a token", "link ms", "token / link", "streamed MB", "demand fetches")
    parts = []
    for name, case in record["cases"].items():
        results = case["results"].items()
        bars = [bar(title, result["seconds"], i) for i, (title, result) in enumerate(results)]
        rows = [
            [
                title,
                *_token(result),
                f"{result['streamed_bytes_per_token'] / 1e6:.0f}",
                str(result["demand_fetches"]),
            ]
            for title, result in results
            if "over_link" in result
        ]
        title = (
            f"{name}: a token behind a link of {link:g} GB/s, half of the parameters in the budget"
        )
        parts += [inline(Bars(title=title, unit="s", bars=bars)), table(headings, rows)]
    return parts


def experts(record: Record) -> list[str]:
    link = record["link_bytes_per_second"] / 1e9
    results = record["results"].items()
    bars = [bar(title, result["seconds"], i) for i, (title, result) in enumerate(results)]
    rows = [
        [
            title,
            *_token(result),
            f"{result['hits']['median']:.0%}",
        ]
        for title, result in results
        if "over_link" in result
    ]
    title = f"A token behind a link of {link:g} GB/s, half of the parameters in the budget"
    headings = ("", "ms a token", "link ms", "token / link", "experts on the device")
    return [inline(Bars(title=title, unit="s", bars=bars)), table(headings, rows)]


def expert_training(record: Record) -> list[str]:
    rows = [
        [
            title,
            f"{result['touched']['median']:.0%}",
            *(f"{result[key]['median'] / 1e6:.0f}" for key in ("touched_bytes", "fetched_bytes")),
            f"{result['link_bytes']['full layers']['median'] / 1e6:.0f}",
            *(f"{seconds['median']:.2f}" for seconds in result["seconds"].values()),
        ]
        for title, result in record["results"].items()
    ]
    headings = ("distinct", "experts touched", "touched MB", "fetched MB", "full layers MB")
    return [table((*headings, "plain PyTorch s", "full layers s", "experts s"), rows)]


def expert_guesses(record: Record) -> list[str]:
    rows = [
        [name, guess, *(f"{share:.0%}" for share in shares.values())]
        for name, case in record["cases"].items()
        for guess, shares in case["guesses"].items()
    ]
    headings = (
        "routers",
        "guess",
        "experts guessed",
        "missing",
        "missing guessed",
        "copies needed",
    )
    return [table((*headings, "guessed by the first", "first needed"), rows)]


def hybrid(record: Record) -> list[str]:
    rows = [
        [
            f"{result['share']:.0%}",
            f"{result['resident_chunks']} of {result['num_chunks']}",
            *(f"{result['seconds'][key]['median']:.3f}" for key in ("streamed", "hybrid")),
            f"{result['ratio']['median']:.3f}",
            *(f"{result['link_bytes_per_step'][key] / 1e6:.0f}" for key in ("streamed", "hybrid")),
        ]
        for result in record["results"]
    ]
    headings = (
        "spare memory, of all payloads",
        "resident chunks",
        "streamed s",
        "hybrid s",
        "hybrid / streamed",
        "link MB a step, streamed",
        "hybrid",
    )
    return [table(headings, rows)]


def zero(record: Record) -> list[str]:
    contenders = record["contenders"].values()
    bars = [bar(result["name"], result["seconds"], i) for i, result in enumerate(contenders)]
    rows = [
        [
            result["name"],
            f"{result['seconds']['median']:.3f}",
            f"{result['cpu_seconds']:.2f}",
            f"{result['loopback_bytes'] / 2**20:.0f}",
            f"{result['resident_bytes'] / 2**20:.0f}",
        ]
        for result in contenders
    ]
    headings = (
        "",
        "s a step",
        "CPU s of all ranks",
        "loopback MiB a step",
        "resident MiB of all ranks",
    )
    return [
        inline(Bars(title=f"one step on {record['ranks']} ranks", unit="s", bars=bars)),
        table(headings, rows),
    ]


def simulator(record: Record) -> list[str]:
    rows = [
        [
            name,
            f"{result['measured_seconds']['median']:.3f}",
            f"{result['predicted_seconds']['median']:.3f}",
            f"{result['ratio']['median']:.3f}",
            "exact" if result["peak_exact"] else "differs",
            verdict(result["within_target"] and result["peak_exact"]),
        ]
        for name, result in record["results"].items()
    ]
    headings = ("budget", "measured s", "predicted s", "predicted / measured", "peak bytes", "")
    return [table(headings, rows)]


def io(record: Record) -> list[str]:
    rows = [
        [mix, engine, f"{ratio['median']:.3f}",
         f"{ratio['lower_quartile']:.3f} to {ratio['upper_quartile']:.3f}"]
        for mix, engines in record["ratios"].items()
        for engine, ratio in engines.items()
    ]  # fmt: skip
    about = f"{record['block_bytes'] // 1024} KiB blocks, depth {record['depth']}, {record['fio']}"
    return [table((f"of fio: {about}", "engine", "median", "quartiles"), rows)]


def nvme_rows(results: Record) -> list[list[str]]:
    """What benchmarks/nvme.py found of each contender, as its own table shows it too."""
    rows = []
    for result in results.values():
        row = [result["name"], f"{result['update_seconds']['median']:.3f}"]
        if "read_bytes" in result:
            row += [
                f"{result['read_bytes'] / 1e6:,.0f}",
                f"{result['written_bytes'] / 1e6:,.0f}",
                f"{result['device_seconds']['median']:.3f}",
                f"{result['over_device']['median']:.2f}",
            ]
        else:
            row += ["", "", "", ""]
        rows.append(row)
    return rows


def nvme(record: Record) -> list[str]:
    headings = (
        f"optimizer.step() of {record['parameters'] / 1e6:.0f}M parameters", "median s",
        "read MB", "written MB", "device s", "over device",
    )  # fmt: skip
    return [table(headings, nvme_rows(record["results"]))]


def beyond(record: Record) -> list[str]:
    rows = []
    for run in record["runs"]:
        report = run["report"]
        sizes = (
            report["device_budget_bytes"], report["host_budget_bytes"], report["nvme_bytes"],
            report["nvme_weight_bytes"], run["peak_resident_bytes"],
        )  # fmt: skip
        row = [f"{run['over_budgets']:.2f}", *(f"{size / 2**20:,.0f}" for size in sizes)]
        rows.append([*row, f"{min(run['seconds']):.1f}", f"{run['losses'][-1]:.3f}"])
    headings = (
        "state over budgets", "device MiB", "host MiB", "on NVMe MiB", "of these weights",
        "peak resident MiB", "s a step", "loss",
    )  # fmt: skip
    total = f"{record['state_bytes'] / 2**20:,.0f} MiB of parameters, gradients and state"
    return [f"<p>{record['parameters'] / 1e6:.0f}M parameters, {total}</p>", table(headings, rows)]


def others(record: Record) -> list[str]:
    """A record that has no section of its own: its numbers, by their place in it."""
    rows = [[name, f"{value:g}"] for name, value in _numbers(record, "")]
    return [f"<details><summary>Figures</summary>{table(('', ''), rows)}</details>"]


def _numbers(value: object, name: str) -> list[tuple[str, float]]:
    if isinstance(value, dict):
        pairs = [(f"{name}, {key}" if name else str(key), inner) for key, inner in value.items()]
        return [found for key, inner in pairs if key != "machine" for found in _numbers(inner, key)]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return [(name, float(value))]
    return []


# In the order of the page: what users ask first.
SECTIONS: dict[str, tuple[str, Callable[[Record], list[str]]]] = {
    "step": ("A training step beside its peers", step),
    "zero": ("A step of several ranks beside its peers", zero),
    "sweep": ("Device budgets and model sizes", sweep),
    "overlap": ("Overlap behind a slow link", overlap),
    "generation": ("Tokens behind a slow link", generation),
    "experts": ("Experts behind a slow link", experts),
    "expert_training": ("Training over frozen experts", expert_training),
    "expert_guesses": ("Guesses of the next experts", expert_guesses),
    "hybrid": ("Whole chunks in spare device memory", hybrid),
    "adam": ("CPU Adam", adam),
    "formats": ("Convergence of the state formats", formats),
    "hooks": ("Cost of the hooks", hooks),
    "planner": ("Planning time", planner),
    "copy_engines": ("Copy engines", copy_engines),
    "simulator": ("The simulator against measured steps", simulator),
    "io": ("NVMe engines beside fio", io),
    "nvme": ("Optimizer steps on NVMe", nvme),
    "beyond": ("A model beyond device and host memory", beyond),
    "build": ("Memory while building", build),
}
