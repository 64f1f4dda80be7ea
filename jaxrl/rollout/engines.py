"""Where rollouts are generated: by one engine over all devices, or by one in each process for its prompts.

An engine over the devices of several processes decodes in lock-step: every process schedules the same
sequences. One engine a process exchanges nothing while it decodes: it gets its copy of the weights, laid
out over its own devices, at the start of a rollout, and gives its responses to the others at the end. The
numbers are the same, since a token's random number depends on seed, prompt, sample and position alone.
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence

import numpy as np

from jaxrl.config.keys import SamplingConfig
from jaxrl.data.chat import ChatRenderer
from jaxrl.engine.engine import PagedEngine
from jaxrl.environments.pool import EnvironmentPool
from jaxrl.io.tracking.progress import Progress
from jaxrl.layout import Layout
from jaxrl.rollout.generate import generate
from jaxrl.rollout.multi_turn import Limits, converse
from jaxrl.runtime.signals import Interrupted, StopFlag
from jaxrl.types import Prompt, Rollout, Tree
from sharding import hosts

Sampled = tuple[list[Rollout], dict[str, float]]  # rollouts and rollout/* metrics


@dataclasses.dataclass(frozen=True)
class Engines:
    """The engine of this process and those of the others."""

    layout: Layout
    engine: PagedEngine
    renderer: ChatRenderer
    limits: Limits
    environments: EnvironmentPool | None  # in which prompts are answered
    progress: Progress
    stop: StopFlag

    def sample(
        self,
        params: Tree,
        prompts: Sequence[Prompt],
        *,
        n: int,
        sampling: SamplingConfig,
        seed: int,
        version: int,
        name: str,
    ) -> Sampled:
        """`n` responses to each prompt, side by side, on every process; `params` lie as `layout` says.

        A bar of that `name` shows how far this process is. Raises Interrupted, on every process, where one
        of them was asked to stop.
        """
        per_process = self.layout.per_process
        mine = prompts[hosts.local_slice(len(prompts))] if per_process else prompts
        check = self.stop.check_local if per_process else self.stop.check
        rollouts, metrics = [], {}
        with (
            # of one process: the check below raises it everywhere
            contextlib.suppress(*[Interrupted] if per_process else []),
            self.progress.phase(name, total=len(mine) * n) as bar,
        ):
            start = time.perf_counter()

            def on_progress(n_tokens: int, n_done: int, n_all: int) -> None:
                check()
                bar.update(n_done, f"{n_tokens / (time.perf_counter() - start):.0f} tok/s")

            rollouts, metrics = self._answer()(
                self.engine,
                params,
                mine,
                n=n,
                sampling=sampling,
                seed=seed,
                version=version,
                on_progress=on_progress,
            )
        return self._of_all(prompts, rollouts, metrics, n) if per_process else (rollouts, metrics)

    def _answer(self) -> Callable[..., Sampled]:
        """How a prompt is answered: at once, or in turns with an environment."""
        if self.environments is None:
            return functools.partial(
                generate, max_tokens=self.limits.max_tokens, decode=self.renderer.decode
            )
        return functools.partial(
            converse,
            limits=self.limits,
            pool=self.environments,
            renderer=self.renderer,
            eos_ids=self.engine.eos_ids,
        )

    def _of_all(
        self, prompts: Sequence[Prompt], mine: list[Rollout], metrics: dict[str, float], n: int
    ) -> Sampled:
        """What every process sampled, brought together."""
        self.stop.check()
        known = {"prompt": None} if self.environments is None else {}  # all have the prompts
        found = hosts.gather_items([vars(r) | known for r in mine])
        every = [
            Rollout(**one | {"prompt": one["prompt"] or prompts[i // n]})
            for i, one in enumerate(found)
        ]
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
