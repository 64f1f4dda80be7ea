"""The parts of one run, and what it remembers between steps."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from jaxrl.config.keys import RunConfig
from jaxrl.data.chat import ChatRenderer
from jaxrl.data.iterator import BatchIterator
from jaxrl.io.checkpoint.checkpointer import Checkpointer
from jaxrl.io.tracking.loggers import Logger
from jaxrl.io.tracking.progress import Progress
from jaxrl.learner.critic import Critic, Values
from jaxrl.learner.optimizer import Optimizer
from jaxrl.learner.step import Scorer, Update
from jaxrl.models.decoder import Decoder
from jaxrl.rewards.pool import RewardPool
from jaxrl.rollout.engines import Engines
from jaxrl.runtime.compile_watch import CompileWatch
from jaxrl.runtime.signals import StopFlag
from jaxrl.trainer.coefficients import Coefficients
from jaxrl.trainer.scoring import RewardModel
from jaxrl.trainer.shaping import RewardScale
from jaxrl.types import Prompt, TrainState


@dataclasses.dataclass(kw_only=True)
class Job:
    """What every training program holds in its hands. Built by trainer/setup.py."""

    cfg: RunConfig
    folder: Path
    model_folder: Path
    total_steps: int
    n_ranks: int  # data-parallel ranks
    renderer: ChatRenderer
    iterator: BatchIterator
    val: Sequence  # held-out items, of the kind that the iterator gives
    optimizer: Optimizer
    update: Update
    scorer: Scorer  # of the policy's logprobs
    ref_scorer: Scorer
    ref_params: Decoder | None
    values: Values | None  # where advantages need them
    critic: Critic | None  # whose they are, unless the policy's own second head gives them
    checkpoints: Checkpointer
    logger: Logger
    progress: Progress
    watch: CompileWatch
    stop: StopFlag
    state: TrainState  # the only reference: an update donates it
    coefs: Coefficients  # weights of KL and entropy in the next step
    reward_scale: RewardScale  # of the rewards of the steps done
    step: int = 0  # steps done
    whole: bool = True  # no update of the next step has changed `state` yet
    position: dict = dataclasses.field(default_factory=dict)  # of the iterator after `step` steps
    first_step: int = 0  # of this process
    validated_at: int = -1  # the last step that was validated ...
    val_metrics: dict[str, float] = dataclasses.field(default_factory=dict)  # ... and its result
    saved_at: int = -1
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)  # of the step under way

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Adds the block's wall seconds to time/<phase>_s of this step, without those of phases inside it; `step`
        holds all."""
        start, before = time.perf_counter(), sum(self.seconds.values())
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            if phase != "step":
                spent -= sum(self.seconds.values()) - before
            name = f"time/{phase}_s"
            self.seconds[name] = self.seconds.get(name, 0.0) + spent

    def take_seconds(self) -> dict[str, float]:
        """The timings so far; counting begins anew."""
        seconds, self.seconds = self.seconds, {}
        return seconds

    def check_stop(self) -> None:
        """Raises Interrupted as long as nothing of the step has been learnt yet."""
        if self.whole:
            self.stop.check()

    def end_step(self, metrics: dict[str, float]) -> None:
        """Counts the step as done and logs it."""
        self.step, self.position, self.whole = self.step + 1, self.iterator.state(), True
        self.logger.metrics(self.step, metrics | self.take_seconds())
        self.progress.steps(self.step, self.total_steps)

    def no_compile(self, phase: str) -> contextlib.AbstractContextManager[None]:
        """Raises RecompileError if the block compiles, from this process's second step on."""
        armed = self.cfg.assert_no_recompile and self.step > self.first_step
        return self.watch.no_compile(phase, step=self.step + 1, armed=armed)

    @property
    def done(self) -> bool:
        return self.step >= self.total_steps

    @property
    def validation_due(self) -> bool:
        """Before training, every eval.every steps, and at the end, where there is validation data."""
        if not self.val or self.validated_at == self.step:
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
class Run(Job):
    """What the loop of jaxrl/train.py holds: a job that samples and is rewarded for it."""

    rewards: RewardPool
    reward_model: RewardModel | None
    engines: Engines

    def sampling_seed(self, *, validation: bool, draw: int = 0) -> int:
        """Seed of this step's samples."""
        return sampling_seed(self.cfg.seed, self.step, validation=validation, draw=draw)


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What jaxrl/evaluate.py holds: a model that answers and is rewarded, and learns nothing from it."""

    prompts: list[Prompt]
    rewards: RewardPool
    reward_model: RewardModel | None
    engines: Engines
    params: Decoder  # as engines.layout says


def sampling_seed(seed: int, step: int, *, validation: bool, draw: int = 0) -> int:
    """Seed of a step's samples: a prompt met again in a later step, or in a later batch of the same step, is
    sampled anew."""
    entropy = [seed, step, int(validation), *([draw] if draw else [])]
    return int(np.random.SeedSequence(entropy).generate_state(1)[0])


def _every(period: int, step: int) -> bool:
    return period > 0 and step > 0 and step % period == 0
