"""Compiles the cases of docs/concepts/planner_accuracy.md and stores the work of their programs.

    python scripts/plan_accuracy.py [NAME ...]    (default: all; minutes each)

Writes tests/planner/published/NAME.json: the numbers of one call of each program on a device, as in
`python -m jaxrl.plan --json`, without calibrated times, which tests compute from them. Prints the
rows of the page. It needs the TPU and CUDA compilers (jaxrl/planner/topology.py). Programs with
layers in a list are compiled with 2 and 4 layers and extrapolated.
"""

import dataclasses
import json
import os
import pathlib
import sys
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax

from jaxrl.config.config_file import load_config
from jaxrl.config.keys import RunConfig
from jaxrl.config.resolve import resolve
from jaxrl.models.config import DecoderConfig
from jaxrl.planner.calibration import RATES, Factor, calibrated_seconds, factors_of
from jaxrl.planner.chips import CHIPS
from jaxrl.planner.compilation import compile_programs
from jaxrl.planner.model_shape import model_shape
from jaxrl.planner.plan import program_numbers
from jaxrl.planner.programs import Lengths, run_programs
from jaxrl.planner.topology import Topology, topology
from jaxrl.trainer.offline.objective import with_objective
from jaxrl.trainer.offline.sft import SFT
from sharding import make_mesh

ROOT = pathlib.Path(__file__).parents[1]
FOLDER = ROOT / "tests" / "planner" / "published"
TRAINING = ("accumulate", "apply")
CASES = {  # config in configs/bench -> topology, programs
    "llama2_7b_8h100": ("h100:8", TRAINING),
    "llama2_7b_a3": ("h100:8", TRAINING),
    "llama2_7b_2a3": ("h100:16", TRAINING),
    "llama31_8b_v6e": ("v6e:2x4", TRAINING),
    "maxtext_16b_v5e": ("v5e:16x16", TRAINING),
    "maxtext_32b_v5p": ("v5p:4x4x4", TRAINING),
    "decode_8b_h200": ("h200:1", ("decode",)),
    "decode_70b_4h200": ("h200:4", ("decode",)),
    "decode_70b_v6e": ("v6e:2x4", ("decode",)),
}
PUBLISHED = {  # seconds of a training step, or of a decode step
    "llama2_7b_8h100": 0.721,
    "llama2_7b_a3": 7.55e14 / 492e12,
    "llama2_7b_2a3": 7.55e14 / 422e12,
    "llama31_8b_v6e": 3.443,
    "maxtext_16b_v5e": 1.236e15 / 120e12,
    "maxtext_32b_v5p": 2.391e15 / 328e12,
    "decode_8b_h200": 0.8334 / 128,
    "decode_70b_4h200": 2.0775 / 128,
    "decode_70b_v6e": 0.0254,
}
COMPILED = (2, 4)  # layers of models that have them in a list


def work_of(name: str) -> dict[str, Any]:
    """{program: numbers of one call on a device}, for all layers of the model."""
    machine_name, names = CASES[name]
    config = load_config(str(ROOT / "configs" / "bench" / f"{name}.py"))
    machine = topology(machine_name)
    cfg = resolve(config, n_devices=len(machine.devices))
    decoder = model_shape(cfg.model.path)
    if cfg.model.layers == "stacked":
        return compiled(cfg, decoder, machine, names)
    few, more = (
        compiled(cfg, dataclasses.replace(decoder, layers=decoder.layers[:n]), machine, names)
        for n in COMPILED
    )
    return extrapolated(few, more, (decoder.L - COMPILED[0]) / (COMPILED[1] - COMPILED[0]))


def compiled(
    cfg: RunConfig, decoder: DecoderConfig, machine: Topology, names: tuple[str, ...]
) -> dict[str, Any]:
    """The numbers of the programs with these names."""
    workload = None
    if "decode" not in names:
        cfg, workload = with_objective(cfg, SFT), SFT.workload(cfg)
    with jax.set_mesh(make_mesh(machine.devices, **dataclasses.asdict(cfg.mesh))):
        run = run_programs(cfg, decoder, machine.chip.memory_bytes, workload=workload)
        run = dataclasses.replace(run, table={name: run.table[name] for name in names})
        lengths = Lengths(cfg.data.max_prompt_len, cfg.data.max_response_len)
        programs = compile_programs(run, lengths, machine)
    found = {name: program_numbers(name, one, machine.chip) for name, one in programs.items()}
    for numbers in found.values():
        del numbers["compile_s"], numbers["calibrated_s"]
    return found


def extrapolated(few: Any, more: Any, times: float) -> Any:
    """`few` and `times` the difference of `more`, for every number."""
    if isinstance(more, dict):
        return {
            key: extrapolated(few.get(key, {} if isinstance(one, dict) else 0.0), one, times)
            for key, one in more.items()
        }
    return few + times * (more - few)


def stored(name: str) -> dict[str, Any]:
    """The stored numbers of a case: {program: numbers of one call}."""
    return json.loads((FOLDER / f"{name}.json").read_text())


def seconds_of(name: str) -> float:
    """Calibrated seconds of a case: of one call of each of its programs."""
    factors = factors_of(CHIPS[CASES[name][0].partition(":")[0]])
    assert factors is not None, "every case is for a chip with factors"
    return sum(calibrated_seconds(program, one, factors) for program, one in stored(name).items())


def page_row(name: str) -> str:
    """The row of a case in the page: ideal, serial and calibrated time, published time, ratio."""
    programs = stored(name).values()
    ideal_s = sum(max(one["seconds"].values()) for one in programs)
    serial_s = sum(
        one["kernels_s"]
        + one["seconds"]["host"]
        + sum(moved["exposed_s"] for moved in one["collectives"].values())
        for one in programs
    )
    calibrated_s, published_s = seconds_of(name), PUBLISHED[name]
    times = (ideal_s, serial_s, calibrated_s, published_s)
    unit, scale = ("ms", 1e3) if published_s < 0.1 else ("s", 1.0)
    cells = [f"{scale * seconds:.3g} {unit}" for seconds in times]
    return f"| `{name}` | {' | '.join(cells)} | {calibrated_s / published_s:.2f} |"


def factor_row(name: str, factor: Factor) -> str:
    """The row of a factor in the page."""
    is_share = name in RATES or name == "links"
    shown = f"{factor.value:.2f}" if is_share else f"{1e6 * factor.value:g} us"
    return f"| `{name}` | {shown} | {factor.status} | {factor.source} |"


def main() -> None:
    if "-h" in sys.argv or "--help" in sys.argv:
        print(f"{__doc__}\nnames: {', '.join(CASES)}")
        return
    FOLDER.mkdir(exist_ok=True)
    for name in sys.argv[1:] or CASES:
        (FOLDER / f"{name}.json").write_text(json.dumps(work_of(name), indent=1) + "\n")
        print(page_row(name), flush=True)


if __name__ == "__main__":
    main()
