"""Per-token values of PPO's critic (separate or shared) and scores of a reward model."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.config.keys import RunConfig
from jaxrl.data.packing import Packed
from jaxrl.layout import Layout, role_layout, training_rules
from jaxrl.learner.image_encoder import ImageEncoder
from jaxrl.learner.optimizer import Optimizer, check_opt_state, make_optimizer
from jaxrl.learner.optimizers.patterns import found_patterns
from jaxrl.learner.state import abstract_state, init_state
from jaxrl.learner.step import Update, make_value_update, make_values, put_batch, take_tokens
from jaxrl.models.config import DecoderConfig, for_platform
from jaxrl.models.decoder import decoder_specs
from jaxrl.models.files.adapter import load_with_adapters
from jaxrl.models.files.hf_load import load_params
from jaxrl.models.lora import split, with_adapters, with_base
from jaxrl.runtime.call_queue import CallQueue
from jaxrl.runtime.flat_program import flatten
from jaxrl.types import TrainState, Tree
from sharding import target_platform, to_device, to_host


class ValueScorer:
    """Computes the values of packed tokens: a critic's, or the scores of a reward model."""

    def __init__(self, cfg: RunConfig, layout: Layout, encoder: ImageEncoder | None = None):
        self.cfg, self.layout, self.encoder = cfg, layout, encoder
        self.program = make_values(cfg, layout.rules)
        with layout.on_mesh():
            self.n_ranks = layout.rules.n_shards("batch")

    def values(
        self,
        params: Tree,
        packed: Sequence[Packed],
        on_batch: Callable[[], None] = lambda: None,
    ) -> list[np.ndarray]:
        """Values [B, T] of each micro-batch; pack them for `n_ranks` data-parallel ranks.

        `on_batch` is called before each device call.
        """
        result: list[np.ndarray] = []
        params, rules = flatten(params), self.layout.rules

        def read(values: jax.Array) -> None:
            result.append(take_tokens(values, rules))

        with self.layout.on_mesh(), CallQueue() as calls:
            for one in packed:
                calls.make_room()
                on_batch()
                batch = put_batch(one.batch, rules, encoder=self.encoder)
                values = self.program(params, batch)
                calls.add(functools.partial(read, values))
        return result


@dataclasses.dataclass
class Critic:
    """A separate critic: its model, optimizer and train state."""

    folder: Path  # model folder
    decoder: DecoderConfig
    scorer: ValueScorer
    optimizer: Optimizer
    update: Update
    state: TrainState  # the only reference, since an update donates it; abstract until `load`
    offload: bool  # whether the weights are in host memory between uses

    @property
    def params(self) -> Tree:
        """The weights in device memory."""
        return to_device(self.state.params)

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Has the weights in device memory for updates, on the critic's mesh."""
        with self.scorer.layout.on_mesh():
            self.state = dataclasses.replace(self.state, params=self.params)
            yield
            self._rest()

    def load(self, *, offload: bool) -> None:
        """Loads the model from the folder into the state before the first update."""
        seed, layout = self.scorer.cfg.seed, self.scorer.layout
        with layout.on_mesh():
            params = load_with_adapters(
                self.folder, layout.rules, self.decoder, layout.dtype, seed=seed
            )
            self.state = init_state(params, self.optimizer, offload=offload)
            self._rest()

    def restore(self, saved: TrainState) -> None:
        """Takes a saved state over; frozen parameters are read from the model's folder again."""
        self.state = saved
        if self.decoder.lora is not None:
            layout = self.scorer.layout
            with layout.on_mesh():
                base = load_params(self.folder, layout.rules, self.decoder, layout.dtype)
            self.state = dataclasses.replace(saved, params=with_base(saved.params, base))
        self._rest()

    def _rest(self) -> None:
        """Moves the weights to host memory if they are offloaded."""
        if self.offload:
            self.state = dataclasses.replace(self.state, params=to_host(self.state.params))


def make_critic(
    cfg: RunConfig,
    folder: Path,
    backbone: DecoderConfig,
    dtype: jnp.dtype,
    total_steps: int,
    encoder: ImageEncoder | None = None,
) -> Critic:
    """A separate critic in the layout of config.critic.mesh, with an abstract state.

    `backbone` is the shape of the model. Training's mesh is the current one. Raises ValueError if
    the mesh sizes do not divide the devices or the model.
    """
    critic_run = cfg.critic_run
    decoder = for_platform(critic_run, backbone, target_platform())[1]
    decoder = dataclasses.replace(with_adapters(cfg.lora, decoder), heads=("score",))
    layout = role_layout(cfg, "critic", decoder, dtype)
    mesh = layout.mesh(jax.sharding.get_mesh())
    specs = decoder_specs(decoder)
    trained = split(specs)[0]
    learner = found_patterns(critic_run.learner, trained)
    n_updates = total_steps * critic_run.updates_per_step
    optimizer = make_optimizer(learner, n_updates, trained, layout.rules)
    with layout.on_mesh():
        check_opt_state(learner, trained, layout.rules)
        state = abstract_state(
            specs,
            dtype,
            optimizer,
            layout.rules,
            mesh,
            offload="optimizer" in cfg.learner.offload,
        )
    update = make_value_update(critic_run, optimizer, layout.rules, encoder)
    scorer, offload = ValueScorer(critic_run, layout, encoder), "critic" in cfg.learner.offload
    return Critic(folder, decoder, scorer, optimizer, update, state, offload)


def reward_model_scorer(
    cfg: RunConfig, backbone: DecoderConfig, dtype: jnp.dtype
) -> tuple[ValueScorer, DecoderConfig]:
    """(scorer, model shape) of config.reward_model; training's mesh is the current one.

    Raises ValueError if the mesh sizes do not divide the devices or the model.
    """
    reward_run = cfg.reward_model_run
    decoder = for_platform(reward_run, backbone, target_platform())[1]
    decoder = dataclasses.replace(decoder, heads=("score",))
    return ValueScorer(reward_run, role_layout(cfg, "reward_model", decoder, dtype)), decoder


def shared_value_scorer(
    cfg: RunConfig, dtype: jnp.dtype, encoder: ImageEncoder | None = None
) -> ValueScorer:
    """Values from the value head on the policy's backbone (critic.shared)."""
    layout = Layout(training_rules(cfg), resharding=None, specs=None, dtype=dtype)
    return ValueScorer(cfg, layout, encoder)
