"""Compiles every program of a run before its first step, each with its name and seconds on the console."""

from jaxrl.data.packing import Packed, empty_batch
from jaxrl.learner.critic import Critic, Values
from jaxrl.learner.requirements import full_kl_in_loss, needs_old_logp, needs_ref_logp
from jaxrl.trainer.experience import token_kl
from jaxrl.trainer.run import Job, Run
from jaxrl.types import Batch, Tree
from sharding import to_device


def warm_up(run: Run) -> None:
    """Runs each program once on padding, in every declared shape. The state comes back unchanged."""
    compiling = run.progress.waiting("compiling prefill and decode")
    with compiling, run.engines.layout.weights(run.state.params) as params:
        run.engines.engine.warmup(params)
    if run.reward_model is not None:
        warm_up_values(run, run.reward_model.values, run.reward_model.params, "the reward model")
    warm_up_learner(run, policy=needs_old_logp(run.cfg), reference=needs_ref_logp(run.cfg))


def warm_up_values(run: Job, values: Values, params: Tree, whose: str) -> None:
    """The scores of a model in every declared shape."""
    for rows, row_len in values.cfg.learner.shapes:
        n_rows = values.n_ranks * rows
        with run.progress.waiting(f"compiling {whose} for [{n_rows}, {row_len}] tokens"):
            values.of(params, [Packed(empty_batch(n_rows, row_len), places=())])


def warm_up_critic(run: Job, critic: Critic) -> None:
    """The updates of a critic of its own."""
    values = critic.values
    for rows, row_len in values.cfg.learner.shapes:
        n_rows = values.n_ranks * rows
        with (
            run.progress.waiting(f"compiling the critic's update for [{n_rows}, {row_len}] tokens"),
            values.layout.on_mesh(),
        ):
            critic.state, _ = critic.update.update(critic.state, [empty_batch(n_rows, row_len)])


def warm_up_learner(run: Job, *, policy: bool, reference: bool) -> None:
    """The updates alone, and scoring by whom it is done."""
    if run.values is not None:
        params = run.state.params if run.critic is None else run.critic.state.params
        warm_up_values(run, run.values, params, "values")
    if run.critic is not None:
        warm_up_critic(run, run.critic)
    for rows, row_len in run.cfg.learner.shapes:
        n_rows = run.n_ranks * rows
        with run.progress.waiting(f"compiling score and update for [{n_rows}, {row_len}] tokens"):
            batch = empty_batch(n_rows, row_len)
            if policy:
                with run.scorer.layout.weights(run.state.params) as params:
                    run.scorer.logps(params, [batch])
            if reference:
                with run.ref_scorer.layout.on_mesh():
                    run.ref_scorer.logps(to_device(run.ref_params), [batch])
                if run.cfg.algorithm.kl_in == "reward":
                    token_kl(batch, batch.ref_logp, run.cfg.algorithm)
            learn_nothing(run, batch)
    run.progress.steps(run.step, run.total_steps)


def learn_nothing(run: Job, batch: Batch) -> None:
    """One update on padding: it has no weight, so the loss is not finite and changes nothing."""
    ref_params = to_device(run.ref_params) if full_kl_in_loss(run.cfg) else None
    run.state, _ = run.update.update(run.state, [batch], ref_params=ref_params)
