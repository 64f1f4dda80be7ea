"""A run without devices: the groups in flight, an engine with a clock, and a trainer's times.

jaxrl/rollout/schedule decides on groups, batches, staleness and the responses that continue under
new weights, and jaxrl/engine on dispatches; only times come from a plan. The schedules are AReaL's
(arXiv:2505.24298, section 5.1) and, with partial rollouts, Kimi k1.5's (arXiv:2501.12599, section
2.6.2).
"""

import dataclasses
import itertools

import numpy as np

from jaxrl.config.keys import ScheduleConfig
from jaxrl.engine.api import Request
from jaxrl.planner.schedules.engine import SimulatedEngine
from jaxrl.rollout.loop import RolloutLoop, SingleTurnRunner
from jaxrl.rollout.schedule.buffer import GroupBuffer, PromptGroup
from jaxrl.types import Prompt


@dataclasses.dataclass(frozen=True)
class TrainingCosts:
    """Times of a training step."""

    token_s: float  # per token of prompts and responses, scoring included
    pair_s: float  # per token and key: a sequence of T tokens has T^2 / 2 pairs
    update_s: float  # whatever the tokens
    transfer_s: float  # of new weights to the replicas


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Means over the training steps after the first ones."""

    step_s: float
    training_s: float  # scoring and update of a step
    tokens_per_s: float  # trained response tokens
    rollout_idle: float  # share of the time in which a replica has no response to decode
    trainer_idle: float  # share of the time in which the trainer waits; 0 on shared devices
    staleness_mean: float  # of responses, from the version of the first token
    staleness_max: int
    versions_per_response: float


def simulate(
    costs: TrainingCosts,
    engine: SimulatedEngine,
    schedule: ScheduleConfig,
    lengths: np.ndarray,
    *,
    prompt_len: int,
    groups_per_step: int,
    n_steps: int = 7,
    n_warmup: int = 3,
) -> Outcome:
    """The steady state of a run whose groups have responses of `lengths` [groups, samples].

    Groups repeat after the last. The first `n_warmup` of `n_steps` training steps are not counted.
    """
    rollout, shared = _Rollout(engine, schedule, lengths, groups_per_step), schedule.mode != "async"
    weights_at = [0.0]  # when the engine may begin with the weights of each version
    # Of each step: its batch is ready, the replicas were busy until then, its end, its training.
    times: list[tuple[float, float, float, float]] = []
    n_tokens, ages, n_versions = [], [], []  # of the responses of the counted steps
    for step in range(n_steps):
        version = max(step - schedule.lag, 0)
        engine.seconds = max(engine.seconds, weights_at[version])
        batch = rollout.next_batch(step, version)
        begin = max(engine.seconds, weights_at[step])
        response_lens = [length for group in batch for length in rollout.lengths_of(group)]
        totals = [prompt_len + length for length in response_lens]
        train_s = costs.update_s + sum(totals) * costs.token_s
        train_s += sum(total**2 for total in totals) / 2 * costs.pair_s
        weights_at.append(begin + train_s + costs.transfer_s)
        times.append((engine.seconds, engine.busy_s, begin + train_s, train_s))
        if step >= n_warmup:
            versions = [response.versions for group in batch for response in group.responses]
            n_tokens += response_lens
            ages += [step - of_tokens[0] for of_tokens in versions]
            n_versions += [len(set(of_tokens)) for of_tokens in versions]
    ready_s, busy_s, end_s, train_s = zip(*times[n_warmup - 1 :], strict=True)
    seconds, busy = end_s[-1] - end_s[0], (busy_s[-1] - busy_s[0]) / engine.n_replicas
    if shared:  # the replicas have no devices during updates
        busy += sum(one + costs.transfer_s for one in train_s[:-1])
    return Outcome(
        step_s=seconds / (n_steps - n_warmup),
        training_s=sum(train_s[1:]) / (n_steps - n_warmup),
        tokens_per_s=sum(n_tokens) / seconds,
        rollout_idle=max(1 - busy / (ready_s[-1] - ready_s[0]), 0.0),
        trainer_idle=0.0 if shared else 1 - sum(train_s[1:]) / seconds,
        staleness_mean=sum(ages) / len(ages),
        staleness_max=max(ages),
        versions_per_response=sum(n_versions) / len(ages),
    )


class _Rollout:
    """Generates batch after batch as jaxrl/trainer/schedule does, of given lengths."""

    def __init__(
        self,
        engine: SimulatedEngine,
        schedule: ScheduleConfig,
        lengths: np.ndarray,
        groups_per_step: int,
    ):
        self.lengths, self.prompt_len = lengths.tolist(), engine.prompt_len
        self.buffer = GroupBuffer(
            groups_per_step,
            max_started=schedule.max_started(groups_per_step),
            max_staleness=schedule.max_staleness,
            arrival=schedule.order == "arrival",
        )

        def request(group: PromptGroup, sample: int) -> Request:
            return Request(
                tokens=group.prompt.tokens,
                max_tokens=engine.n_units(self.lengths_of(group)[sample]),
                prompt_id=group.prompt.id,
                sample=sample,
                ignore_stop=True,
            )

        runner = SingleTurnRunner(engine, request, decode=lambda tokens: "")
        self.loop = RolloutLoop(runner, n=lengths.shape[1], keep_kv=schedule.keep_kv)
        self._numbers = itertools.count()

    def lengths_of(self, group: PromptGroup) -> list[int]:
        """Tokens of its responses in the run."""
        return self.lengths[group.index % len(self.lengths)]

    def next_batch(self, step: int, version: int) -> list[PromptGroup]:
        """Starts groups with the weights of `version`; decodes until the batch is complete."""
        for _ in range(self.buffer.n_missing):
            number = next(self._numbers)
            tokens = np.full(self.prompt_len, -1 - number, np.int32)
            prompt = Prompt(number, (), tokens, answer="")
            self.buffer.waiting.append(PromptGroup(prompt, 0, 0, number))
        self.buffer.start(version)
        self.loop.resume(version, self.buffer.started)
        while (batch := self.buffer.next_batch(step)) is None:
            for group in self.loop.dispatch(None):
                self.buffer.arrive(group)
        self.buffer.take(batch)
        return batch
