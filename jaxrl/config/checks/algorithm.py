"""Rules between the keys of the algorithm and the critic."""

from jaxrl.config.checks.kl import kl_errors, teacher_errors
from jaxrl.config.checks.roles import role_errors
from jaxrl.config.choices import (
    BASELINE_ADVANTAGES,
    DISCOUNTED_ADVANTAGES,
    GROUP_ADVANTAGES,
    MASKING_CORRECTIONS,
    PENALIZED_LOSSES,
    QUANTIZED_DTYPES,
    RATIO_REJECTIONS,
    RESPONSE_LOSSES,
    TOKEN_REWARD_ADVANTAGES,
    TURN_ADVANTAGES,
)
from jaxrl.config.keys import AlgorithmConfig, CriticConfig, RunConfig
from jaxrl.config.preconditions import unmet
from jaxrl.config.rejections import read_rejection
from jaxrl.config.schema import flatten, is_import_path, to_dict

SHARED_CRITIC_KEYS = ("shared", "loss_coef", "value_clip")


def algorithm_errors(run: RunConfig) -> list[str]:
    """One line per broken rule, with the values and what to set instead."""
    return [
        *unmet(run.algorithm, refused=True),
        *_advantage_errors(run),
        *_reward_errors(run),
        *role_errors(run),
        *_critic_errors(run),
        *teacher_errors(run),
        *_dapo_errors(run),
        *kl_errors(run),
        *_correction_errors(run.algorithm),
        *_token_selection_errors(run),
        *_log_ratio_errors(run),
        *_kl_ratio_errors(run),
        *_top_entropy_errors(run.algorithm),
        *router_replay_errors(run, run.learner.router_replay),
    ]


def algorithm_warnings(run: RunConfig) -> list[str]:
    """Settings far from the paper of a loss, and a quantized rollout without correction."""
    return [
        *unmet(run.algorithm, refused=False),
        *_policy_loss_warnings(run),
        *_rejection_warnings(run.algorithm),
        *_quantization_warnings(run),
    ]


def router_replay_errors(run: RunConfig, mode: str) -> list[str]:
    """Settings under which experts cannot be replayed as `mode` says."""
    errors, key, algorithm = [], f"learner.router_replay={mode!r}", run.algorithm
    if mode in ("R2", "R3") and run.critic.shared:
        errors.append(
            f"{key} replays experts in updates, but critic.shared=True has the values of the same "
            "layers scored without them; set critic.shared=False, or learner.router_replay='off'"
        )
    if mode == "R2" and not _scores_old_logp(run):
        errors.append(
            f"{key} replays the experts of the scoring of old logprobs, but "
            f"algorithm.old_logp={algorithm.old_logp!r} scores none; set "
            "algorithm.old_logp='recompute', or learner.router_replay='R3'"
        )
    stages = {"mesh.stage": run.mesh.stage, "score.stage": run.score.stage}
    if mode == "R2" and (found := {name: n for name, n in stages.items() if n not in (0, 1)}):
        shown = ", ".join(f"{name}={n}" for name, n in found.items())
        errors.append(
            f"{key} does not record experts in pipeline stages ({shown}); set "
            "learner.router_replay='R3', or one stage"
        )
    return errors


def _scores_old_logp(run: RunConfig) -> bool:
    """Whether old logprobs are scored before the first update of a step."""
    algorithm = run.algorithm
    if algorithm.old_logp != "auto":
        return algorithm.old_logp == "recompute"
    return algorithm.correction_normalize or run.updates_per_step > 1


def _policy_loss_warnings(run: RunConfig) -> list[str]:
    warnings, algorithm, name = [], run.algorithm, run.algorithm.policy_loss
    if name in ("gspo", "gspo_token") and min(algorithm.clip_low, algorithm.clip_high) > 0.05:
        warnings.append(
            f"algorithm.policy_loss={name!r} clips the ratio of whole responses, which rarely "
            f"leaves 1 - {algorithm.clip_low} to 1 + {algorithm.clip_high}; the paper has "
            "algorithm.clip_low=3e-4 and algorithm.clip_high=4e-4"
        )
    current = algorithm.old_logp == "rollout" and algorithm.correction != "none"
    if name == "policy_gradient" and run.updates_per_step > 1 and not current:
        warnings.append(
            "algorithm.policy_loss='policy_gradient' has no importance ratio, but a step makes "
            f"{run.updates_per_step} updates, the later ones with samples of an older policy; set "
            "learner.mini_batch_prompts=0 and learner.epochs=1, or an algorithm.correction with "
            "algorithm.old_logp='rollout'"
        )
    return warnings


def _rejection_warnings(algorithm: AlgorithmConfig) -> list[str]:
    name, low, high = algorithm.rejection, algorithm.rejection_low, algorithm.rejection_high
    of_tokens = [spec for spec in algorithm.more_rejections if spec.startswith("token_")]
    warnings = [
        f"algorithm.policy_loss={algorithm.policy_loss!r} with algorithm.more_rejections "
        f"{spec!r}: the loss is one term per response, so rejected tokens only scale it down; set "
        "rejections of responses, such as 'seq_max_k2?max=3'"
        for spec in of_tokens
        if algorithm.policy_loss in RESPONSE_LOSSES
    ]
    if name not in ("token_k1", "seq_sum_k1") or (low, high) != (0.99, 1.01):
        return warnings
    return [
        *warnings,
        f"algorithm.rejection={name!r} with algorithm.rejection_low=0.99 and "
        "algorithm.rejection_high=1.01, which fit the geometric mean of a response "
        "('seq_mean_k1'), rejects almost everything; set for example 0.5 and 2.0",
    ]


def _quantization_warnings(run: RunConfig) -> list[str]:
    rollout, algorithm = run.rollout, run.algorithm
    quantized = [
        f"rollout.{key}={value!r}"
        for key, value in (("dtype", rollout.dtype), ("kv_dtype", rollout.kv_dtype))
        if value in QUANTIZED_DTYPES
    ]
    if not quantized or algorithm.correction != "none" or algorithm.old_logp == "rollout":
        return []
    return [
        f"{' and '.join(quantized)} samples from another distribution than the policy that is "
        "trained, and algorithm.correction='none' treats the samples as on-policy: the gradient is "
        "biased (see mismatch/kl); set algorithm.correction='token_tis'"
    ]


def _advantage_errors(run: RunConfig) -> list[str]:
    errors, algorithm, n = [], run.algorithm, run.rollout.n
    name = algorithm.advantage
    if name in GROUP_ADVANTAGES and n == 1:
        errors.append(
            f"rollout.n=1 gives algorithm.advantage={name!r} no other sample of the prompt to "
            "compare with; set rollout.n to 2 or more, or algorithm.advantage to "
            "'reinforce_plus_plus' or 'remax'"
        )
    kl_per_token = algorithm.kl_in == "reward" and algorithm.kl_coef != 0
    if name == "remax" and kl_per_token and algorithm.policy_loss in RESPONSE_LOSSES:
        errors.append(
            "algorithm.advantage='remax' with algorithm.kl_in='reward' gives each token its own "
            f"advantage, but algorithm.policy_loss={algorithm.policy_loss!r} has one ratio per "
            "response and averages them; set algorithm.kl_in='loss', or "
            "algorithm.policy_loss='gspo_token'"
        )
    if name == "online_dpo" and not algorithm.kl_coef:
        errors.append(
            "algorithm.advantage='online_dpo' needs beta, the weight of its log ratios to the "
            "reference, but algorithm.kl_coef=0.0; set for example algorithm.kl_coef=0.1"
        )
    if name == "online_dpo" and algorithm.kl_target:
        errors.append(
            f"algorithm.kl_target={algorithm.kl_target} changes algorithm.kl_coef, which is the "
            "fixed beta of algorithm.advantage='online_dpo'; set algorithm.kl_target=0.0"
        )
    if name in BASELINE_ADVANTAGES:
        errors += _score_norm_errors(run)
    users_own = is_import_path(name)
    if algorithm.gamma != 1.0 and name not in DISCOUNTED_ADVANTAGES and not users_own:
        errors.append(
            f"algorithm.gamma={algorithm.gamma} has no effect with algorithm.advantage={name!r}, "
            "which gives a response one advantage; set algorithm.gamma=1.0, or "
            "algorithm.advantage='reinforce_plus_plus'"
        )
    if name in TURN_ADVANTAGES and not run.env.episodes:
        errors.append(
            f"algorithm.advantage={name!r} compares turns, and without an environment a response "
            f"is one; set one of {', '.join(run.env.kinds)}, or algorithm.advantage='grpo'"
        )
    if algorithm.turn_weight != 1.0 and name not in TURN_ADVANTAGES and not users_own:
        errors.append(
            f"algorithm.turn_weight={algorithm.turn_weight} has no effect with "
            f"algorithm.advantage={name!r}; set algorithm.turn_weight=1.0, or "
            "algorithm.advantage='gigpo'"
        )
    if algorithm.branch_credit != "all" and not run.env.program:
        errors.append(
            f"algorithm.branch_credit={algorithm.branch_credit!r} has no effect without an agent, "
            "whose episodes have branches; set algorithm.branch_credit='all', or env.agent"
        )
    if algorithm.lam != 1.0 and name != "gae" and not users_own:
        errors.append(
            f"algorithm.lam={algorithm.lam} has no effect with algorithm.advantage={name!r}, which "
            "has no values; set algorithm.lam=1.0, or algorithm.advantage='gae'"
        )
    return errors


def _score_norm_errors(run: RunConfig) -> list[str]:
    """Keys that also read the second result of the scoring, or that change its distribution."""
    others = {
        "algorithm.top_entropy": (run.algorithm.top_entropy, 1.0),
        "algorithm.keep_sampling_mask": (run.algorithm.keep_sampling_mask, False),
    }
    if run.learner.router_replay == "R2":
        others["learner.router_replay"] = ("R2", "off")
    return [
        f"{key}={value!r} does not go together with algorithm.advantage="
        f"{run.algorithm.advantage!r}, whose scoring returns Σ π² over the vocabulary; set "
        f"{key}={neutral!r}"
        for key, (value, neutral) in others.items()
        if value != neutral
    ]


def _reward_errors(run: RunConfig) -> list[str]:
    """Changes of the rewards that an estimator does not see, or that make them negative."""
    name, reward, errors = run.algorithm.advantage, run.reward, []
    n_rewards = len(reward.functions) + bool(run.reward_model.path) + bool(reward.overlong_buffer)
    if name == "gdpo" and n_rewards < 2:
        errors.append(
            f"algorithm.advantage='gdpo' normalizes several rewards apart, but there is {n_rewards}"
            f" with reward.functions={reward.functions}; add a function, or set "
            "algorithm.advantage='grpo'"
        )
    reads_tokens = name in TOKEN_REWARD_ADVANTAGES or is_import_path(name)
    if run.reward_model.step_reward == "tokens" and not reads_tokens:
        errors.append(
            f"reward_model.step_reward='tokens' gives rewards to tokens, which algorithm.advantage="
            f"{name!r} does not read; set algorithm.advantage to one of "
            f"{', '.join(TOKEN_REWARD_ADVANTAGES)}, or reward_model.step_reward='min'"
        )
    changes = {
        "gdpo": {"normalize": False, "clip": (), "on_error": "exclude"}
        | {"length_penalty": 0.0, "truncated_coef": 1.0},
        "max_rl": {"normalize": False, "overlong_buffer": 0, "length_penalty": 0.0},
        "remax": {"length_penalty": 0.0},
    }
    reasons = {
        "gdpo": "changes the sum of the rewards, but algorithm.advantage='gdpo' reads each apart",
        "max_rl": "makes rewards negative, but algorithm.advantage='max_rl' divides by their mean",
        "remax": "compares the samples of a prompt, but its greedy baseline has no others",
    }
    for key, neutral in changes.get(name, {}).items():
        if (value := getattr(reward, key)) != neutral:
            errors.append(f"reward.{key}={value!r} {reasons[name]}; set reward.{key}={neutral!r}")
    return errors


def _critic_errors(run: RunConfig) -> list[str]:
    critic, default = flatten(to_dict(run.critic)), flatten(to_dict(CriticConfig()))
    changed = {f"critic.{name}": v for name, v in critic.items() if v != default[name]}
    errors = []
    if changed and not run.has_critic:
        shown = ", ".join(f"{name}={value!r}" for name, value in changed.items())
        errors.append(
            f"{shown} but algorithm.advantage={run.algorithm.advantage!r} has no critic; set "
            "algorithm.advantage='gae', or omit the critic's keys"
        )
    elif run.critic.shared:
        unused = [n for n in changed if n.removeprefix("critic.") not in SHARED_CRITIC_KEYS]
        if unused:
            errors.append(
                f"{', '.join(unused)} set up a separate critic, but critic.shared=True trains a "
                "value head on the policy's backbone, in its update; omit them, or set "
                "critic.shared=False"
            )
    elif "critic.loss_coef" in changed:
        errors.append(
            f"critic.loss_coef={run.critic.loss_coef} weights the value loss relative to the "
            "policy loss, but a separate critic has only the value loss; set critic.lr, or "
            "critic.shared=True"
        )
    if 0 < run.total_steps <= run.critic.warmup_steps:
        errors.append(
            f"critic.warmup_steps={run.critic.warmup_steps} leaves none of "
            f"total_steps={run.total_steps} for the policy; set fewer"
        )
    return errors


def _correction_errors(algorithm: AlgorithmConfig) -> list[str]:
    errors, has_ratio = [], algorithm.policy_loss != "policy_gradient"
    if algorithm.correction != "none" and algorithm.old_logp == "rollout" and has_ratio:
        errors.append(
            f"algorithm.correction={algorithm.correction!r} weights the trainer's logprobs against "
            "the engine's, which the ratio of algorithm.policy_loss="
            f"{algorithm.policy_loss!r} already does with algorithm.old_logp='rollout'; set "
            "algorithm.old_logp='auto' or 'recompute', or algorithm.correction='none'"
        )
    if algorithm.more_rejections and algorithm.rejection == "none":
        errors.append(
            f"algorithm.more_rejections={algorithm.more_rejections} are in addition to "
            "algorithm.rejection='none'; set one of them as algorithm.rejection"
        )
    for spec in algorithm.more_rejections:
        errors += [f"algorithm.more_rejections: {line}" for line in read_rejection(spec)[1]]
    bounds = {
        "correction": (algorithm.correction_low, algorithm.correction_high, MASKING_CORRECTIONS),
        "rejection": (algorithm.rejection_low, algorithm.rejection_high, RATIO_REJECTIONS),
    }
    for name, (low, high, values) in bounds.items():
        value = getattr(algorithm, name)
        if value in values and not low < high:
            errors.append(
                f"algorithm.{name}_low={low} is not below algorithm.{name}_high={high}, so that "
                f"algorithm.{name}={value!r} rejects everything; set bounds around 1"
            )
    if algorithm.correction_floor >= algorithm.correction_high:
        errors.append(
            f"algorithm.correction_floor={algorithm.correction_floor} is not below "
            f"algorithm.correction_high={algorithm.correction_high}; set bounds around 1"
        )
    name = algorithm.correction
    floored = name in ("token_tis", "seq_tis") or is_import_path(name)
    if algorithm.correction_floor and not floored:
        errors.append(
            f"algorithm.correction_floor={algorithm.correction_floor} has no effect with "
            f"algorithm.correction={algorithm.correction!r}; set 'token_tis' or 'seq_tis', or "
            "algorithm.correction_floor=0.0"
        )
    if algorithm.correction_normalize and algorithm.correction == "none":
        errors.append(
            "algorithm.correction_normalize=True has no effect with algorithm.correction='none'; "
            "set a correction such as 'token_tis', or algorithm.correction_normalize=False"
        )
    if algorithm.correction_normalize and algorithm.old_logp == "rollout":
        errors.append(
            "algorithm.correction_normalize=True needs the weights of a mini-batch before its "
            "update, but with algorithm.old_logp='rollout' they follow the current policy; set "
            "algorithm.old_logp='auto', or algorithm.correction_normalize=False"
        )
    return errors


def _token_selection_errors(run: RunConfig) -> list[str]:
    errors, algorithm = [], run.algorithm
    if algorithm.policy_loss == "clip_cov" and not algorithm.clip_cov_low < algorithm.clip_cov_high:
        errors.append(
            f"algorithm.clip_cov_low={algorithm.clip_cov_low} is not below algorithm.clip_cov_high="
            f"{algorithm.clip_cov_high}; set for example 1.0 and 5.0"
        )
    if algorithm.policy_loss == "kl_cov" and _ratio_is_one(run):
        errors.append(
            "algorithm.policy_loss='kl_cov' penalizes changes since the start of the step, which "
            "are zero in a step of one update; set learner.mini_batch_prompts below "
            "data.prompts_per_step, or learner.epochs=2"
        )
    return errors


def _ratio_is_one(run: RunConfig) -> bool:
    """Whether the old policy is always the current one: a step of one update."""
    one_update = run.mini_batch_prompts >= run.data.prompts_per_step and run.learner.epochs == 1
    return run.algorithm.old_logp == "auto" and one_update


def _log_ratio_errors(run: RunConfig) -> list[str]:
    """The squared log ratio needs a loss that has it, and a ratio that is not 1."""
    algorithm = run.algorithm
    name, beta = algorithm.policy_loss, algorithm.log_ratio_penalty
    if beta and name not in PENALIZED_LOSSES and not is_import_path(name):
        return [
            f"algorithm.log_ratio_penalty={beta} has no effect with algorithm.policy_loss="
            f"{name!r}; set algorithm.log_ratio_penalty=0.0, or algorithm.policy_loss to one of "
            f"{', '.join(map(repr, PENALIZED_LOSSES))}"
        ]
    if name == "dro" and not beta:
        return [
            "algorithm.policy_loss='dro' is bounded by the squared log ratio alone, but "
            "algorithm.log_ratio_penalty=0.0; set it above 0, for example 0.05"
        ]
    if beta and _ratio_is_one(run):
        return [
            f"algorithm.log_ratio_penalty={beta} penalizes changes since the old policy, which are "
            "zero in a step of one update; set algorithm.old_logp='rollout' or 'recompute', or "
            "learner.epochs=2"
        ]
    return []


def _kl_ratio_errors(run: RunConfig) -> list[str]:
    """A weight by the importance ratio needs a ratio that is not 1."""
    if not run.algorithm.kl_ratio_max or not _ratio_is_one(run):
        return []
    return [
        f"algorithm.kl_ratio_max={run.algorithm.kl_ratio_max} weights the KL by the importance "
        "ratio, which is 1 in a step of one update; set algorithm.old_logp='rollout' or "
        "'recompute', or algorithm.kl_ratio_max=0.0"
    ]


def _top_entropy_errors(algorithm: AlgorithmConfig) -> list[str]:
    """A selection by entropy needs scored tokens, and a loss of single tokens."""
    fraction, name, errors = algorithm.top_entropy, algorithm.policy_loss, []
    if fraction == 1.0:
        return []
    if algorithm.old_logp == "rollout":
        errors.append(
            f"algorithm.top_entropy={fraction} needs the entropies of the tokens, but with "
            "algorithm.old_logp='rollout' the trainer does not score them; set "
            "algorithm.old_logp='recompute', or algorithm.top_entropy=1.0"
        )
    if name in ("gspo", "gmpo", "clip_cov", "kl_cov"):
        why = "selects tokens itself" if name.endswith("cov") else "is one term per response"
        errors.append(
            f"algorithm.top_entropy={fraction} selects tokens, but algorithm.policy_loss={name!r} "
            f"{why}; set algorithm.policy_loss='ppo_clip' or 'gspo_token', or "
            "algorithm.top_entropy=1.0"
        )
    return errors


def _dapo_errors(run: RunConfig) -> list[str]:
    errors, algorithm, longest = [], run.algorithm, run.data.max_response_len
    if algorithm.dynamic_sampling and run.rollout.n == 1:
        errors.append(
            "algorithm.dynamic_sampling=True drops groups whose rewards are all equal, but "
            "rollout.n=1 gives groups of one; set rollout.n to 2 or more, or "
            "algorithm.dynamic_sampling=False"
        )
    if algorithm.dynamic_sampling and algorithm.dynamic_sampling_batches == 1:
        errors.append(
            "algorithm.dynamic_sampling_batches=1 leaves algorithm.dynamic_sampling=True no "
            "prompts to replace dropped groups; set 2 or more, or algorithm.dynamic_sampling=False"
        )
    between = algorithm.dynamic_sampling_range
    if between and not algorithm.dynamic_sampling:
        errors.append(
            f"algorithm.dynamic_sampling_range={between} belongs to dynamic sampling; set "
            "algorithm.dynamic_sampling=True, or omit it"
        )
    if between and not (len(between) == 2 and between[0] < between[1]):
        errors.append(
            f"algorithm.dynamic_sampling_range={between} is not (low, high); set for example "
            "(0.1, 0.9)"
        )
    if run.reward.overlong_buffer > longest:
        errors.append(
            f"reward.overlong_buffer={run.reward.overlong_buffer} is longer than a response, "
            f"data.max_response_len={longest}; set at most {longest}"
        )
    return errors
