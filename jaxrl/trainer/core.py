"""The state of a run: `Core` for all training programs, `Run` for RL."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from jaxrl.checkpoint.checkpointer import Checkpointer
from jaxrl.config.keys import RunConfig
from jaxrl.data.content import Content
from jaxrl.data.iterator import Batches, PromptOutcome, StepItems
from jaxrl.data.packing import Packed, sequence_lens, shared_lens
from jaxrl.learner.coefficients import Coefficients
from jaxrl.learner.requirements import needs_old_logp, shares_base
from jaxrl.learner.reward_model import RewardModel
from jaxrl.learner.roles import Learner
from jaxrl.models.decoder import Decoder
from jaxrl.models.flops import forward_flops
from jaxrl.models.lora import silenced, without_adapters
from jaxrl.report.charts import PHASES
from jaxrl.rewards.pool import RewardPool
from jaxrl.rollout.engines import Engines
from jaxrl.rollout.local_judge import LocalJudge
from jaxrl.teachers.endpoint import TeacherEndpoint
from jaxrl.tracking.logger import Logger
from jaxrl.tracking.sample_images import write_images
from jaxrl.trainer.phases.length_stages import LengthStage
from jaxrl.trainer.phases.mini_batches import MiniBatch
from jaxrl.trainer.phases.rewards import RewardErrors, RewardScale, images_of, sample_records
from jaxrl.trainer.phases.trajectories import token_values, trajectories
from jaxrl.trainer.setup.models import Models
from jaxrl.trainer.setup.session import Session
from jaxrl.types import Demonstration, ScoredRollout, TrainState
from sharding.hosts import is_main_process


@dataclasses.dataclass(kw_only=True)
class Clock:
    """How far a run is: the steps done, what is due, and the seconds of the current step."""

    cfg: RunConfig
    total_steps: int
    validates: bool  # whether there are validation items
    step: int = 0  # steps done
    first_step: int = 0  # steps done when this process started
    step_restartable: bool = True  # no update of the current step has changed the state yet
    validated_at: int = -1  # the last step that was validated ...
    val_metrics: dict[str, float] = dataclasses.field(default_factory=dict)  # ... and its result
    saved_at: int = -1
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)  # time/* of this step

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Adds the wall time of the block to time/<phase>_s, and names the block in traces.

        Time of nested phases is excluded, except in the phase "step". An error in the block gets
        the phase as a note.
        """
        start, before = time.perf_counter(), sum(self.seconds.values())
        shown = PHASES.get(f"time/{phase}_s", phase)
        try:
            with jax.profiler.TraceAnnotation(shown):
                yield
        except Exception as error:
            error.add_note(f"in {shown} of step {self.step + 1}")
            raise
        finally:
            spent = time.perf_counter() - start
            if phase != "step":
                spent -= sum(self.seconds.values()) - before
            name = f"time/{phase}_s"
            self.seconds[name] = self.seconds.get(name, 0.0) + spent

    def take_seconds(self) -> dict[str, float]:
        """Returns and resets the timings."""
        seconds, self.seconds = self.seconds, {}
        return seconds

    @property
    def done(self) -> bool:
        return self.step >= self.total_steps

    @property
    def validation_due(self) -> bool:
        """Whether to validate now: before training, every eval.every steps, and at the end."""
        if not self.validates or self.validated_at == self.step:
            return False
        if self.step == 0:
            return self.cfg.eval.before_train
        return self.done or _every(self.cfg.eval.every, self.step)

    @property
    def refresh_due(self) -> bool:
        return _every(self.cfg.algorithm.ref_refresh_every, self.step)

    @property
    def save_due(self) -> bool:
        if self.saved_at == self.step:
            return False
        return self.done or _every(self.cfg.checkpoint.every, self.step)


@dataclasses.dataclass(kw_only=True)
class Core:
    """The state that a step of any program reads and changes, and the services of the run."""

    cfg: RunConfig
    session: Session
    checkpoints: Checkpointer
    logger: Logger
    models: Models
    learner: Learner
    iterator: Batches
    val: Sequence  # validation items, of the same type as the iterator's
    contents: Mapping[str, Content]  # hashes of data.train, data.val and data.demonstrations
    clock: Clock
    state: TrainState  # the only reference: an update donates it
    reference: Decoder | None  # a separate reference model; see `ref_params`
    more_references: Sequence[Decoder]  # of the learner's further teachers
    coefs: Coefficients  # KL and entropy coefficients of the next step
    reward_scale: RewardScale  # running moments of all rewards
    role_baselines: Mapping[str, float]  # running means of the rewards of an agent's roles
    peak_flops: float | None  # FLOP/s of all devices; None if unknown (planner/chips.py)
    length_stage: LengthStage  # of the next step
    position: dict  # iterator state after the steps done
    # Makes JSON of what was in flight after these steps; None: a step leaves nothing in flight.
    in_flight: Callable[[], dict[str, Any]] | None
    demonstrations: StepItems[Demonstration] | None = None  # of data.demonstrations
    # Teachers at servers, by index among all
    endpoints: Mapping[int, TeacherEndpoint] = dataclasses.field(default_factory=dict)

    def check_stop(self) -> None:
        """Raises Interrupted on a stop signal, only before the first update of the step."""
        if self.clock.step_restartable:
            self.session.stop.check()

    def check_lock(self) -> None:
        """Raises FolderLockError if another process took over the run folder."""
        if self.session.lock is not None:
            self.session.lock.check()

    def end_step(
        self, metrics: dict[str, float], *, n_tokens: int, trained: Sequence[Packed]
    ) -> None:
        """Increments the step counter and logs the metrics. Call it after the timed block "step".

        `n_tokens` counts the tokens of the step's sequences; `trained` are the micro-batches of one
        epoch.
        """
        self.check_lock()
        clock, self.position = self.clock, self.iterator.state()
        metrics = metrics | self.speed_metrics(n_tokens, trained)
        clock.step, clock.step_restartable = clock.step + 1, True
        self.logger.metrics(clock.step, metrics | clock.take_seconds())
        self.session.progress.steps(clock.step, clock.total_steps)

    def log_samples(
        self,
        step: int,
        scored: Sequence[ScoredRollout],
        *,
        kind: str,
        trained: Sequence[MiniBatch] = (),
    ) -> None:
        """Logs sampled responses.

        If the run writes JSONL, it also writes small copies of their images, and the trajectories
        of log.trajectories of them, with the values of `trained`.
        """
        found = {}
        if "jsonl" in self.cfg.log.loggers and is_main_process():
            if self.cfg.data.images:
                write_images(self.cfg.run_path, images_of(scored))
            if n := self.cfg.log.trajectories:
                values = token_values(trained, scored=needs_old_logp(self.cfg))
                found = trajectories(scored, values, self.models.renderer, n)
        self.logger.samples(step, sample_records(scored, kind=kind, trajectories=found))

    def speed_metrics(self, n_tokens: int, trained: Sequence[Packed]) -> dict[str, float]:
        """perf/tokens_per_s of the step, perf/tokens_per_s_per_device and perf/mfu_actor.

        perf/mfu_actor is the model FLOPs of the updates divided by the peak FLOPs of the devices
        during time/update_actor_s; tokens of shared prefixes count once.
        """
        seconds = self.clock.seconds
        rate = n_tokens / seconds["time/step_s"]
        metrics = {
            "perf/tokens_per_s": rate,
            "perf/tokens_per_s_per_device": rate / jax.device_count(),
        }
        if self.peak_flops is not None and trained:
            model = self.state.params.cfg
            whole, shared = (
                forward_flops(model, np.concatenate([lens(packed.batch) for packed in trained]))
                for lens in (sequence_lens, shared_lens)
            )
            flops = 3 * self.cfg.learner.epochs * (whole - shared)
            metrics["perf/mfu_actor"] = flops / (self.peak_flops * seconds["time/update_actor_s"])
        return metrics

    def no_compile(self, phase: str) -> contextlib.AbstractContextManager[None]:
        """Raises RecompileError if the block compiles, except in a process's first step."""
        step = self.clock.step
        armed = self.cfg.assert_no_recompile and step > self.clock.first_step
        return self.session.watch.no_compile(phase, step=step + 1, armed=armed)

    @property
    def ref_params(self) -> Decoder | None:
        """The weights of the reference model: separate ones, or the base of the adapters."""
        return without_adapters(self.state.params) if shares_base(self.cfg) else self.reference

    @property
    def judge_params(self) -> Decoder:
        """The weights of a judge on the run's own engine, in the form of training's."""
        if self.cfg.reward.judge.weights == "policy":
            return self.state.params
        if shares_base(self.cfg):
            return silenced(self.state.params)
        assert self.reference is not None, "reward.judge.weights needs a reference"
        return self.reference

    def sampling_seed(self, *, validation: bool, draw: int = 0) -> int:
        """The sampling seed of this step."""
        return sampling_seed(self.cfg.seed, self.clock.step, validation=validation, draw=draw)


@runtime_checkable
class HasCore(Protocol):
    """A run of any training program."""

    @property
    def core(self) -> Core: ...


@runtime_checkable
class Source(Protocol):
    """Where the scored rollouts of a step come from: the schedule (trainer/schedule/)."""

    def rollout(self, run: "Run", draw: int) -> Any:
        """The rollouts of the next `data.prompts_per_step` groups, in the schedule's own form.

        `draw` is the index of the batch within the step.
        """
        ...

    def reward(self, run: "Run", rollouts: Any) -> tuple[list[ScoredRollout], dict[str, float]]:
        """These rollouts with their rewards, by group, and their metrics.

        Some schedules compute rewards during the rollout, and wait here for the last ones.
        """
        ...

    def record(self, run: "Run", outcomes: Sequence[PromptOutcome]) -> None:
        """Gives the mean rewards of prompts to the curriculum of later draws."""
        ...

    def release_engine(self) -> None:
        """Frees the engine for requests of others. Responses in flight continue later."""
        ...

    def in_flight(self) -> Callable[[], dict[str, Any]] | None:
        """As `Core.in_flight`, of this moment."""
        ...


@dataclasses.dataclass(frozen=True)
class Run:
    """An RL run: samples rollouts, scores them with rewards, and trains on them."""

    core: Core
    rewards: RewardPool
    reward_errors: RewardErrors
    reward_model: RewardModel | None
    engines: Engines
    source: Source
    judge: LocalJudge | None = None  # None: no judge is on the run's devices


def sampling_seed(seed: int, step: int, *, validation: bool, draw: int = 0) -> int:
    """The sampling seed of a step.

    It differs between steps, and between the batches (`draw`) of one step, so a repeated prompt
    gets new samples.
    """
    entropy = [seed, step, int(validation), *([draw] if draw else [])]
    return int(np.random.SeedSequence(entropy).generate_state(1)[0])


def _every(period: int, step: int) -> bool:
    return period > 0 and step > 0 and step % period == 0
