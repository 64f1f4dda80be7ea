"""Where rollouts are generated: by one engine over all devices, or by one in each process for its prompts.

An engine over the devices of several processes decodes in lock-step: every process schedules the same
sequences. One engine a process exchanges nothing while it decodes: it gets its copy of the weights, laid
out over its own devices, at the start of a rollout, and gives its responses to the others at the end. The
numbers are the same, since a token's random number depends on seed, prompt, sample and position alone.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from jaxrl.learner.layout import Layout
from jaxrl.trainer.interrupt import Interrupted, StopFlag
from jaxrl.types import Prompt, Rollout
from sharding import hosts

Sampled = tuple[list[Rollout], dict[str, float]]  # rollouts and rollout/* metrics


@dataclasses.dataclass(frozen=True)
class Engines:
    """The engine of this process and those of the others."""

    layout: Layout

    def n_mine(self, n_prompts: int) -> int:
        """How many of a rollout's prompts the engine of this process answers."""
        if not self.layout.of_process:
            return n_prompts
        return len(range(n_prompts)[hosts.share(n_prompts)])

    def generate(
        self,
        answer: Callable[[list[Prompt], Callable[[], None]], Sampled],
        prompts: Sequence[Prompt],
        stop: StopFlag,
    ) -> Sampled:
        """The rollouts of all prompts, on every process, through `answer(prompts, check)`, which calls
        `check` between dispatches. Raises Interrupted, on every process, where one of them was asked to
        stop."""
        if not self.layout.of_process:
            return answer(list(prompts), stop.check)
        rollouts, metrics = [], {}
        with contextlib.suppress(Interrupted):  # the next check raises it everywhere
            mine = prompts[hosts.share(len(prompts))]
            rollouts, metrics = answer(list(mine), stop.check_here)
        stop.check()
        found = hosts.joined([vars(r) | {"prompt": None} for r in rollouts])  # all have the prompts
        n = len(found) // len(prompts)
        every = [Rollout(**one | {"prompt": prompts[i // n]}) for i, one in enumerate(found)]
        return every, together(hosts.gather(metrics))


SUMS = ("tokens_per_s", "running", "waiting", "preempted", "prefill_tokens", "shared_tokens")


def together(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """The rollout/* metrics of all engines: sums of counts and rates, the largest of *_max, else means."""
    found = {}
    for name in parts[0]:
        values = [part[name] for part in parts if name in part]
        short = name.removeprefix("rollout/")
        found[name] = float(
            sum(values)
            if short in SUMS
            else max(values)
            if short.endswith("_max")
            else np.mean(values)
        )
    return found
