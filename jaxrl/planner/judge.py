"""A judge on the devices of a run, in its plan: memory, programs, and requests of a step."""

import dataclasses
import functools
import math
from collections.abc import Mapping

import jax
from jax.sharding import Mesh

from jaxrl.config.keys import RunConfig
from jaxrl.config.plugins import options
from jaxrl.config.schema import to_dict
from jaxrl.engine.device.model_runner import COPIES
from jaxrl.engine.engine import PagedEngine
from jaxrl.learner.programs import Lower
from jaxrl.models.config import DecoderConfig
from jaxrl.rollout.judge_model import judge_engine
from jaxrl.types import Tree
from sharding import bytes_per_device

PREFIX = "judge_"  # of the names of its programs


@dataclasses.dataclass(frozen=True)
class PlannedJudge:
    """The engine of a judge from reward.judge.path, with abstract weights. Bytes are per device."""

    cfg: RunConfig
    engine: PagedEngine
    weights: Tree
    mesh: Mesh  # of the engine

    @property
    def resident(self) -> dict[str, int]:
        """The bytes of its weights, and of its KV pages unless they are freed between uses."""
        with jax.set_mesh(self.mesh):
            pool = self.engine.pool
            pages = pool.bytes_per_device.of_pages(self.n_pages) + pool.slots_bytes_per_device
        found = {"judge": bytes_per_device(self.weights), "judge_kv": pages}
        if "judge" in self.cfg.learner.offload:
            del found["judge_kv"]
        return found

    @property
    def n_pages(self) -> int:
        return self.engine.rollout.n_pages

    def lowerings(self) -> dict[str, tuple[Lower, tuple[str, ...]]]:
        """(function that lowers it, state among its arguments) of each program by its name."""
        kinds = dict.fromkeys(one.kind for one in self.engine.runner.declared(adjustable=False))
        state = tuple(self.resident)
        return {
            f"{PREFIX}{kind}": (
                functools.partial(self._lower, kind),
                tuple(name for name in state if kind not in COPIES or name != "judge"),
            )
            for kind in kinds
        }

    def _lower(self, kind: str) -> jax.stages.Lowered:
        with jax.set_mesh(self.mesh):
            runner = self.engine.runner
            return runner.lower_largest(self.weights, self.n_pages, kind, adjusted=True)


def plan_judge(cfg: RunConfig, backbone: DecoderConfig) -> PlannedJudge | None:
    """The judge of a run with training's mesh set; None without reward.judge.path."""
    if not cfg.reward.judge.path:
        return None
    engine, layout = judge_engine(cfg, backbone)
    mesh = jax.sharding.get_mesh()
    weights = layout.abstract_weights(engine.cfg, mesh)
    return PlannedJudge(cfg, engine, weights, layout.mesh(mesh))


def requests_per_response(cfg: RunConfig) -> float:
    """Requests of all judges of reward.functions for each response of a step."""
    total = 0.0
    for function in cfg.reward.functions:
        name, given = function.partition("?")[0], to_dict(cfg.reward.judge) | options(function)
        if name == "judge":
            total += 1
        elif name == "judge_pairs":
            in_group = given["against"] == "group"
            opponents = given["opponents"] or cfg.rollout.n - 1
            pairs = opponents / 2 if in_group else 1
            total += pairs * (2 if given["swap"] else 1)
    return total


def judge_calls(
    cfg: RunConfig, engine: PagedEngine, n_responses: int, n_replicas: int
) -> Mapping[str, int]:
    """Calls of the programs of a judge's engine in a step, by kind; of decode, single steps.

    All prompts and verdicts have their maximum length.
    """
    judge, shapes = cfg.reward.judge, engine.shapes
    requests = requests_per_response(cfg) * n_responses / n_replicas
    rollout = engine.rollout
    together = rollout.max_num_seqs
    if rollout.n_pages:
        together = min(together, max(rollout.n_pages // shapes.max_pages_per_seq, 1))
    dispatch = shapes.prefill_buckets[-1] * shapes.prefill_row_len
    return {
        "prefill": math.ceil(requests * judge.max_prompt_len / dispatch),
        "decode": math.ceil(requests / together) * judge.max_verdict_len,
    }
