"""Trains recipes in processes that are killed in the middle of a step, and started again.

killed.py FOLDER NAME-SEED...: for each recipe `NAME.yaml` that the folder holds, one run is not
killed. Others are killed at the moments that their seeds draw, and go on. `ends.json` has how each
process ended.
"""

import json
import os
import random
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import transformers

from castor.recipes import train
from castor.recipes.recipe import load

LONGEST_STEP = 0.08
"""Seconds; a step of these recipes takes about 0.04 on an idle core."""


class Killed(transformers.TrainerCallback):  # type: ignore[misc]
    """Ends the process within a step, wherever that is then: no handler runs, as with kill -9."""

    def __init__(self, step: int, seconds: float) -> None:
        self._step, self._seconds = step, seconds

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._step:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, self._seconds)


def ended(file: Path, run: Path, *callbacks: Any) -> int:
    """Trains a recipe in a process of its own, and returns how that ended."""
    process = os.fork()
    if process == 0:
        try:
            plain = train.make_trainer

            def with_callbacks(recipe: Any) -> Any:
                trainer = plain(recipe)
                for one in callbacks:
                    trainer.add_callback(one)
                return trainer

            train.make_trainer = with_callbacks
            run.mkdir(exist_ok=True)
            stopped = train.fit(load(file, [f"output.dir={run}"]))
            os._exit(0 if stopped is None else 1)
        except BaseException:
            traceback.print_exc()
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


folder, seeds = Path(sys.argv[1]), [name.split("-") for name in sys.argv[2:]]
found = {}
for file in sorted(folder.glob("*.yaml")):
    steps = load(file).train.max_steps
    assert steps is not None
    found[file.stem] = [ended(file, folder / file.stem)]
    for seed in (seed for name, seed in seeds if name == file.stem):
        draw = random.Random(int(seed))
        end = Killed(draw.randrange(1, steps // 2), draw.uniform(0, LONGEST_STEP))
        name = f"{file.stem}-{seed}"
        found[name] = [
            ended(file, folder / name, end),
            len(list((folder / name).glob("checkpoint-*"))),
            ended(file, folder / name),
        ]
(folder / "ends.json").write_text(json.dumps(found))
os._exit(0)  # castor run would say that this process has trained nothing
