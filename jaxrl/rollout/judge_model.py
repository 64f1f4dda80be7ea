"""A judge that is a second model on the devices of the run: its weights and its engine.

It may be of another family than the policy, with another tokenizer. Its weights are sharded as the
engine of the rollouts shards the policy's, and stay so. With learner.offload=judge they are in host
memory between uses, and its KV pages are freed.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.sharding import Mesh

from jaxrl.config.keys import RunConfig
from jaxrl.engine.engine import PagedEngine
from jaxrl.layout import Layout, rollout_layout
from jaxrl.models.config import DecoderConfig, for_platform
from jaxrl.models.files.hf_load import load_params, model_config
from jaxrl.models.lora import with_adapters
from jaxrl.rollout.paged_engine import paged_engine
from jaxrl.types import Tree
from sharding import target_platform, to_device, to_host


@dataclasses.dataclass(frozen=True)
class JudgeModel:
    """The weights and the engine of a judge from reward.judge.path."""

    engine: PagedEngine
    params: Tree  # in host memory if `offloaded`
    mesh: Mesh  # of the engine
    offloaded: bool

    @contextlib.contextmanager
    def weights(self) -> Iterator[Tree]:
        """The weights on the devices, with the engine's mesh set.

        Offloaded weights are copied there for the time of the block.
        """
        with jax.set_mesh(self.mesh):
            if not self.offloaded:
                yield self.params
                return
            params = to_device(self.params)
            try:
                yield params
            finally:
                self.engine.release()
                for leaf in jax.tree.leaves(params):
                    leaf.delete()


def judge_engine(
    cfg: RunConfig, backbone: DecoderConfig, eos_ids: tuple[int, ...] = ()
) -> tuple[PagedEngine, Layout]:
    """The engine of a judge of this shape, and the layout of its weights.

    Training's mesh is the current one. Raises ValueError if the layout of the rollout does not
    divide the model.
    """
    run = cfg.judge_run
    dtype, decoder = for_platform(run, backbone, target_platform())
    decoder = with_adapters(run.lora, decoder)
    layout = rollout_layout(run, decoder, dtype)
    return paged_engine(run, run.rollout, layout, decoder, eos_ids, adjustable=True), layout


def load_judge(cfg: RunConfig, folder: Path, eos_ids: tuple[int, ...]) -> JudgeModel:
    """Loads the model in `folder`. Raises the errors of `judge_engine`."""
    engine, layout = judge_engine(cfg, model_config(folder), eos_ids)
    offloaded, mesh = "judge" in cfg.learner.offload, layout.mesh(jax.sharding.get_mesh())
    with jax.set_mesh(mesh):
        params = load_params(folder, layout.rules, engine.cfg, layout.dtype)
        if offloaded:
            params = to_host(params)
    return JudgeModel(engine, params, mesh, offloaded)
