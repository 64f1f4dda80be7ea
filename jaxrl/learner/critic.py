"""Numbers for tokens: the values of PPO's critic, of a backbone of its own or the policy's, and a reward model's."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.config.keys import RunConfig
from jaxrl.data.packing import Packed
from jaxrl.layout import Layout, role_layout, training_rules
from jaxrl.learner.optimizer import Optimizer, make_optimizer
from jaxrl.learner.state import abstract_state, init_state
from jaxrl.learner.step import Update, make_value_update, make_values, put_batch, take_tokens
from jaxrl.models.config import DecoderConfig, for_platform
from jaxrl.models.decoder import decoder_specs
from jaxrl.models.files.hf_load import load_params, model_config
from jaxrl.types import TrainState, Tree
from sharding import target_platform


class Values:
    """The values of packed tokens."""

    def __init__(self, cfg: RunConfig, layout: Layout):
        self.cfg, self.layout = cfg, layout
        self.program = make_values(cfg, layout.rules)
        with layout.on_mesh():
            self.n_ranks = layout.rules.n_shards("batch")

    def of(
        self,
        params: Tree,
        packed: Sequence[Packed],
        on_batch: Callable[[], None] = lambda: None,
    ) -> list[np.ndarray]:
        """[B, T] of each micro-batch, made for `n_ranks`; `on_batch` is called before each."""
        found, rules = [], self.layout.rules
        with self.layout.on_mesh():
            for one in packed:
                on_batch()
                values = self.program(params, put_batch(one.batch, rules))
                found.append(take_tokens(values, rules))
        return found


@dataclasses.dataclass
class Critic:
    """A critic with a backbone of its own."""

    folder: Path  # of its model
    decoder: DecoderConfig
    values: Values
    optimizer: Optimizer
    update: Update
    state: TrainState  # the only reference: an update donates it. Abstract until it is loaded

    def load(self, *, offload: bool) -> None:
        """The state before the first update, from the folder."""
        layout = self.values.layout
        with layout.on_mesh():
            params = load_params(self.folder, layout.rules, self.decoder, layout.dtype)
            self.state = init_state(params, self.optimizer, offload=offload)


def make_critic(
    cfg: RunConfig,
    folder: Path,
    backbone: DecoderConfig | None,
    dtype: jnp.dtype,
    total_steps: int,
) -> Critic:
    """The critic of a run, with an abstract state, where config.critic.mesh lays it out; training's mesh is set.
    `backbone` is the shape of its model where the folder is not to be read.

    Raises ValueError where those sizes divide neither the devices nor the model.
    """
    own = cfg.critic_run
    backbone = model_config(folder) if backbone is None else backbone
    decoder = for_platform(own, backbone, target_platform())[1]
    decoder = dataclasses.replace(decoder, heads=("score",))
    layout = role_layout(cfg, "critic", decoder, dtype)
    mesh = layout.mesh(jax.sharding.get_mesh())
    specs = decoder_specs(decoder)
    optimizer = make_optimizer(own.learner, total_steps * own.updates_per_step, specs)
    with layout.on_mesh():
        state = abstract_state(
            specs,
            dtype,
            optimizer,
            layout.rules,
            mesh,
            offload="optimizer" in cfg.learner.offload,
        )
    update = make_value_update(own, optimizer, layout.rules)
    return Critic(folder, decoder, Values(own, layout), optimizer, update, state)


def policy_steps(cfg: RunConfig, total_steps: int) -> int:
    """Steps in which the policy learns. Raises ValueError where the critic's warm-up leaves none."""
    if 0 < total_steps <= cfg.critic.warmup_steps:
        raise ValueError(
            f"config.critic.warmup_steps={cfg.critic.warmup_steps} leaves none of the {total_steps} steps to the policy; "
            "set fewer"
        )
    return total_steps - cfg.critic.warmup_steps


def reward_values(
    cfg: RunConfig, backbone: DecoderConfig, dtype: jnp.dtype
) -> tuple[Values, DecoderConfig]:
    """(the scores of config.reward_model, its shape where they are made); training's mesh is set.

    Raises ValueError as `make_critic`.
    """
    own = cfg.reward_model_run
    decoder = for_platform(own, backbone, target_platform())[1]
    decoder = dataclasses.replace(decoder, heads=("score",))
    return Values(own, role_layout(cfg, "reward_model", decoder, dtype)), decoder


def shared_values(cfg: RunConfig, dtype: jnp.dtype) -> Values:
    """The values of the policy's own second head."""
    return Values(cfg, Layout(training_rules(cfg), resharding=None, specs=None, dtype=dtype))
