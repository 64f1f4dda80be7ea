"""The planner, in another process: it needs its own settings of JAX and of the TPU's library."""

import dataclasses
import html
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jaxrl.config.command_line import config_of
from jaxrl.config.keys import RunConfig
from jaxrl.config.resolve import resolve
from jaxrl.config.saved import to_json
from jaxrl.json_text import parse_json
from jaxrl.subprocesses.process import import_path

MISFIT = 2  # exit status of the planner


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """The planner's answer. It is shown as the planner's tables."""

    fits: bool
    text: str  # the tables, or why a program cannot be compiled
    numbers: dict[str, Any]  # the object of --json; {} if a program is too large for the device

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return f'<pre style="white-space:pre;overflow-x:auto">{html.escape(self.text)}</pre>'


def plan(
    config: str | Path | ConfigDict | RunConfig,
    topology: str,
    *,
    overrides: Mapping[str, Any] | None = None,
    **options: str | int,
) -> RunPlan:
    """Plans the memory and the time of a run on devices that need not be attached.

    Runs `python -m jaxrl.plan` and prints its progress. `config` and `overrides` are as in `train`.
    `topology` is a name such as "v5e:2x4". `options` are those of the program, such as
    model_config="config.json", search=4 or response_len=300. Raises ValueError with the program's
    message.
    """
    cfg = resolve(config_of(config, overrides or {}))
    with tempfile.TemporaryDirectory(prefix="jaxrl-plan-") as folder:
        source, target = Path(folder, "config.json"), Path(folder, "plan.json")
        source.write_text(to_json(cfg))
        arguments = [f"--config={source}", f"--topology={topology}", f"--json={target}"]
        arguments += [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        status, text, errors = _run(arguments)
        numbers = parse_json(target.read_text()) if target.exists() else {}
    if status not in (0, MISFIT):
        message = re.search(r"^error: (.*)", errors, re.MULTILINE | re.DOTALL)
        raise ValueError(message[1].strip() if message else f"the planner ended with {status}")
    return RunPlan(fits=status == 0, text=text or errors, numbers=numbers)


def _run(arguments: list[str]) -> tuple[int, str, str]:
    """(exit status, output, errors) of the planner, whose errors and progress are printed."""
    errors = []
    with (
        tempfile.TemporaryFile("w+") as output,
        subprocess.Popen(
            [sys.executable, "-m", "jaxrl.plan", *arguments],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(import_path()), "JAX_PLATFORMS": "cpu"},
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        assert process.stderr is not None  # it is a pipe
        try:
            for line in process.stderr:
                errors.append(line)
                print(line, end="", flush=True)
        except BaseException:  # KeyboardInterrupt
            process.kill()
            raise
        status = process.wait()
        output.seek(0)
        return status, output.read(), "".join(errors)
