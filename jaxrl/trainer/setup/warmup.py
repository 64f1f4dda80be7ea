"""Compiles every program of a run before its first step, with progress output."""

from jaxrl.data.packing import Packed, empty_batch
from jaxrl.learner.critic import Critic, ValueScorer
from jaxrl.learner.requirements import full_kl_in_loss, needs_old_logp, needs_ref_logp
from jaxrl.trainer.phases.mini_batches import MiniBatch, token_kl, with_mean_weight
from jaxrl.trainer.phases.sampling import end_rollouts
from jaxrl.trainer.run import Core, Run
from jaxrl.types import Batch, Tree
from sharding import to_device


def warm_up(run: Run) -> None:
    """Runs every program of an RL run once on padding, in every declared shape."""
    core = run.core
    compiling = core.progress.waiting("compiling prefill and decode")
    with compiling, run.engines.layout.weights(core.state.params) as params:
        run.engines.engine.warmup(params)
    end_rollouts(run)
    if run.reward_model is not None:
        model = run.reward_model
        warm_up_values(core, model.scorer, to_device(model.params), "the reward model")
    warm_up_learner(core, policy=needs_old_logp(core.cfg), reference=needs_ref_logp(core.cfg))


def warm_up_values(core: Core, scorer: ValueScorer, params: Tree, name: str) -> None:
    """Compiles the forward pass of a value or reward model in every declared shape."""
    for rows, row_len in scorer.cfg.learner.shapes:
        n_rows = scorer.n_ranks * rows
        with core.progress.waiting(f"compiling {name} for [{n_rows}, {row_len}] tokens"):
            scorer.values(params, [Packed(empty_batch(n_rows, row_len), spans=())])


def warm_up_critic(core: Core, critic: Critic) -> None:
    """Compiles the update of a separate critic in every declared shape."""
    scorer = critic.scorer
    for rows, row_len in scorer.cfg.learner.shapes:
        n_rows = scorer.n_ranks * rows
        with (
            core.progress.waiting(
                f"compiling the critic's update for [{n_rows}, {row_len}] tokens"
            ),
            critic.training(),
        ):
            critic.state, _ = critic.update.update(critic.state, [empty_batch(n_rows, row_len)])


def warm_up_learner(core: Core, *, policy: bool, reference: bool) -> None:
    """Compiles the update, the value programs, and the requested logprob programs."""
    if core.value_scorer is not None:
        params = core.state.params if core.critic is None else core.critic.params
        warm_up_values(core, core.value_scorer, params, "values")
    if core.critic is not None:
        warm_up_critic(core, core.critic)
    for rows, row_len in core.cfg.learner.shapes:
        n_rows = core.n_ranks * rows
        with core.progress.waiting(f"compiling score and update for [{n_rows}, {row_len}] tokens"):
            batch = empty_batch(n_rows, row_len)
            if policy:
                with core.scorer.layout.weights(core.state.params) as params:
                    core.scorer.warm_up(params, batch)
            if reference:
                with core.ref_scorer.layout.on_mesh():
                    core.ref_scorer.warm_up(to_device(core.ref_params), batch)
                if core.cfg.algorithm.kl_in == "reward":
                    token_kl(batch, batch.ref_logp, core.cfg.algorithm)
            if core.cfg.algorithm.correction_normalize:
                with_mean_weight(MiniBatch([Packed(batch, spans=())]), core.cfg.algorithm)
            compile_update(core, batch)
    core.progress.steps(core.step, core.total_steps)


def compile_update(core: Core, batch: Batch) -> None:
    """Compiles the update by running it on padding.

    Padding has weight 0, and an update of weight 0 does not change the state.
    """
    ref_params = to_device(core.ref_params) if full_kl_in_loss(core.cfg) else None
    core.state, _ = core.update.update(core.state, [batch], ref_params=ref_params)
