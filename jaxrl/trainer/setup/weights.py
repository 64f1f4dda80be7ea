"""The weights of a run: from the model folders, or from its newest checkpoint."""

import dataclasses

import jax

from jaxrl.checkpoint.checkpointer import Checkpointer
from jaxrl.learner.roles import Learner
from jaxrl.learner.state import checkpoint_state, init_state
from jaxrl.models.decoder import Decoder
from jaxrl.models.files.adapter import load_with_adapters
from jaxrl.models.files.hf_load import load_params
from jaxrl.models.lora import with_base
from jaxrl.trainer.setup.devices import Policy
from jaxrl.trainer.setup.host import HostSide
from jaxrl.types import TrainState
from sharding import hosts, to_host


def load_state(
    host: HostSide, policy: Policy, learner: Learner, checkpoints: Checkpointer
) -> tuple[TrainState, dict]:
    """(state, host values) of the newest checkpoint, or (initial state, {}) without a checkpoint.

    Also loads or restores the state of a separate critic, in place.
    """
    cfg, models = host.session.cfg, host.models
    rules, critic = learner.rules, learner.critic
    step, offload = hosts.broadcast(checkpoints.latest_step()), "optimizer" in cfg.learner.offload
    if step is None:
        if cfg.resume:
            raise ValueError(
                f"there is no checkpoint in {cfg.run_path}/checkpoints to resume from; "
                "set config.run_dir to the folder of the run, or leave out config.resume"
            )
        params = load_with_adapters(
            models.folders.policy,
            rules,
            policy.decoder,
            policy.dtype,
            seed=cfg.seed,
            adapter=cfg.lora.path,
        )
        if critic is not None:
            critic.load(offload=offload)
        return init_state(params, learner.optimizer, offload=offload), {}
    host.session.progress.status(f"resuming after step {step}")
    abstract, mesh = learner.abstract, jax.sharding.get_mesh()
    if cfg.algorithm.ref_refresh_every:
        ref = learner.ref_scorer.layout.abstract_weights(policy.decoder, mesh)
        offload_ref = "reference" in cfg.learner.offload
        abstract = dataclasses.replace(abstract, ref=to_host(ref) if offload_ref else ref)
    abstract = checkpoint_state(abstract)
    if critic is not None:
        abstract = dataclasses.replace(abstract, critic=checkpoint_state(critic.state))
    saved, values = checkpoints.restore(abstract, step)
    if critic is not None:
        critic.restore(saved.critic)
    params = saved.params
    if policy.decoder.lora is not None:
        base = load_params(models.folders.policy, rules, policy.decoder, policy.dtype)
        params = with_base(params, base)
    return dataclasses.replace(saved, params=params, critic=None), values


def load_reference(host: HostSide, learner: Learner, state: TrainState, step: int) -> Decoder:
    """The frozen reference model: the policy of step 0, or a teacher."""
    cfg, folder = host.session.cfg, host.models.folders.reference
    layout = learner.ref_scorer.layout
    if step == 0 and layout.resharding is None and not cfg.algorithm.teacher:
        ref = layout.copy(state.params)
    else:
        with layout.on_mesh():
            ref = load_params(folder, layout.rules, learner.ref_decoder, layout.dtype)
    return to_host(ref) if "reference" in cfg.learner.offload else ref
