"""The table of training's programs: one row for each role of a run.

Warm-up compiles and tries out every row in all declared shapes (jaxrl/trainer/setup/warmup.py); a
plan compiles the largest (jaxrl/planner/programs.py). The engine has a table of its dispatches
(`ModelRunner.declared`).
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import numpy as np

from jaxrl.config.keys import RunConfig
from jaxrl.config.teachers import teachers
from jaxrl.data.packing import Packed, empty_batch
from jaxrl.layout import training_rules
from jaxrl.learner.critic import Critic, ValueScorer
from jaxrl.learner.image_patches import BatchImages
from jaxrl.learner.requirements import balances_experts, full_kl_in_loss, shares_base
from jaxrl.learner.roles import Learner, TeacherModel
from jaxrl.learner.scorer import Scorer
from jaxrl.learner.step import Update, for_device
from jaxrl.models.lora import split
from jaxrl.types import Batch, TrainState, Tree
from sharding import Rules, on_mesh, to_device

Lower = Callable[[], jax.stages.Lowered]


@dataclasses.dataclass
class TrainingModels:
    """The models that training's programs read, with (abstract) weights; None: not in the run."""

    cfg: RunConfig
    state: TrainState  # of the policy; the only reference if it has arrays, as an update donates it
    update: Update
    kl_params: Tree | None = None  # the reference that the update runs, for a full KL
    value_scorer: ValueScorer | None = None
    critic: Critic | None = None
    reward_scorer: ValueScorer | None = None
    reward_params: Tree | None = None
    scorer: Scorer | None = None
    student_scorer: Scorer | None = None
    ref_scorer: Scorer | None = None
    ref_params: Tree | None = None
    teachers: Sequence[tuple[TeacherModel, Tree]] = ()  # further ones, with their weights


@dataclasses.dataclass(frozen=True)
class TrainingProgram:
    """One row: the programs that a role runs on micro-batches."""

    name: str
    phase: str  # of a step, in a plan: "scoring" or "update"
    cfg: RunConfig  # of the role: its declared shapes and epochs
    rules: Rules
    n_ranks: int  # data-parallel ranks that share a micro-batch
    # The programs by name, for a micro-batch on the role's mesh.
    lower: Callable[[Batch], Mapping[str, Lower]]
    run: Callable[[Batch], object]  # all of them, on padding on the host
    # Programs that a plan has, and the run's state that needs no extra memory while one runs,
    # because it is among the arguments. Names are as in `RunPrograms`.
    reads: Mapping[str, tuple[str, ...]]
    state: Mapping[str, Tree] = dataclasses.field(default_factory=dict)  # that the role adds
    offloads: tuple[str, ...] = ()  # roles of learner.offload that are on the devices meanwhile
    n_joined: Sequence[int] = (1,)  # micro-batches of one call, ascending
    n_vocab: int = 0  # ids in the bitsets of supports; 0: the programs read none
    routing: tuple[int, int] | None = None  # shape of a token's experts; None: they read none
    encoder: BatchImages | None = None  # adds images to micro-batches; None: they read none
    has_parts: bool = False  # whether they read the parts of the objective
    n_ids: int = 0  # ids of a teacher that they read at each token
    n_labels: int = 1  # of values and returns that they read
    share: float = 1.0  # of the tokens of a step that they read, in a plan
    on_mesh: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    with_pages: bool = False  # runs while the engine has its KV pages

    def lowered(self) -> Iterator[jax.stages.Lowered]:
        """All programs in all declared shapes, the largest first, on training's mesh."""
        for rows, row_len in reversed(self.cfg.learner.shapes):
            for n_joined in self.n_joined:
                for lowerings in self._lowerings(rows * n_joined, row_len):
                    for lower in lowerings.values():
                        yield lower()

    def largest(self) -> dict[str, Lower]:
        """The programs of a plan in the largest declared shape."""
        rows, row_len = self.cfg.learner.shapes[-1]
        *_, lowerings = self._lowerings(rows * self.n_joined[-1], row_len)
        return {name: lowerings[name] for name in self.reads}

    def _lowerings(self, rows: int, row_len: int) -> list[dict[str, Lower]]:
        """The programs by name, for each size of images in micro-batches of a shape."""

        def lower_on_mesh(lower: Lower) -> jax.stages.Lowered:
            with self.on_mesh():
                return lower()

        with self.on_mesh():
            batch = abstract_batch(
                self.n_ranks * rows,
                row_len,
                self.rules,
                n_vocab=self.n_vocab,
                routing=self.routing,
                encoder=self.encoder,
                has_parts=self.has_parts,
                n_ids=self.n_ids,
                n_labels=self.n_labels,
            )
            found = [self.lower(one) for one in with_images(batch, self.rules, self.encoder)]
        return [
            {name: functools.partial(lower_on_mesh, one) for name, one in lowerings.items()}
            for lowerings in found
        ]

    def calls(self, program: str, n_tokens: int) -> int:
        """Calls of a program in a training step of `n_tokens`."""
        rows, row_len = self.cfg.learner.shapes[-1]
        micro_batches = math.ceil(self.share * n_tokens / (self.n_ranks * rows * row_len))
        if self.phase == "scoring":
            return math.ceil(micro_batches / self.n_joined[-1])
        if program.endswith("apply"):
            return self.cfg.updates_per_step
        return micro_batches * self.cfg.learner.epochs


def training_models(
    cfg: RunConfig,
    learner: Learner,
    state: TrainState,
    ref_params: Tree | None,
    *,
    scores_policy: bool,
    scores_reference: bool,
    more_refs: Sequence[Tree] = (),
) -> TrainingModels:
    """The models of a run or a plan without a reward model, and the scorers that it needs.

    `more_refs` are the weights of the learner's further teachers.
    """
    return TrainingModels(
        cfg=cfg,
        state=state,
        update=learner.update,
        kl_params=ref_params if full_kl_in_loss(cfg) else None,
        value_scorer=learner.value_scorer,
        critic=learner.critic,
        scorer=learner.scorer if scores_policy else None,
        student_scorer=learner.student_scorer,
        ref_scorer=learner.ref_scorer if scores_reference else None,
        ref_params=ref_params if scores_reference else None,
        teachers=list(zip(learner.teachers, more_refs, strict=True)) if more_refs else (),
    )


def training_programs(models: TrainingModels) -> list[TrainingProgram]:
    """The rows of a run, in the order of its plan."""
    rows = [_policy_update(models)]
    if models.value_scorer is not None:
        rows.append(_values(models, models.value_scorer))
    if models.critic is not None:
        rows.append(_critic_update(models.critic))
    if models.reward_scorer is not None:
        rows.append(_reward_model(models, models.reward_scorer))
    if models.scorer is not None:
        rows.append(_policy_scores("score", models, models.scorer))
    if models.student_scorer is not None:
        rows.append(_policy_scores("student", models, models.student_scorer))
    if models.ref_scorer is not None:
        rows.append(_reference_scores(models, models.ref_scorer))
    rows += [_teacher_scores(models.cfg, *teacher) for teacher in models.teachers]
    return rows


def _policy_update(models: TrainingModels) -> TrainingProgram:
    cfg, rules = models.cfg, training_rules(models.cfg)
    full_kl = models.kl_params is not None
    separate = ("ref",) if full_kl and not shares_base(cfg) else ()
    state, weights = _state(models.state, "params", "base", "opt_state")

    def lower(batch: Batch) -> Mapping[str, Lower]:
        return models.update.lowerings(models.state, batch, _abstract(models.kl_params))

    def run(batch: Batch) -> None:
        # Padding has weight 0, and an update of weight 0 does not change the state.
        ref_params = to_device(models.kl_params)
        models.state, _ = models.update.update(models.state, [batch], ref_params=ref_params)

    return TrainingProgram(
        name="the update",
        phase="update",
        cfg=cfg,
        rules=rules,
        n_ranks=rules.n_shards("batch"),
        lower=lower,
        run=run,
        reads=({"count": weights} if balances_experts(cfg) else {})
        | {"accumulate": (*weights, *separate), "apply": ("params", "opt_state")},
        state=state,
        offloads=("reference",) if full_kl else (),
        n_vocab=models.update.n_vocab(models.state.params),
        routing=models.update.routing(models.state.params),
        encoder=models.update.encoder,
        has_parts=models.update.has_parts,
        n_ids=models.update.n_ids,
        n_labels=len(models.state.params.cfg.labels),
    )


def _values(models: TrainingModels, scorer: ValueScorer) -> TrainingProgram:
    critic = models.critic
    if critic is None:  # a value head on the policy's backbone
        _, weights = _state(models.state, "params", "base", "opt_state")
        return _value_program("values", scorer, lambda: models.state.params, weights)
    _, weights = _state(critic.state, "critic", "critic_base", "critic_opt_state")
    return _value_program("values", scorer, lambda: critic.state.params, weights, ("critic",))


def _critic_update(critic: Critic) -> TrainingProgram:
    state, weights = _state(critic.state, "critic", "critic_base", "critic_opt_state")

    def lower(batch: Batch) -> Mapping[str, Lower]:
        abstract = dataclasses.replace(critic.state, params=_abstract(critic.state.params))
        lowerings = critic.update.lowerings(abstract, batch)
        return {f"critic_{name}": one for name, one in lowerings.items()}

    def run(batch: Batch) -> None:
        with critic.training():
            critic.state, _ = critic.update.update(critic.state, [batch])

    return TrainingProgram(
        name="the critic's update",
        phase="update",
        cfg=critic.scorer.cfg,
        rules=critic.scorer.layout.rules,
        n_ranks=critic.scorer.n_ranks,
        lower=lower,
        run=run,
        reads={"critic_accumulate": weights, "critic_apply": ("critic", "critic_opt_state")},
        state=state,
        offloads=("critic",),
        encoder=critic.update.encoder,
        on_mesh=critic.scorer.layout.on_mesh,
    )


def _reward_model(models: TrainingModels, scorer: ValueScorer) -> TrainingProgram:
    name = "reward_model"
    row = _value_program(name, scorer, lambda: models.reward_params, (name,), (name,))
    return dataclasses.replace(row, state={name: models.reward_params}, with_pages=True)


def _value_program(
    name: str,
    scorer: ValueScorer,
    params: Callable[[], Tree],
    weights: tuple[str, ...],
    offloads: tuple[str, ...] = (),
) -> TrainingProgram:
    def lower(batch: Batch) -> Mapping[str, Lower]:
        return {name: functools.partial(scorer.program.lower, _abstract(params()), batch)}

    def run(batch: Batch) -> None:
        scorer.values(to_device(params()), [Packed(batch, spans=())])

    return TrainingProgram(
        name=name,
        phase="scoring",
        cfg=scorer.cfg,
        rules=scorer.layout.rules,
        n_ranks=scorer.n_ranks,
        lower=lower,
        run=run,
        reads={name: weights},
        offloads=offloads,
        encoder=scorer.encoder,
        on_mesh=scorer.layout.on_mesh,
    )


def _policy_scores(name: str, models: TrainingModels, scorer: Scorer) -> TrainingProgram:
    def run(batch: Batch) -> None:
        with scorer.layout.weights(models.state.params) as params:
            scorer.warm_up(params, batch)

    def weights() -> Tree:
        return scorer.layout.lowered_weights(models.state.params)

    return _logp_program(name, models.cfg, scorer, weights, run, "score_aliased")


def _reference_scores(models: TrainingModels, scorer: Scorer) -> TrainingProgram:
    def run(batch: Batch) -> None:
        with scorer.layout.on_mesh():
            scorer.warm_up(to_device(models.ref_params), batch)

    def weights() -> Tree:
        given = models.ref_params
        return scorer.layout.lowered_weights(given) if scorer.of_training else _abstract(given)

    shared = shares_base(models.cfg)
    counted = "ref_aliased" if shared else "ref"
    row = _logp_program("reference", models.cfg, scorer, weights, run, counted)
    return dataclasses.replace(
        row,
        state={} if shared else {"ref": models.ref_params},
        offloads=("reference",),
        share=teacher_share(models.cfg),
    )


def _teacher_scores(cfg: RunConfig, teacher: TeacherModel, params: Tree) -> TrainingProgram:
    scorer, name = teacher.scorer, teacher.state.replace("ref", "reference")

    def run(batch: Batch) -> None:
        with scorer.layout.on_mesh():
            scorer.warm_up(to_device(params), batch)

    row = _logp_program(name, cfg, scorer, lambda: _abstract(params), run, teacher.state)
    return dataclasses.replace(
        row, state={teacher.state: params}, offloads=("reference",), share=teacher_share(cfg)
    )


def teacher_share(cfg: RunConfig) -> float:
    """The part of a step's responses that one of several teachers reads: equal parts."""
    return 1.0 / max(len(teachers(cfg.algorithm)), 1)


def _logp_program(
    name: str,
    cfg: RunConfig,
    scorer: Scorer,
    weights: Callable[[], Tree],
    run: Callable[[Batch], None],
    counted: str,
) -> TrainingProgram:
    return TrainingProgram(
        name=name,
        phase="scoring",
        cfg=cfg,
        rules=scorer.layout.rules,
        n_ranks=training_rules(cfg).n_shards("batch"),
        lower=lambda batch: {name: functools.partial(scorer.score.lower, weights(), batch)},
        run=run,
        reads={name: (counted,)},
        n_joined=sorted({scorer.n_least, scorer.n_joined}),
        n_vocab=weights().cfg.V if scorer.restricted else 0,
        routing=scorer.routing(weights()),
        encoder=scorer.encoder,
        n_ids=scorer.n_given,
        on_mesh=scorer.layout.on_mesh,
    )


def _state(
    state: TrainState, weights: str, base: str, opt_state: str
) -> tuple[dict[str, Tree], tuple[str, ...]]:
    """(the arrays of a trained model by name, the names of its weights)."""
    trained, frozen = split(state.params)
    held = {weights: trained, opt_state: state.opt_state}
    if not jax.tree.leaves(frozen):
        return held, (weights,)
    return held | {base: frozen}, (weights, base)


def _abstract(params: Tree) -> Tree:
    """Shapes of weights in device memory on the current mesh."""
    return None if params is None else on_mesh(params, jax.sharding.get_mesh())


def abstract_batch(
    n_rows: int,
    row_len: int,
    rules: Rules,
    *,
    n_vocab: int = 0,
    routing: tuple[int, int] | None = None,
    encoder: BatchImages | None = None,
    has_parts: bool = False,
    n_ids: int = 0,
    n_labels: int = 1,
) -> Batch:
    """A micro-batch on the current mesh, without images; the arguments are as in `put_batch`.

    `n_labels` is as in `empty_batch`.
    """
    sharding = jax.sharding.NamedSharding(jax.sharding.get_mesh(), rules.spec("batch", "time"))

    def abstract(a: np.ndarray) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((n_rows, *a.shape[1:]), a.dtype, sharding=sharding)

    batch = empty_batch(1, row_len, n_labels)
    if encoder is not None:
        batch = dataclasses.replace(batch, axis_positions=encoder.axis_positions(batch))
    return jax.tree.map(abstract, for_device(batch, n_vocab, routing, has_parts, n_ids))


def with_images(batch: Batch, rules: Rules, encoder: BatchImages | None) -> list[Batch]:
    """An abstract micro-batch with images, for each of the sizes that programs have for them."""
    if encoder is None:
        return [batch]
    n_rows, row_len = batch.tokens.shape
    sizes = encoder.abstract(n_rows, row_len, rules)
    return [dataclasses.replace(batch, images=images) for images in sizes]
