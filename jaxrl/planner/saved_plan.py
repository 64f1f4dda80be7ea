"""Plans in files: the object that `jaxrl.plan --json` prints, and the config that it is for."""

import math
from pathlib import Path
from typing import Any

from jaxrl.config.keys import RunConfig
from jaxrl.config.schema import flatten, to_dict
from jaxrl.json_text import parse_json
from sharding import abstract_mesh

# Sections and keys that change programs, memory or times of a plan. The mesh is a value by itself.
SECTIONS = ("model", "lora", "score", "ref", "rollout", "learner", "critic", "algorithm")
KEYS = ("data.prompts_per_step", "data.max_prompt_len", "data.max_response_len")
SHOWN = 8  # differences


def planned_config(cfg: RunConfig) -> dict[str, Any]:
    """Dotted name -> value of the keys that a plan depends on and that are not the defaults."""
    default = _keys(RunConfig())
    return {name: value for name, value in _keys(cfg).items() if value != default.get(name)}


def read_plan(file: str, needed: str) -> dict[str, Any]:
    """The object in a file with --json output. Raises ValueError without the key `needed`."""
    try:
        plan = parse_json(Path(file).read_text())
    except ValueError as error:
        raise ValueError(f"{file} is not JSON ({error}); write it with --json") from error
    if not isinstance(plan, dict) or needed not in plan:
        raise ValueError(f"{file} is not a plan with {needed}; write it again with --json")
    return plan


def check_config(file: str, plan: dict[str, Any], cfg: RunConfig) -> None:
    """Raises ValueError, which names the keys, if the plan in `file` is for another config."""
    if not isinstance(plan.get("config"), dict):
        raise ValueError(f"{file} does not say for which config it is; write it again with --json")
    there, here = _keys(RunConfig()) | plan["config"], _keys(cfg)
    mesh = abstract_mesh(math.prod(plan["mesh"].values()), **to_dict(cfg.mesh))
    there |= {f"mesh.{axis}": n for axis, n in plan["mesh"].items()}
    here |= {f"mesh.{axis}": n for axis, n in mesh.shape.items() if n > 1}
    absent = "not set"
    lines = [
        f"  config.{name}: {there.get(name, absent)!r} in the file, {here.get(name, absent)!r} here"
        for name in dict.fromkeys([*here, *there])
        if there.get(name, absent) != here.get(name, absent)
    ]
    if lines:
        more = [f"  and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
        raise ValueError(
            "\n".join([f"{file} is the plan of another config:", *lines[:SHOWN], *more])
            + "\nset the same values, or leave out --plan to compile the plan of this config"
        )


def _keys(cfg: RunConfig) -> dict[str, Any]:
    """Dotted name -> value, as JSON has it."""
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in flatten(to_dict(cfg)).items()
        if name.partition(".")[0] in SECTIONS or name in KEYS
    }
