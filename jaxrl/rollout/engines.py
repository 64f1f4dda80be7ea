"""Rollouts over processes: one engine over all devices, or one engine per process for its prompts.

An engine over the devices of several processes decodes in lock-step: every process schedules the
same sequences. With one engine per process there is no communication during decode. Each engine
gets a copy of the weights, resharded over its own devices, at the start of a rollout; the processes
gather the responses at the end. The results are the same, since a token's random number depends
only on seed, prompt, sample and position.

Rollout workers are divided over the processes, which send them requests and weights:

    process 0 --- workers 0, 1     prompts 0 .. B/2 - 1 of each step
    process 1 --- workers 2, 3     prompts B/2 .. B - 1
    process 2                      has none: 4 workers cannot be divided by 3
"""

import contextlib
import dataclasses
import math
import time
from collections.abc import Sequence

import numpy as np

from jaxrl.config.keys import RunConfig, SamplingConfig
from jaxrl.data.chat.encoding import ChatRenderer
from jaxrl.engine.engine import PagedEngine
from jaxrl.environments.pool import EnvironmentPool
from jaxrl.layout import Layout
from jaxrl.rollout.agents.episode import AgentLimits
from jaxrl.rollout.agents.runner import AgentRunner, Agents
from jaxrl.rollout.agents.turn import TurnReader
from jaxrl.rollout.loop import EpisodeRunner, SingleTurnRunner, generate, sampled_requests
from jaxrl.rollout.multi_turn import EnvironmentRunner, EpisodeLimits
from jaxrl.rollout.remote.pool import WorkerPool
from jaxrl.rollout.remote.weights import RemoteWeights
from jaxrl.rollout.request_images import EpisodeImages
from jaxrl.runtime.signals import Interrupted, StopFlag
from jaxrl.tool_calls.formats import ToolFormat
from jaxrl.tracking.progress import Progress
from jaxrl.types import Prompt, Rollout, Tree
from sharding import hosts

Sampled = tuple[list[Rollout], dict[str, float]]  # rollouts and rollout/* metrics
SUMMED = (
    *("tokens_per_s", "running", "waiting", "preempted", "prefill_tokens", "shared_tokens"),
    *("buffer/size", "buffer/dropped"),
    *("workers/ready", "workers/lost", "workers/moved_requests", "weights/published_bytes"),
)


@dataclasses.dataclass(frozen=True)
class Engines:
    """The engine of this process, and its communication with the engines of other processes."""

    layout: Layout | RemoteWeights
    engine: PagedEngine | WorkerPool
    renderer: ChatRenderer
    eos_ids: tuple[int, ...]
    limits: EpisodeLimits
    agent_limits: AgentLimits
    environments: EnvironmentPool | Agents | None  # None for single-turn rollouts
    tool_format: ToolFormat | None  # None if the environment has no tools
    progress: Progress
    stop: StopFlag
    n_generating: int  # processes that generate, the first ones
    images: EpisodeImages | None = None  # None: a run without images

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
        """`n` rollouts per prompt, in order, on every process.

        `params` are sharded as `layout` specifies. A progress bar called `name` shows the progress
        of this process. Raises Interrupted on every process if one of them received a stop signal.
        """
        per_process = self.layout.per_process
        mine = (
            prompts[hosts.local_slice(len(prompts), self.n_generating)] if per_process else prompts
        )
        check = self.stop.check_local if per_process else self.stop.check
        rollouts, metrics = [], {}
        with (
            hosts.raise_together(),
            # On one process only: the check in `_gather` raises it on every process.
            contextlib.suppress(*[Interrupted] if per_process else []),
            self.progress.phase(name, total=len(mine) * n) as bar,
        ):
            start = time.perf_counter()

            def on_progress(n_tokens: int, n_done: int, n_all: int) -> None:
                check()
                bar.update(n_done, f"{n_tokens / (time.perf_counter() - start):.0f} tok/s")

            rollouts, metrics = generate(
                self.runner(self.environments, sampling),
                params,
                mine,
                n=n,
                seed=seed,
                version=version,
                on_progress=on_progress,
            )
        return self._gather(prompts, rollouts, metrics, n) if per_process else (rollouts, metrics)

    def take_metrics(self) -> dict[str, float]:
        """Metrics of rollout workers and their weights since the last call; {} without workers."""
        if not isinstance(self.engine, WorkerPool) or not isinstance(self.layout, RemoteWeights):
            return {}
        return self.engine.take_metrics() | self.layout.take_metrics()

    def runner(
        self, environments: EnvironmentPool | Agents | None, sampling: SamplingConfig
    ) -> EpisodeRunner:
        """Plays episodes in `environments`, which may differ from `sample`'s.

        With None, an episode is a response of a single turn.
        """
        if environments is None:
            make_request = sampled_requests(sampling, self.limits.max_tokens, self.images)
            return SingleTurnRunner(self.engine, make_request, self.renderer.decode)
        if isinstance(environments, Agents):
            return AgentRunner(
                self.engine,
                environments,
                TurnReader(self.renderer, self.eos_ids),
                sampling=sampling,
                limits=self.agent_limits,
                images=self.images,
            )
        return EnvironmentRunner(
            self.engine,
            environments,
            self.renderer,
            self.eos_ids,
            sampling=sampling,
            limits=self.limits,
            tool_format=self.tool_format,
            images=self.images,
        )

    def _gather(
        self, prompts: Sequence[Prompt], mine: list[Rollout], metrics: dict[str, float], n: int
    ) -> Sampled:
        """The rollouts and metrics of all processes.

        Single-turn rollouts travel without their prompts and images, which every process has.
        """
        self.stop.check()
        known = {"prompt": None, "images": ()} if self.environments is None else {}
        gathered = hosts.gather_items([vars(r) | known for r in mine])
        if known:
            for i, fields in enumerate(gathered):
                prompt = prompts[i // n]
                fields |= {"prompt": prompt, "images": prompt.images}
        rollouts = [Rollout(**fields) for fields in gathered]
        return rollouts, merge_metrics(hosts.gather(metrics)[: self.n_generating])


def merge_metrics(per_engine: Sequence[dict[str, float]]) -> dict[str, float]:
    """The metrics of all engines: sum of counts and rates, maximum of *_max, or mean."""
    merged = {}
    for name in per_engine[0]:
        values = [metrics[name] for metrics in per_engine if name in metrics]
        short = name.removeprefix("rollout/")
        if short in SUMMED:
            merged[name] = float(sum(values))
        elif short.endswith("_max"):
            merged[name] = float(max(values))
        else:
            merged[name] = float(np.mean(values))
    return merged


def generating_processes(cfg: RunConfig) -> int:
    """The number of processes that generate: the first ones of the run.

    With rollout workers these are as many as can have equal numbers of them.
    """
    n = hosts.n_processes()
    if not cfg.schedule.rollout_workers:
        return n
    common = math.gcd(*cfg.schedule.n_workers)
    most = min(n, common, cfg.data.prompts_per_step)
    return next(k for k in range(most, 0, -1) if common % k == 0)


def workers_of_process(cfg: RunConfig) -> tuple[int, int]:
    """(rollout workers of this process to begin with, the most that it uses)."""
    n_processes = generating_processes(cfg)
    if hosts.process_id() >= n_processes:
        return 0, 0
    n_workers, most = cfg.schedule.n_workers
    return n_workers // n_processes, most // n_processes
