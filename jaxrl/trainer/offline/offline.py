"""Learning from data that lies there: no sampling, no reward. What is learnt from it is a `Lesson`."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jaxrl.config.keys import RunConfig
from jaxrl.config.schema import flatten, to_dict
from jaxrl.data.demonstrations import to_sample
from jaxrl.data.packing import gather
from jaxrl.planner.programs import OfflineWorkload
from jaxrl.trainer.experience import MiniBatch, pack_samples, padding_fraction
from jaxrl.trainer.metrics import speed_metrics
from jaxrl.trainer.run import Job
from jaxrl.trainer.update import update
from jaxrl.types import Batch, Demonstration, TrainingSample

# Sections of the config that mean nothing where nothing is sampled.
IDLE = ("algorithm", "critic", "env", "rollout", "reward", "reward_model")


@dataclasses.dataclass(frozen=True)
class Lesson:
    """How items of a data set become rollouts with advantages, whose policy gradient is that of a loss."""

    load: Callable[..., Sequence]  # (sources, renderer=, data=, stop=, limit=) -> items
    teach: Callable[["Offline", Sequence], tuple[list[TrainingSample], dict[str, float]]]
    judge: Callable[["Offline", Sequence], dict[str, float]]  # held-out items -> val/*
    aggregation: str  # of algorithm.aggregation
    given: OfflineWorkload  # shape of a training step, for the planner
    idle: tuple[str, ...]  # sections and keys of the config that it does not read
    logged: Mapping[str, str]  # metrics of an update that mean something here -> their names


def learning(cfg: RunConfig, lesson: Lesson) -> RunConfig:
    """The run with the algorithm that the lesson is for the learner.

    Raises ValueError for keys that have no meaning where nothing is sampled.
    """
    values, default = flatten(to_dict(cfg)), flatten(to_dict(RunConfig()))
    sections = tuple(f"{name}." for name in lesson.idle)
    idle = [
        f"config.{name}"
        for name, value in values.items()
        if value != default[name] and (name in lesson.idle or name.startswith(sections))
    ]
    if cfg.learner.epochs != 1:
        idle.append("config.learner.epochs (set total_epochs)")
    if idle:
        raise ValueError(
            f"{', '.join(idle)} mean nothing to a run that learns from given answers; leave them out"
        )
    algorithm = dataclasses.replace(
        cfg.algorithm, policy_loss="policy_gradient", aggregation=lesson.aggregation
    )
    critic = dataclasses.replace(cfg.critic, value_clip=0.0)  # scores go where a lesson wants them
    return dataclasses.replace(cfg, algorithm=algorithm, critic=critic)


@dataclasses.dataclass(kw_only=True)
class Offline(Job):
    """What the loops of jaxrl/sft.py, jaxrl/dpo.py and jaxrl/reward_model.py hold."""

    lesson: Lesson


def train_step(run: Offline) -> None:
    """One step on the next items; every mini-batch is taught by the weights of its turn."""
    run.stop.check()
    found: list[dict[str, float]] = []
    n_tokens, size, learnt_from = 0, run.cfg.mini_batch_prompts, []
    with run.timed("step"):
        items = next(run.iterator)
        for start in range(0, len(items), size):
            samples, metrics = run.lesson.teach(run, items[start : start + size])
            packed = pack_samples(samples, run.cfg, run.n_ranks)
            learnt = update(run, [MiniBatch(packed)])
            metrics |= {shown: learnt[name] for name, shown in run.lesson.logged.items()}
            metrics |= {name: v for name, v in learnt.items() if name.startswith("optim/")}
            found.append(metrics | {"perf/padding_fraction": padding_fraction(packed)})
            learnt_from += packed
            n_tokens += sum(len(s.prompt_tokens) + len(s.tokens) for s in samples)
    metrics = {name: float(np.mean([one[name] for one in found])) for name in found[0]}
    metrics["perf/n_updates"] = float(len(found))
    metrics |= speed_metrics(run, n_tokens, learnt_from)
    run.end_step(metrics)


def validate(run: Offline) -> None:
    """Judges the held-out items with the weights of now and logs val/*."""
    with run.timed("val"):
        run.val_metrics = run.lesson.judge(run, run.val)
    run.validated_at = run.step
    seconds = sum(run.take_seconds().values())  # scoring is a phase of its own only in a step
    run.logger.metrics(run.step, run.val_metrics | {"time/val_s": seconds})


def logps(
    run: Job,
    demonstrations: Sequence[Demonstration],
    score: Callable[[Job, Sequence[Batch]], list[np.ndarray]],
) -> list[np.ndarray]:
    """Logprobs of the loss tokens of each demonstration, by policy_logps or reference_logps."""
    packed = pack_samples([to_sample(d) for d in demonstrations], run.cfg, run.n_ranks)
    found = gather(score(run, [p.batch for p in packed]), packed)
    return [logp[d.loss_mask] for d, logp in zip(demonstrations, found, strict=True)]
