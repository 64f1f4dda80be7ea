"""Compiles every program of a run before its first step, with progress output."""

from collections.abc import Iterator

import jax

from jaxrl.checkpoint.checkpointer import complete_steps
from jaxrl.config.keys import RunConfig
from jaxrl.data.packing import Packed, empty_batch
from jaxrl.engine.engine import PagedEngine
from jaxrl.layout import Layout
from jaxrl.learner.critic import Critic, ValueScorer
from jaxrl.learner.requirements import full_kl_in_loss, needs_old_logp, needs_ref_logp
from jaxrl.rollout.remote.pool import WorkerPool
from jaxrl.rollout.remote.weights import RemoteWeights
from jaxrl.runtime.compile_threads import CompileThreads, lowered_on_mesh
from jaxrl.trainer.core import Core, Run
from jaxrl.trainer.phases.mini_batches import MiniBatch, token_kl, with_mean_weight
from jaxrl.trainer.phases.sampling import end_rollouts
from jaxrl.trainer.setup.learner import Learner
from jaxrl.types import Batch, Tree
from sharding import needs_trial_run, to_device


def lowered_before_loading(
    cfg: RunConfig,
    learner: Learner,
    layout: Layout | RemoteWeights | None = None,
    engine: PagedEngine | WorkerPool | None = None,
) -> Iterator[jax.stages.Lowered]:
    """The programs that read the policy, lowered from its shapes; none if the run is done.

    For `CompileThreads.lower`, so that weights are loaded meanwhile. `warm_up` lowers them again,
    from the weights, and finds them in JAX's caches. All processes call this together.
    """
    mesh, saved = jax.sharding.get_mesh(), cfg.run_path / "checkpoints"
    done = saved.is_dir() and max(complete_steps(saved), default=0) >= learner.total_steps
    sized = None
    if isinstance(engine, PagedEngine) and isinstance(layout, Layout):
        with layout.on_mesh():
            sized = engine if engine.set_pool_size() else None

    def lowered() -> Iterator[jax.stages.Lowered]:
        if done:
            return
        yield from lowered_policy(cfg, learner)
        if sized is not None and isinstance(layout, Layout):
            params = layout.lowered_weights(learner.abstract.params)
            yield from lowered_on_mesh(layout.on_mesh, sized.lowered(params))

    return lowered_on_mesh(lambda: jax.set_mesh(mesh), lowered())


def lowered_policy(cfg: RunConfig, learner: Learner) -> Iterator[jax.stages.Lowered]:
    """The update, and the scorer of the policy if the algorithm needs one."""
    state, n_ranks = learner.abstract, learner.rules.n_shards("batch")
    for rows, row_len in reversed(cfg.learner.shapes):
        batch = empty_batch(n_ranks * rows, row_len)
        if not full_kl_in_loss(cfg):  # else it also reads the reference model
            yield from learner.update.lowered(state, batch)
        if needs_old_logp(cfg) and "vocab" in state.params.cfg.heads:
            params = learner.scorer.layout.lowered_weights(state.params)
            yield from learner.scorer.lowered(params, batch)


def warm_up(run: Run, threads: CompileThreads) -> None:
    """Compiles every program of an RL run in its declared shapes, after what `threads` compile.

    On accelerators each program runs once on padding.
    """
    core, model = run.core, run.reward_model
    scores = {"policy": needs_old_logp(core.cfg), "reference": needs_ref_logp(core.cfg)}
    with core.session.progress.waiting("compiling all programs"):
        threads.wait()
        threads.add(lowered_learner(core, **scores))
        if model is not None:
            threads.add(model.scorer.lowered(to_device(model.params)))
        with run.engines.layout.weights(core.state.params) as params, core.session.stop.agreed():
            run.engines.engine.warmup(params, threads)
    end_rollouts(run)
    if model is not None and needs_trial_run():
        run_values(core, model.scorer, to_device(model.params), "the reward model")
    warm_up_learner(core, **scores)


def warm_up_offline(core: Core, threads: CompileThreads, *, policy: bool, reference: bool) -> None:
    """As `warm_up`, for offline training."""
    with core.session.progress.waiting("compiling all programs"):
        threads.wait()
        threads.add(lowered_learner(core, policy=policy, reference=reference))
        threads.wait()
    warm_up_learner(core, policy=policy, reference=reference)


def lowered_learner(core: Core, *, policy: bool, reference: bool) -> Iterator[jax.stages.Lowered]:
    """The programs of `warm_up_learner`, lowered one by one."""
    for rows, row_len in reversed(core.cfg.learner.shapes):
        batch = empty_batch(core.learner.n_ranks * rows, row_len)
        yield from core.learner.update.lowered(core.state, batch, _kl_reference(core))
        if policy:
            params = core.learner.scorer.layout.lowered_weights(core.state.params)
            yield from core.learner.scorer.lowered(params, batch)
        if reference:
            yield from core.learner.ref_scorer.lowered(to_device(core.ref_params), batch)
    if core.learner.value_scorer is not None:
        params = core.state.params if core.learner.critic is None else core.learner.critic.params
        yield from core.learner.value_scorer.lowered(params)
    if core.learner.critic is not None:
        yield from core.learner.critic.lowered()


def _kl_reference(core: Core) -> Tree | None:
    """The reference's weights, if the update reads them."""
    return to_device(core.ref_params) if full_kl_in_loss(core.cfg) else None


def warm_up_learner(core: Core, *, policy: bool, reference: bool) -> None:
    """Compiles what `lowered_learner` leaves out; runs all programs on padding on accelerators."""
    for rows, row_len in core.cfg.learner.shapes:
        batch = empty_batch(core.learner.n_ranks * rows, row_len)
        if reference and core.cfg.algorithm.kl_in == "reward":
            token_kl(batch, batch.ref_logp, core.cfg.algorithm)
        if core.cfg.algorithm.correction_normalize:
            with_mean_weight(MiniBatch([Packed(batch, spans=())]), core.cfg.algorithm)
    if needs_trial_run():
        run_learner(core, policy=policy, reference=reference)
    core.session.progress.steps(core.clock.step, core.clock.total_steps)


def run_values(core: Core, scorer: ValueScorer, params: Tree, name: str) -> None:
    """Runs the forward pass of a value or reward model in every declared shape."""
    for rows, row_len in scorer.cfg.learner.shapes:
        n_rows = scorer.n_ranks * rows
        with core.session.progress.waiting(
            f"running {name} on [{n_rows}, {row_len}] tokens of padding"
        ):
            scorer.values(params, [Packed(empty_batch(n_rows, row_len), spans=())])


def run_critic(core: Core, critic: Critic) -> None:
    """Runs the update of a separate critic in every declared shape."""
    scorer = critic.scorer
    for rows, row_len in scorer.cfg.learner.shapes:
        n_rows = scorer.n_ranks * rows
        with (
            core.session.progress.waiting(
                f"running the critic's update on [{n_rows}, {row_len}] tokens of padding"
            ),
            critic.training(),
        ):
            critic.state, _ = critic.update.update(critic.state, [empty_batch(n_rows, row_len)])


def run_learner(core: Core, *, policy: bool, reference: bool) -> None:
    """Runs the update, the value programs, and the requested logprob programs on padding."""
    if core.learner.value_scorer is not None:
        params = core.state.params if core.learner.critic is None else core.learner.critic.params
        run_values(core, core.learner.value_scorer, params, "values")
    if core.learner.critic is not None:
        run_critic(core, core.learner.critic)
    for rows, row_len in core.cfg.learner.shapes:
        n_rows = core.learner.n_ranks * rows
        with core.session.progress.waiting(
            f"running score and update on [{n_rows}, {row_len}] tokens of padding"
        ):
            batch = empty_batch(n_rows, row_len)
            if policy:
                with core.learner.scorer.layout.weights(core.state.params) as params:
                    core.learner.scorer.warm_up(params, batch)
            if reference:
                with core.learner.ref_scorer.layout.on_mesh():
                    core.learner.ref_scorer.warm_up(to_device(core.ref_params), batch)
            run_update(core, batch)


def run_update(core: Core, batch: Batch) -> None:
    """Runs the update on padding.

    Padding has weight 0, and an update of weight 0 does not change the state.
    """
    core.state, _ = core.learner.update.update(core.state, [batch], ref_params=_kl_reference(core))
