"""Compiles every program of a run before its first step, with progress output."""

from collections.abc import Iterator

import jax

from jaxrl.checkpoint.checkpointer import complete_steps
from jaxrl.config.keys import RunConfig
from jaxrl.data.packing import Packed, empty_batch
from jaxrl.engine.engine import PagedEngine
from jaxrl.layout import Layout
from jaxrl.learner.programs import TrainingModels, training_models, training_programs
from jaxrl.learner.requirements import (
    full_kl_in_loss,
    needs_policy_logp,
    needs_ref_scores,
    scores_by_teacher,
)
from jaxrl.learner.roles import Learner
from jaxrl.rollout.remote.pool import WorkerPool
from jaxrl.rollout.remote.weights import RemoteWeights
from jaxrl.runtime.compilation import CompileThreads, lowered_on_mesh
from jaxrl.trainer.core import Core, Run
from jaxrl.trainer.phases.mini_batches import MiniBatch, token_kl, with_mean_weight
from jaxrl.trainer.phases.sampling import end_rollouts
from sharding import needs_trial_run


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
        models = TrainingModels(cfg, learner.abstract, learner.update)
        models.student_scorer = learner.student_scorer
        if needs_policy_logp(cfg) and "vocab" in learner.abstract.params.cfg.heads:
            models.scorer = learner.scorer
        for row in training_programs(models):
            if row.name != "the update" or not full_kl_in_loss(cfg):  # it reads the reference, too
                yield from row.lowered()
        if sized is not None and isinstance(layout, Layout):
            params = layout.lowered_weights(learner.abstract.params)
            yield from lowered_on_mesh(layout.on_mesh, sized.lowered(params))

    return lowered_on_mesh(lambda: jax.set_mesh(mesh), lowered())


def warm_up(run: Run, threads: CompileThreads) -> None:
    """Compiles every program of an RL run in its declared shapes, after what `threads` compile.

    On accelerators each program runs once on padding.
    """
    core = run.core
    with core.session.progress.waiting("compiling all programs"):
        add_training(threads, rl_models(run))
        if run.judge is not None and (judge := run.judge.model) is not None:
            with judge.weights() as params, core.session.stop.agreed():
                judge.engine.warmup(params, threads)
        with run.engines.layout.weights(core.state.params) as params, core.session.stop.agreed():
            run.engines.engine.warmup(params, threads)
    end_rollouts(run)
    try_training(core, rl_models(run))  # the engine may have moved the policy's weights


def warm_up_offline(
    core: Core, threads: CompileThreads, *, scores_policy: bool, scores_reference: bool
) -> None:
    """As `warm_up`, for offline training."""
    models = training_models(
        core.cfg,
        core.learner,
        core.state,
        core.ref_params,
        scores_policy=scores_policy,
        scores_reference=scores_reference,
    )
    with core.session.progress.waiting("compiling all programs"):
        add_training(threads, models)
        threads.wait()
    try_training(core, models)


def rl_models(run: Run) -> TrainingModels:
    """The models of an RL run."""
    core, cfg, model = run.core, run.core.cfg, run.reward_model
    models = training_models(
        cfg,
        core.learner,
        core.state,
        core.ref_params,
        scores_policy=needs_policy_logp(cfg),
        scores_reference=needs_ref_scores(cfg),
        more_refs=core.more_references,
    )
    if model is not None:
        models.reward_scorer, models.reward_params = model.scorer, model.params
    return models


def add_training(threads: CompileThreads, models: TrainingModels) -> None:
    """Starts to compile all programs of training, after those before them are compiled."""
    threads.wait()
    for row in training_programs(models):
        threads.add(row.lowered())


def try_training(core: Core, models: TrainingModels) -> None:
    """Compiles host-side functions of a step; runs all programs on padding on accelerators."""
    cfg = core.cfg.algorithm
    for rows, row_len in core.cfg.learner.shapes:
        batch = empty_batch(core.learner.n_ranks * rows, row_len)
        scored = models.ref_scorer is not None or scores_by_teacher(core.cfg)
        if scored and cfg.kl_in == "reward":
            token_kl(batch, batch.ref_logp, cfg)
        if cfg.correction_normalize:
            with_mean_weight(MiniBatch([Packed(batch, spans=())]), cfg)
    for row in training_programs(models) if needs_trial_run() else ():
        for rows, row_len in row.cfg.learner.shapes:
            shape = row.n_ranks * rows, row_len
            with core.session.progress.waiting(
                f"running {row.name} on {list(shape)} tokens of padding"
            ):
                row.run(empty_batch(*shape, row.n_labels))
    core.state = models.state
    core.session.progress.steps(core.clock.step, core.clock.total_steps)
