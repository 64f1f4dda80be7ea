"""Rules between the keys of the algorithm: what contradicts itself is refused before any device work."""

from jaxrl.config.keys import (
    EIGHT_BITS,
    FULL_KLS,
    GROUP_ADVANTAGES,
    TOKEN_ADVANTAGES,
    CriticConfig,
    RunConfig,
)
from jaxrl.config.schema import flatten, to_dict

OF_A_SHARED_CRITIC = ("shared", "loss_coef", "value_clip")


def algorithm_problems(run: RunConfig) -> list[str]:
    """A line for every rule that the run breaks, with the values and what to set instead."""
    return [
        *_advantage_problems(run),
        *_critic_problems(run),
        *_teacher_problems(run),
        *_dapo_problems(run),
        *_kl_problems(run),
        *_ratio_problems(run),
    ]


def algorithm_doubts(run: RunConfig) -> list[str]:
    """Choices that run, but are seldom what is meant."""
    doubts, algorithm, name = [], run.algorithm, run.algorithm.policy_loss
    if name in ("gspo", "gspo_token") and min(algorithm.clip_low, algorithm.clip_high) > 0.05:
        doubts.append(
            f"algorithm.policy_loss={name!r} clips the ratio of whole responses, which hardly leaves "
            f"1 - {algorithm.clip_low} to 1 + {algorithm.clip_high}; the paper has algorithm.clip_low=3e-4 and "
            "algorithm.clip_high=4e-4"
        )
    if name in ("gspo", "gspo_token", "gmpo") and algorithm.aggregation == "token_mean":
        doubts.append(
            f"algorithm.aggregation='token_mean' weighs the responses of {name!r} by their length; the paper has "
            "'seq_mean_token_mean'"
        )
    if name == "policy_gradient" and run.updates_per_step > 1:
        doubts.append(
            f"algorithm.policy_loss='policy_gradient' has no ratio, but a step makes {run.updates_per_step} updates, the "
            "later ones with samples of an older policy; set learner.mini_batch_prompts=0 and learner.epochs=1"
        )
    rollout = run.rollout
    eight_bits = [
        f"rollout.{key}={value!r}"
        for key, value in (("dtype", rollout.dtype), ("kv_dtype", rollout.kv_dtype))
        if value in EIGHT_BITS
    ]
    if eight_bits and algorithm.correction == "none" and algorithm.old_logp != "rollout":
        doubts.append(
            f"{' and '.join(eight_bits)} samples from another distribution than the one that is trained, and "
            "algorithm.correction='none' takes its samples for the policy's own: the gradient is biased (see mismatch/kl); "
            "set algorithm.correction='token_tis'"
        )
    return doubts


def _advantage_problems(run: RunConfig) -> list[str]:
    problems, algorithm, n = [], run.algorithm, run.rollout.n
    name = algorithm.advantage
    if name in GROUP_ADVANTAGES and n == 1:
        problems.append(
            f"rollout.n=1 gives algorithm.advantage={name!r} nothing to compare a sample with; set rollout.n to 2 "
            "or more, or algorithm.advantage to 'reinforce_plus_plus' or 'remax'"
        )
    if name == "remax" and n > 1:
        problems.append(
            f"rollout.n={n} with algorithm.advantage='remax': its baseline is one greedy response and it compares no "
            "samples; set rollout.n=1 and more data.prompts_per_step, or algorithm.advantage='rloo'"
        )
    if algorithm.gamma != 1.0 and name not in TOKEN_ADVANTAGES:
        problems.append(
            f"algorithm.gamma={algorithm.gamma} has no effect with algorithm.advantage={name!r}, which gives a "
            "response one number; set algorithm.gamma=1.0, or algorithm.advantage='reinforce_plus_plus'"
        )
    if algorithm.lam != 1.0 and name != "gae":
        problems.append(
            f"algorithm.lam={algorithm.lam} has no effect with algorithm.advantage={name!r}, which has no values; set "
            "algorithm.lam=1.0, or algorithm.advantage='gae'"
        )
    return problems


def _critic_problems(run: RunConfig) -> list[str]:
    critic, default = flatten(to_dict(run.critic)), flatten(to_dict(CriticConfig()))
    own = {f"critic.{name}": v for name, v in critic.items() if v != default[name]}
    shown = ", ".join(f"{name}={value!r}" for name, value in own.items())
    problems = []
    if own and not run.has_critic:
        problems.append(
            f"{shown} but algorithm.advantage={run.algorithm.advantage!r} has no critic; set "
            "algorithm.advantage='gae', or leave the critic's keys out"
        )
    elif run.critic.shared:
        idle = [name for name in own if name.removeprefix("critic.") not in OF_A_SHARED_CRITIC]
        if idle:
            problems.append(
                f"{', '.join(idle)} are of a critic with a backbone of its own, but critic.shared=True learns the "
                "values on the policy's, in its update; leave them out, or set critic.shared=False"
            )
    elif "critic.loss_coef" in own:
        problems.append(
            f"critic.loss_coef={run.critic.loss_coef} weighs the value loss beside the policy's, but a critic of its "
            "own has that loss alone; set critic.lr, or critic.shared=True"
        )
    if 0 < run.total_steps <= run.critic.warmup_steps:
        problems.append(
            f"critic.warmup_steps={run.critic.warmup_steps} leaves none of total_steps={run.total_steps} to the "
            "policy; set fewer"
        )
    return problems


def _teacher_problems(run: RunConfig) -> list[str]:
    problems, algorithm = [], run.algorithm
    distills = algorithm.advantage == "distill"
    if distills and not algorithm.teacher:
        problems.append(
            "algorithm.advantage='distill' learns from a teacher alone, but algorithm.teacher is ''; set a model folder, "
            "or another algorithm.advantage"
        )
    if (distills or algorithm.teacher) and algorithm.kl_coef == 0:
        problems.append(
            f"algorithm.teacher={algorithm.teacher!r} has no weight with algorithm.kl_coef=0; set algorithm.kl_coef, of "
            "algorithm.advantage='distill' to 1.0"
        )
    if distills and algorithm.kl_in == "reward" and algorithm.kl != "k1":
        problems.append(
            f"algorithm.kl={algorithm.kl!r} as a token reward is not the policy gradient of a KL; set "
            "algorithm.kl='k1', or algorithm.kl_in='loss' with algorithm.kl='full'"
        )
    if distills and algorithm.kl_in == "loss" and algorithm.gamma != 1.0:
        problems.append(
            f"algorithm.gamma={algorithm.gamma} discounts token rewards, of which algorithm.advantage='distill' has none "
            "with algorithm.kl_in='loss'; set algorithm.gamma=1.0, or algorithm.kl_in='reward'"
        )
    if algorithm.teacher and algorithm.ref_refresh_every:
        problems.append(
            f"algorithm.ref_refresh_every={algorithm.ref_refresh_every} would put the policy in the place of "
            f"algorithm.teacher={algorithm.teacher!r}; leave one of them out"
        )
    return problems


def _kl_problems(run: RunConfig) -> list[str]:
    problems, algorithm, kl = [], run.algorithm, run.algorithm.kl
    if kl in FULL_KLS and algorithm.kl_coef == 0:
        problems.append(
            f"algorithm.kl={kl!r} has no effect with algorithm.kl_coef=0, which keeps no reference model; set "
            "algorithm.kl_coef above 0, or leave algorithm.kl at 'k3'"
        )
    if kl in FULL_KLS and algorithm.kl_in == "reward":
        problems.append(
            f"algorithm.kl={kl!r} is a loss over the whole vocabulary and cannot be a token reward; set "
            "algorithm.kl_in='loss', or algorithm.kl to 'k1', 'abs', 'k2' or 'k3'"
        )
    if algorithm.ref_refresh_every and algorithm.kl_coef == 0:
        problems.append(
            f"algorithm.ref_refresh_every={algorithm.ref_refresh_every} has no effect with algorithm.kl_coef=0, which "
            "keeps no reference model; set algorithm.kl_coef above 0, or algorithm.ref_refresh_every=0"
        )
    if algorithm.kl_target and algorithm.kl_coef == 0:
        problems.append(
            f"algorithm.kl_target={algorithm.kl_target} adapts a weight that starts at algorithm.kl_coef=0 and would "
            "stay there; set algorithm.kl_coef to the weight to start from, or algorithm.kl_target=0"
        )
    return problems


def _ratio_problems(run: RunConfig) -> list[str]:
    problems, algorithm = [], run.algorithm
    for name in ("correction", "rejection"):
        value = getattr(algorithm, name)
        low, high = getattr(algorithm, f"{name}_low"), getattr(algorithm, f"{name}_high")
        if value != "none" and algorithm.old_logp == "rollout":
            problems.append(
                f"algorithm.{name}={value!r} weighs the trainer's logprobs against the engine's, but "
                "algorithm.old_logp='rollout' takes the engine's for both; set algorithm.old_logp='auto' or "
                f"'recompute', or algorithm.{name}='none'"
            )
        if value in ("icepop", "geo_mean") and not low < high:
            problems.append(
                f"algorithm.{name}_low={low} is not below algorithm.{name}_high={high}, so that "
                f"algorithm.{name}={value!r} rejects everything; set bounds around 1"
            )
    if algorithm.policy_loss == "clip_cov" and not algorithm.clip_cov_low < algorithm.clip_cov_high:
        problems.append(
            f"algorithm.clip_cov_low={algorithm.clip_cov_low} is not below algorithm.clip_cov_high="
            f"{algorithm.clip_cov_high}; set for example 1.0 and 5.0"
        )
    one_update = run.mini_batch_prompts >= run.data.prompts_per_step and run.learner.epochs == 1
    if algorithm.policy_loss == "kl_cov" and algorithm.old_logp == "auto" and one_update:
        problems.append(
            "algorithm.policy_loss='kl_cov' holds tokens where they were before the step, which has no effect in a "
            "step of one update; set learner.mini_batch_prompts below data.prompts_per_step, or learner.epochs=2"
        )
    return problems


def _dapo_problems(run: RunConfig) -> list[str]:
    problems, algorithm, longest = [], run.algorithm, run.data.max_response_len
    if algorithm.dynamic_sampling and run.rollout.n == 1:
        problems.append(
            "algorithm.dynamic_sampling=True drops groups whose rewards do not differ, but rollout.n=1 gives groups of "
            "one; set rollout.n to 2 or more, or algorithm.dynamic_sampling=False"
        )
    if algorithm.dynamic_sampling and algorithm.dynamic_sampling_batches == 1:
        problems.append(
            "algorithm.dynamic_sampling_batches=1 leaves algorithm.dynamic_sampling=True nothing to ask in place of "
            "flat groups; set 2 or more, or algorithm.dynamic_sampling=False"
        )
    between = algorithm.dynamic_sampling_range
    if between and not algorithm.dynamic_sampling:
        problems.append(
            f"algorithm.dynamic_sampling_range={between} belongs to dynamic sampling; set algorithm.dynamic_sampling="
            "True, or leave it out"
        )
    if between and not (len(between) == 2 and between[0] < between[1]):
        problems.append(
            f"algorithm.dynamic_sampling_range={between} is not (low, high); set for example (0.1, 0.9)"
        )
    if run.reward.overlong_buffer > longest:
        problems.append(
            f"reward.overlong_buffer={run.reward.overlong_buffer} is longer than a response, "
            f"data.max_response_len={longest}; set at most {longest}"
        )
    return problems
