"""Offline training on a fixed dataset, without sampling and rewards, for any `OfflineObjective`."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jaxrl.config.keys import RunConfig
from jaxrl.config.schema import flatten, to_dict
from jaxrl.data.demonstrations import to_sample
from jaxrl.data.items import ItemMaker
from jaxrl.data.packing import gather, pack_samples, padding_fraction, shared_fraction
from jaxrl.planner.programs import OfflineWorkload
from jaxrl.trainer.core import Core
from jaxrl.trainer.first_samples import show_first_samples
from jaxrl.trainer.phases.mini_batches import MiniBatch
from jaxrl.trainer.phases.update import update
from jaxrl.types import Batch, Demonstration, TrainingSample

# Sections and keys of the config that offline training does not use.
UNUSED_SECTIONS = (
    *("algorithm", "critic", "env", "rollout", "reward", "reward_model", "schedule"),
    *("data.rendered_prompts", "data.demonstrations", "data.demonstrations_per_step"),
    *("data.skip_solved", "data.pool_weights", "data.progress", "data.gate"),
    *("data.teacher_logprobs", "self_distillation", "teacher_endpoint"),
)


@dataclasses.dataclass(frozen=True)
class OfflineObjective:
    """An offline training objective, expressed as a policy gradient or value loss."""

    maker: Callable[..., ItemMaker]  # (renderer, cfg, stop=, images=)
    make_samples: Callable[["OfflineRun", Sequence], tuple[list[TrainingSample], dict[str, float]]]
    evaluate: Callable[["OfflineRun", Sequence], dict[str, float]]  # validation items -> val/*
    aggregation: str  # algorithm.aggregation of its loss
    workload: Callable[[RunConfig], OfflineWorkload]  # shape of a training step
    unused_keys: tuple[str, ...]  # sections and keys of the config that it does not read
    metric_names: Mapping[str, str]  # metrics of an update to log -> their names
    # Keys of the unused sections that a run reads all the same
    used_keys: Callable[[RunConfig], tuple[str, ...]] = lambda cfg: ()


@dataclasses.dataclass(frozen=True)
class OfflineRun:
    """A run of jaxrl/sft.py, jaxrl/dpo.py or jaxrl/reward_model.py."""

    core: Core
    objective: OfflineObjective


def with_objective(cfg: RunConfig, objective: OfflineObjective) -> RunConfig:
    """The config with the learner's algorithm set for the objective.

    Raises ValueError for keys that have no effect in offline training.
    """
    values, default = flatten(to_dict(cfg)), flatten(to_dict(RunConfig()))
    sections = tuple(f"{name}." for name in objective.unused_keys)
    unused = [
        f"config.{name}"
        for name, value in values.items()
        if value != default.get(name)
        and name not in objective.used_keys(cfg)
        and (name in objective.unused_keys or name.startswith(sections))
    ]
    if "policy" in cfg.learner.offload:
        unused.append("config.learner.offload='policy'")
    if cfg.learner.epochs != 1:
        unused.append("config.learner.epochs (set total_epochs)")
    if unused:
        raise ValueError(
            f"{', '.join(unused)} have no effect in offline training on a fixed dataset; remove "
            "them from the config"
        )
    algorithm = dataclasses.replace(
        cfg.algorithm, policy_loss="policy_gradient", aggregation=objective.aggregation
    )
    critic = dataclasses.replace(cfg.critic, value_clip=0.0)  # scores are not clipped
    return dataclasses.replace(cfg, algorithm=algorithm, critic=critic)


def train_step(run: OfflineRun) -> None:
    """One step on the next items. Samples of a mini-batch are made with the current weights."""
    core, objective = run.core, run.objective
    core.session.stop.check()
    found: list[dict[str, float]] = []
    n_tokens, size, trained = 0, core.cfg.mini_batch_prompts, []
    with core.clock.timed("step"):
        items = next(core.iterator)
        if core.clock.step == 0:
            show_first_samples(core, items)
        for start in range(0, len(items), size):
            samples, metrics = objective.make_samples(run, items[start : start + size])
            packed = pack_samples(samples, core.cfg, core.learner.n_ranks)
            updated = update(core, [MiniBatch(packed)])
            names = objective.metric_names.items()
            metrics |= {shown: updated[name] for name, shown in names if name in updated}
            metrics |= {name: v for name, v in updated.items() if name.startswith("optim/")}
            metrics["perf/padding_fraction"] = padding_fraction(packed)
            found.append(metrics | {"perf/shared_fraction": shared_fraction(packed)})
            trained += packed
            n_tokens += sum(len(s.prompt_tokens) + len(s.tokens) for s in samples)
    metrics = {name: float(np.mean([one[name] for one in found])) for name in found[0]}
    metrics["perf/n_updates"] = float(len(found))
    core.end_step(metrics, n_tokens=n_tokens, trained=trained)


def validate(run: OfflineRun) -> None:
    """Evaluates the validation items with the current weights and logs val/*."""
    core = run.core
    with core.clock.timed("val"):
        core.clock.val_metrics = run.objective.evaluate(run, core.val)
    core.clock.validated_at = core.clock.step
    seconds = sum(core.clock.take_seconds().values())  # all phases, including scoring
    core.logger.metrics(core.clock.step, core.clock.val_metrics | {"time/val_s": seconds})


def logps(
    core: Core,
    demonstrations: Sequence[Demonstration],
    score: Callable[[Core, Sequence[Batch]], list[np.ndarray]],
) -> list[np.ndarray]:
    """Logprobs of the loss tokens of each demonstration.

    `score` is policy_logps or reference_logps.
    """
    (found,) = token_fields(
        core, demonstrations, lambda core, batches: [(logp,) for logp in score(core, batches)]
    )
    return found


def token_fields(
    core: Core,
    demonstrations: Sequence[Demonstration],
    score: Callable[[Core, Sequence[Batch]], list[tuple[np.ndarray, ...]]],
) -> list[list[np.ndarray]]:
    """The fields that `score` gives for each batch, at the loss tokens of each demonstration."""
    packed = pack_samples([to_sample(d) for d in demonstrations], core.cfg, core.learner.n_ranks)
    fields = zip(*score(core, [p.batch for p in packed]), strict=True)
    return [
        [x[d.loss_mask] for d, x in zip(demonstrations, gather(list(field), packed), strict=True)]
        for field in fields
    ]
