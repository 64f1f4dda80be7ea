"""Where rollouts are generated: by one engine over all devices, or by one in each process for its prompts.

An engine over the devices of several processes decodes in lock-step: every process schedules the same
sequences, and weights are gathered over the network in every step. One engine a process
exchanges nothing while it decodes: it gets its copy of the weights, laid out over its own devices, at
the start of a rollout, and gives its responses to the others at the end. The numbers are the same, since
a token's random number depends on seed, prompt, sample and position alone.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxrl.config import RunConfig
from jaxrl.trainer.interrupt import Interrupted, StopFlag
from jaxrl.types import Prompt, Rollout, Tree
from sharding import hosts
from sharding.mesh import split_by_process

Sampled = tuple[list[Rollout], dict[str, float]]  # rollouts and rollout/* metrics


@dataclasses.dataclass(frozen=True)
class Engines:
    """The devices that the engine of this process works on; `own` None: those of the whole run."""

    own: Mesh | None  # of this process's devices
    copies: Mesh | None  # all devices, the first axis over processes, the others those of `own`

    @contextlib.contextmanager
    def weights(self, params: Tree) -> Iterator[Tree]:
        """The parameters where the engine works, and its mesh set. The trainer's own arrays where that
        is the mesh of the run; else a copy that lives as long as the block."""
        if self.own is None or self.copies is None:
            yield params
            return
        own, copies = self.own, self.copies

        def copy(leaf: jax.Array) -> jax.Array:
            spec = jax.typeof(leaf).sharding.spec
            everywhere = jax.device_put(leaf, NamedSharding(copies, spec))
            shards = [shard.data for shard in everywhere.addressable_shards]
            return jax.make_array_from_single_device_arrays(
                leaf.shape, NamedSharding(own, spec), shards
            )

        with jax.set_mesh(copies):  # the order of its devices may be another one than the run's
            local = jax.tree.map(copy, params)
        with jax.set_mesh(own):
            yield local

    def n_mine(self, n_prompts: int) -> int:
        """How many of a rollout's prompts the engine of this process answers."""
        return n_prompts if self.own is None else len(range(n_prompts)[hosts.share(n_prompts)])

    def generate(
        self,
        answer: Callable[[list[Prompt], Callable[[], None]], Sampled],
        prompts: Sequence[Prompt],
        stop: StopFlag,
    ) -> Sampled:
        """The rollouts of all prompts, on every process, through `answer(prompts, check)`, which calls
        `check` between dispatches. Raises Interrupted, on every process, where one of them was asked to
        stop."""
        if self.own is None:
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


def place_engines(cfg: RunConfig) -> Engines:
    """As `rollout.engines` says, on the mesh that is set. Raises ValueError where one engine a process is
    asked for and a process has not the devices for it."""
    mesh = jax.sharding.get_mesh()
    if not mesh.is_multi_process or cfg.rollout.engines == "mesh":
        return Engines(None, None)
    try:
        return Engines(*split_by_process(mesh))
    except ValueError as problem:
        if cfg.rollout.engines == "auto":
            return Engines(None, None)
        raise ValueError(
            f"config.rollout.engines='process' is not possible: {problem}; set smaller sizes in config.mesh, or "
            "config.rollout.engines='mesh'"
        ) from problem


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
