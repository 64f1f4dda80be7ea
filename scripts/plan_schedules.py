"""Writes the simulated schedules of docs/plans/schedules.md, from the plans in docs/plans.

    python scripts/plan_schedules.py

It compiles nothing; scripts/plan_golden.py writes the plans. Example output:

    ## boba_7b.h100-64
    ...
    best: async on 44 + 20 devices with max_staleness=2, 1.21x of sync
"""

import json
import os
import pathlib
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(pathlib.Path(__file__).parent))

from plan_golden import FOLDER, LENGTHS, config_of

from jaxrl.planner.model_shape import model_shape
from jaxrl.planner.schedules.command import Simulation, simulate_text
from jaxrl.planner.schedules.simulation import SimulatedSchedule

OTHER_NAMES = {"boba_7b.v5p-4x4x4": " (v5p-128)"}
SPEC = "lognormal?mean=14000&sigma=1"
HEAD = """# Simulated schedules

After this page you know what partial rollouts and separate rollout devices could gain for long
responses, before any of it has run on an accelerator. `python scripts/plan_schedules.py` writes
this page from the plans in this folder; [the planner](../how_to/planner.md#simulate-schedules)
explains the model. Times are lower bounds at the chips' peak rates, not measurements.
"""


def section(name: str) -> str:
    """The simulated schedules of one of PLANS."""
    cfg = config_of(name)
    plan = json.loads((FOLDER / f"{name}.json").read_text())
    simulation = Simulation(SimulatedSchedule("async", 1), SPEC, rollout_devices=0, search=True)
    text = simulate_text(simulation, cfg, model_shape(cfg.model.path), plan)
    return f"## {name}{OTHER_NAMES.get(name, '')}\n\n{text}"


def page() -> str:
    """The whole page: every plan of long responses that is in the folder."""
    names = [name for name in LENGTHS if (FOLDER / f"{name}.json").is_file()]
    return "\n".join([HEAD, *map(section, names)])


if __name__ == "__main__":
    text = page()
    (FOLDER / "schedules.md").write_text(text)
    print(text)
