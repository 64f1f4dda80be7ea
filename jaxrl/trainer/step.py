"""The phases of a step, each timed and shown: sample, reward, experience, update; and validation."""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from jaxrl.algorithms.aggregation import idle_weight
from jaxrl.data.packing import gather
from jaxrl.learner.critic import Critic, Values
from jaxrl.learner.requirements import full_kl_in_loss, needs_old_logp, needs_ref_logp
from jaxrl.trainer.coefficients import adapted, coefficient_metrics
from jaxrl.trainer.evaluation import reward_metrics, sample_records, validation_metrics
from jaxrl.trainer.experience import MiniBatch, make_mini_batches, pack_rollouts
from jaxrl.trainer.failure import check_finite
from jaxrl.trainer.groups import groups_of, punish_overlong, solved_prompts, split_flat
from jaxrl.trainer.metrics import speed_metrics
from jaxrl.trainer.reward_scale import rescaled
from jaxrl.trainer.run import Job, Run
from jaxrl.trainer.score import score
from jaxrl.types import Batch, Prompt, Rollout
from sharding import to_device, to_host

CRITIC_METRICS = {"optim/grad_norm": "critic/grad_norm", "optim/lr": "critic/lr"}


def train_step(run: Run) -> None:
    """One step on the next prompts. Raises Interrupted only before the first update, so that the step
    can be taken again from its beginning."""
    with run.timed("step"):
        rollouts, sampled, metrics = collect(run)
        scale = run.reward_scale.after(sampled)
        rollouts, scaling = rescaled(rollouts, scale, run.cfg.reward)
        mini_batches, packing = experience(run, rollouts)
        metrics |= reward_metrics(sampled) | scaling | packing
        if run.critic is not None:
            metrics |= update_critic(run, run.critic, mini_batches)
        if run.step < run.cfg.critic.warmup_steps:
            mini_batches = []
        metrics |= update(run, mini_batches)
        metrics |= coefficient_metrics(run.coefs, run.cfg)
    run.reward_scale = scale
    run.coefs = adapted(run.coefs, metrics, run.cfg, n_samples=len(rollouts))
    n_tokens = sum(len(r.prompt.tokens) + len(r.tokens) for r in sampled)
    metrics |= speed_metrics(run, n_tokens, [p for mini in mini_batches for p in mini.packed])
    run.end_step(metrics)
    if run.refresh_due:
        refresh_reference(run)
    run.logger.samples(run.step, sample_records(sampled, kind="train"))


def collect(run: Run) -> tuple[list[Rollout], list[Rollout], dict[str, float]]:
    """(rewarded rollouts to learn from, all that were sampled, metrics).

    With algorithm.dynamic_sampling (DAPO, section 3.2, https://arxiv.org/abs/2503.14476) groups of equal
    rewards, or with a mean reward out of dynamic_sampling_range, are dropped and further batches of prompts
    asked, until the step is full or dynamic_sampling_batches were asked; then dropped groups fill it up.
    """
    cfg = run.cfg
    n, size = cfg.rollout.n, cfg.data.prompts_per_step
    n_batches = cfg.algorithm.dynamic_sampling_batches if cfg.algorithm.dynamic_sampling else 1
    kept, flat, sampled, engine = [], [], [], []
    for draw in range(n_batches):
        rollouts, metrics = sample(run, next(run.iterator), draw=draw)
        rollouts = reward(run, rollouts)
        groups = groups_of(rollouts, n)
        if cfg.data.skip_solved:
            run.iterator.mark_solved(solved_prompts(groups, cfg.data.skip_solved))
        good, bad = groups, []
        if cfg.algorithm.dynamic_sampling:
            good, bad = split_flat(groups, cfg.algorithm.dynamic_sampling_range)
        kept, flat, engine = [*kept, *good], [*flat, *bad], [*engine, metrics]
        sampled += punish_overlong(rollouts, cfg)
        if len(kept) >= size:
            break
    metrics = {
        name: float(
            (np.sum if name.startswith("time/") else np.mean)([one[name] for one in engine])
        )
        for name in engine[0]
    }
    if cfg.algorithm.dynamic_sampling:
        metrics["rollout/batches"] = float(len(engine))
        metrics["rollout/flat_fraction"] = len(flat) / (len(flat) + len(kept))
    if cfg.data.skip_solved:
        metrics["data/solved"] = float(run.iterator.n_solved)
    chosen = punish_overlong([r for group in [*kept, *flat][:size] for r in group], cfg)
    if cfg.algorithm.advantage == "remax":
        chosen = add_baselines(run, chosen)
    return chosen, sampled, metrics


def add_baselines(run: Run, rollouts: list[Rollout]) -> list[Rollout]:
    """Fills `baseline` with the reward of a greedy response to the same prompt (ReMax)."""
    greedy, _ = sample(run, [r.prompt for r in rollouts], greedy=True)
    greedy = punish_overlong(reward(run, greedy), run.cfg)
    return [
        dataclasses.replace(r, baseline=g.reward) for r, g in zip(rollouts, greedy, strict=True)
    ]


def validate(run: Run) -> None:
    """Answers the validation prompts with the weights of now and logs val/*."""
    rollouts, _ = sample(run, list(run.val), validation=True)
    rollouts = reward(run, rollouts, validation=True)
    run.validated_at, run.val_metrics = run.step, validation_metrics(rollouts, run.cfg.eval)
    run.logger.metrics(run.step, run.val_metrics | run.take_seconds())
    run.logger.samples(run.step, sample_records(rollouts, kind="val"))


def sample(
    run: Run,
    prompts: list[Prompt],
    *,
    validation: bool = False,
    draw: int = 0,
    greedy: bool = False,
) -> tuple[list[Rollout], dict[str, float]]:
    """The samples of each prompt, side by side, from the trainer's own parameters; rollout/* metrics.

    `draw` counts the batches of prompts of one step; `greedy` gives one response a prompt.
    """
    cfg = run.cfg
    n, sampling = cfg.rollout.n, cfg.rollout.sampling
    if validation:
        n, sampling = cfg.eval.n, cfg.eval.sampling
    elif greedy:
        n, sampling = 1, dataclasses.replace(sampling, temperature=0.0)
    name = "validation" if validation else "rollout"
    with (
        run.no_compile(name),
        run.engines.layout.weights(run.state.params, run.timed("reshard")) as params,
        run.timed("val" if validation else "gen"),
    ):
        return run.engines.sample(
            params,
            prompts,
            n=n,
            sampling=sampling,
            seed=run.sampling_seed(validation=validation, draw=draw),
            version=run.step,
            name=name,
        )


def reward(run: Run, rollouts: list[Rollout], *, validation: bool = False) -> list[Rollout]:
    """The rollouts with their rewards: each process scores its share, and all get all of them."""
    with run.timed("val" if validation else "reward"), run.no_compile("reward"):
        return score(run.rewards, run.reward_model, rollouts, run.stop)


def experience(run: Run, rollouts: list[Rollout]) -> tuple[list[MiniBatch], dict[str, float]]:
    """Advantages, packing, and the logprobs that the algorithm needs before its first update."""
    cfg = run.cfg
    if run.values is not None:
        rollouts = add_values(run, run.values, rollouts)
    with run.timed("adv"), run.no_compile("scoring"):
        return make_mini_batches(
            rollouts,
            cfg,
            n_ranks=run.n_ranks,
            score_old=functools.partial(policy_logps, run) if needs_old_logp(cfg) else None,
            score_ref=functools.partial(reference_logps, run) if needs_ref_logp(cfg) else None,
            kl_coef=run.coefs.kl,
            seed=run.sampling_seed(validation=False),
        )


def add_values(run: Run, values: Values, rollouts: list[Rollout]) -> list[Rollout]:
    """Fills `values` with what the critic says of every response token before the step."""
    params = run.state.params if run.critic is None else run.critic.state.params
    packed = pack_rollouts(rollouts, values.cfg, values.n_ranks)
    with run.timed("values"), run.no_compile("scoring"):
        found = gather(values.of(params, packed, on_batch=run.check_stop), packed)
    return [dataclasses.replace(r, values=v) for r, v in zip(rollouts, found, strict=True)]


def policy_logps(run: Job, batches: Sequence[Batch]) -> list[np.ndarray]:
    """The policy's logprobs of packed batches."""
    layout = run.scorer.layout
    with (
        layout.weights(run.state.params, run.timed("reshard")) as params,
        run.timed("old_log_prob"),
    ):
        return run.scorer.logps(params, batches, on_batch=run.check_stop)


def reference_logps(run: Job, batches: Sequence[Batch]) -> list[np.ndarray]:
    """The reference model's."""
    with run.ref_scorer.layout.on_mesh(), run.timed("ref"):
        params = to_device(run.ref_params)
        return run.ref_scorer.logps(params, batches, on_batch=run.check_stop)


def refresh_reference(run: Job) -> None:
    """The policy of now becomes the reference model."""
    with run.timed("ref"):
        ref = run.ref_scorer.layout.copy(run.state.params)
        run.ref_params = to_host(ref) if "reference" in run.cfg.learner.offload else ref


def update(run: Job, mini_batches: list[MiniBatch]) -> dict[str, float]:
    """All optimizer steps of a step; metrics are means over them. A mini-batch in which nothing can be
    learned is passed over."""
    cfg = run.cfg
    work = [mini for mini in mini_batches if mini.packed] * cfg.learner.epochs
    metrics: list[dict[str, float]] = []
    with (
        run.timed("update_actor"),
        run.no_compile("update"),
        run.progress.phase("update", total=sum(len(mini.packed) for mini in work)) as bar,
    ):
        ref_params = to_device(run.ref_params) if full_kl_in_loss(cfg) else None
        for mini in work:
            idle_lens = [r.n_own for r in mini.idle]
            run.state, one = run.update.update(
                run.state,
                [packed.batch for packed in mini.packed],
                ref_params=ref_params,
                extra_weight=idle_weight(idle_lens, mode=cfg.algorithm.aggregation),
                coefs=run.coefs.of_loss(),
                on_micro_batch=lambda i: bar.advance(1),
            )
            if cfg.check_finite:
                check_finite(one, mini, run.folder, run.step + 1)
            run.whole = False
            metrics.append(one)
    return over_updates(metrics) | {"perf/n_updates": float(len(metrics))}


def update_critic(run: Run, critic: Critic, mini_batches: list[MiniBatch]) -> dict[str, float]:
    """All optimizer steps of a critic of its own; metrics are means over them."""
    cfg, n_ranks = critic.values.cfg, critic.values.n_ranks
    packs = [pack_rollouts(mini.rollouts, cfg, n_ranks) for mini in mini_batches if mini.rollouts]
    work = packs * cfg.learner.epochs
    metrics: list[dict[str, float]] = []
    with (
        run.timed("update_critic"),
        run.no_compile("critic"),
        run.progress.phase("critic", total=sum(map(len, work))) as bar,
        critic.values.layout.on_mesh(),
    ):
        for packed in work:
            critic.state, one = critic.update.update(
                critic.state,
                [micro.batch for micro in packed],
                on_micro_batch=lambda i: bar.advance(1),
            )
            one = {CRITIC_METRICS.get(name, name): value for name, value in one.items()}
            if run.cfg.check_finite:
                check_finite(one, MiniBatch(packed, idle=[]), run.folder, run.step + 1)
            run.whole = False
            metrics.append({n: value for n, value in one.items() if n.startswith("critic/")})
    return over_updates(metrics)


def over_updates(metrics: Sequence[dict[str, float]]) -> dict[str, float]:
    """Means over the updates of a step; of *_max the largest."""
    names = metrics[0].keys() if metrics else ()
    means = {name: float(np.mean([one[name] for one in metrics])) for name in names}
    return means | {n: max(one[n] for one in metrics) for n in names if n.endswith("_max")}
