"""Keys of the algorithm: advantages, policy loss, KL, importance weights, filters."""

import dataclasses

from jaxrl.config.choices import (
    ADVANTAGES,
    AGGREGATIONS,
    BRANCH_CREDITS,
    CORRECTIONS,
    KL_PARTS,
    KL_PLACES,
    KL_RATIO_LEVELS,
    KLS,
    OLD_LOGPS,
    POLICY_LOSSES,
    REJECTION_SCOPES,
    REJECTIONS,
    TOP_K_FROM,
)
from jaxrl.config.schema import key


@dataclasses.dataclass(frozen=True)
class AlgorithmConfig:
    advantage: str = key("grpo", "Advantage estimator", choices=ADVANTAGES, or_path=True)
    norm_adv_by_std: bool = key(
        True,
        "grpo, grpo_passk, gdpo and gigpo: divide by the group's standard deviation (false makes "
        "grpo the same as dr_grpo)",
    )
    gamma: float = key(
        1.0,
        "gae, reinforce_plus_plus and distill: discount factor of later token rewards; gigpo: of "
        "the rewards of later turns",
        ge=0,
        le=1,
    )
    turn_weight: float = key(
        1.0, "gigpo: weight of the comparison of turns that answered the same state", ge=0
    )
    role_decay: float = key(
        0.95, "rae: share of the former baseline of a role after one reward", ge=0, le=1
    )
    episode_roles: tuple[str, ...] = key(
        ("solver",),
        "hierarchical_grpo: roles that are compared within an episode; others over the group",
    )
    branch_credit: str = key(
        "all",
        "Conversations of an agent's episode that are trained: all branches, or the last one, "
        "which has the latest turn",
        choices=BRANCH_CREDITS,
    )
    lam: float = key(
        1.0,
        "gae: lambda; 0 = rely on the critic's value of the next token, 1 = on the rewards alone",
        ge=0,
        le=1,
    )
    policy_loss: str = key("ppo_clip", "Policy loss", choices=POLICY_LOSSES, or_path=True)
    clip_low: float = key(
        0.2,
        "The ratio is clipped below 1 - clip_low (gspo: the ratio of the response; gmpo: the log "
        "ratio below -clip_low; dppo_tv and dppo_kl: bound on the divergence of a token that "
        "became less likely)",
        ge=0,
        le=1,
    )
    clip_high: float = key(
        0.2,
        "The ratio is clipped above 1 + clip_high (clip-higher: more than clip_low; gmpo: the log "
        "ratio above clip_high; dppo_tv and dppo_kl: bound on the divergence of a token that "
        "became more likely)",
        ge=0,
    )
    clip_dual: float = key(
        3.0, "dual_clip: upper bound of the ratio for tokens with a negative advantage", gt=1
    )
    sapo_tau_positive: float = key(1.0, "sapo: steepness of the gate for positive advantages", gt=0)
    sapo_tau_negative: float = key(
        1.05, "sapo: steepness of the gate for all other advantages", gt=0
    )
    vespo_k_positive: float = key(2.0, "vespo: power of w for advantages of 0 or more", ge=0)
    vespo_lambda_positive: float = key(3.0, "vespo: decay of w for advantages of 0 or more", gt=0)
    vespo_k_negative: float = key(3.0, "vespo: power of w for negative advantages", ge=0)
    vespo_lambda_negative: float = key(2.0, "vespo: decay of w for negative advantages", gt=0)
    top_entropy: float = key(
        1.0,
        "Fraction of a mini-batch's response tokens with the largest entropies that have a policy "
        "loss (80/20 rule: 0.2); 1 = all",
        gt=0,
        le=1,
    )
    cov_fraction: float = key(
        0.0002,
        "clip_cov and kl_cov: fraction of a mini-batch's response tokens that are selected",
        gt=0,
        le=1,
    )
    clip_cov_low: float = key(1.0, "clip_cov: minimum covariance of a selected token")
    clip_cov_high: float = key(5.0, "clip_cov: maximum covariance of a selected token")
    kl_cov_coef: float = key(
        1.0, "kl_cov: weight of |logp - old_logp| at the selected tokens", ge=0
    )
    ratio_max: float = key(20.0, "dppo_tv and dppo_kl: maximum weight of a token", gt=0)
    log_ratio_penalty: float = key(
        0.0,
        "dro, dppo_tv and dppo_kl: beta of the term beta / 2 (logp - old_logp)^2 of every token",
        ge=0,
    )
    log_ratio_clamp: float = key(
        20.0,
        "Bound on the absolute log importance ratio of a token, which has no gradient beyond; 0 = "
        "none",
        ge=0,
    )
    aggregation: str = key(
        "token_mean",
        "Reduction of token losses to one number; seq_mean_token_sum_norm is Dr.GRPO: sum over "
        "tokens / max_response_len",
        choices=AGGREGATIONS,
        or_path=True,
    )
    parts: tuple[str, ...] = key(
        (),
        "Terms of the loss, each with its own weight, tokens and denominator: cross-entropy on "
        "'observations?weight=0.1' (ECHO: tokens of the environment) and "
        "'demonstrations?weight=0.5' (of data.demonstrations); and, in place of the keys that "
        "weight them, 'policy', 'kl', 'distillation', 'entropy', 'router'; options: weight, "
        "aggregation, source, final_weight, ramp",
    )
    source_parts: tuple[str, ...] = key(
        (),
        "Parts of the rows of a data source, 'math?parts=policy,kl': the entries of "
        "algorithm.parts that train them; rows of other sources have all entries",
    )
    teacher: str = key(
        "",
        "Reference model of the KL term, in any form that model.path accepts, or the URL of a "
        "server, 'http://host:8000/v1?model=NAME'; with the policy's tokenizer; '' = the initial "
        "policy",
    )
    more_teachers: tuple[str, ...] = key(
        (),
        "Teachers in addition to `teacher`, by data source: 'PATH?source=math' reads the responses "
        "to rows with this data_source in place of it",
    )
    kl: str = key(
        "auto",
        "Estimator of KL(policy | reference): auto = k1 in the reward, k3 in the loss; with + it "
        "keeps its value but has the gradient of k2; k3_unbiased = k3 times the importance ratio; "
        "full and jsd compare the whole vocabulary",
        choices=("auto", *KLS),
        or_path=True,
    )
    kl_beta: float = key(
        0.5,
        "jsd: 1 = KL(policy | reference), 0 = KL(reference | policy), between them the generalised "
        "Jensen-Shannon divergence (GKD)",
        ge=0,
        le=1,
    )
    kl_top_k: int = key(
        0,
        "full and jsd: number of the reference's most likely tokens that are compared (of other "
        "ones with kl_top_k_from), all others as one; the reference then scores before the update; "
        "0 = the whole vocabulary",
        ge=0,
    )
    kl_top_k_from: str = key(
        "teacher",
        "kl_top_k: whose most likely tokens are compared. student = of the policy at the start of "
        "the step, whose logprobs the teacher then scores; union = of both",
        choices=TOP_K_FROM,
    )
    kl_coef: float = key(
        0.0,
        "Weight of the KL term (initial weight with kl_target); 0 = no reference model is loaded",
        ge=0,
    )
    kl_in: str = key(
        "loss",
        "Where the KL term is applied: added to the loss, or subtracted from the token rewards",
        choices=KL_PLACES,
    )
    kl_clamp: float = key(
        0.0,
        "Bound on the absolute value of the KL estimate of a token, which has no gradient beyond; "
        "0 = none",
        ge=0,
    )
    kl_ratio_max: float = key(
        0.0,
        "Weight the KL term in the loss by the importance ratio of the policy loss, at most this "
        "one and without gradient (SDPO's is_clip); 0 = unweighted",
        ge=0,
    )
    kl_ratio_level: str = key(
        "token",
        "kl_ratio_max: ratio of each token, or of the whole response",
        choices=KL_RATIO_LEVELS,
    )
    kl_target: float = key(
        0.0, "Target KL per token to which kl_coef adapts; 0 = fixed weight", ge=0
    )
    kl_horizon: float = key(
        10000.0, "Samples over which the adaptive KL weight changes by at most 20 %", gt=0
    )
    ref_refresh_every: int = key(
        0,
        "Steps after which the reference model is replaced by the current policy; 0 = never",
        ge=0,
    )
    ref_refresh_rate: float = key(
        1.0,
        "ref_refresh_every: share of the policy in the new reference, which keeps the rest of its "
        "weights (TR-DPO's soft update); 1 = a copy of the policy",
        gt=0,
        le=1,
    )
    entropy_coef: float = key(
        0.0, "Weight of the entropy bonus (initial weight with entropy_target)", ge=0
    )
    entropy_target: float = key(
        0.0,
        "Target entropy per token: the bonus grows below it, and shrinks and is off above it; 0 = "
        "fixed weight",
        ge=0,
    )
    entropy_delta: float = key(0.0001, "Change of the adaptive entropy weight per step", gt=0)
    correction: str = key(
        "none",
        "Importance weight that corrects for the engine-trainer mismatch and for staleness",
        choices=CORRECTIONS,
        or_path=True,
    )
    correction_low: float = key(0.5, "icepop and seq_icepop: weights below are replaced by 0", ge=0)
    correction_high: float = key(
        2.0,
        "token_tis and seq_tis: maximum weight; icepop and seq_icepop: weights above are replaced "
        "by 0",
        gt=0,
    )
    correction_floor: float = key(0.0, "token_tis and seq_tis: minimum weight; 0 = none", ge=0)
    correction_normalize: bool = key(
        False,
        "Divide the importance weights by their mean over the mini-batch (of its tokens, or of "
        "its responses for seq_tis and seq_icepop)",
    )
    rejection: str = key(
        "none",
        "Mask tokens or whole responses whose engine-trainer mismatch is too large, in addition to "
        "the correction: by the k1, k2 or k3 of a token, or their sum, mean or maximum over a "
        "response",
        choices=REJECTIONS,
        or_path=True,
    )
    rejection_low: float = key(
        0.99,
        "token_k1, seq_sum_k1, seq_mean_k1: minimum ratio (of the token; product, geometric mean)",
        ge=0,
    )
    rejection_high: float = key(
        1.01,
        "token_k1, seq_sum_k1, seq_mean_k1: maximum ratio (of the token; product, geometric mean)",
        gt=0,
    )
    rejection_max: float = key(
        0.01, "Rejections by k2 or k3: maximum value (of the token; sum, mean, maximum)", gt=0
    )
    more_rejections: tuple[str, ...] = key(
        (),
        "Masks in addition to `rejection`, with their bounds, as 'token_k1?low=0.5&high=2' or "
        "'seq_max_k2?max=3': a token is rejected that one of them masks",
    )
    rejection_scope: str = key(
        "all",
        "What rejected tokens leave. all = policy loss, KL and entropy terms, and the denominator "
        "of the loss (verl); policy_loss = only the policy loss",
        choices=REJECTION_SCOPES,
    )
    off_policy_threshold: float = key(
        0.0,
        "Mask tokens with a negative advantage in responses whose mean log(engine / current "
        "policy) is larger (DeepSeek-V3.2); 0 = off",
        ge=0,
    )
    old_logp: str = key(
        "auto",
        "Logprobs in the denominator of the ratio: rollout = from the engine, recompute = scored "
        "by the trainer; auto = recompute only if a step has more than one update, or with "
        "correction_normalize or top_entropy",
        choices=OLD_LOGPS,
    )
    keep_sampling_mask: bool = key(
        False,
        "Restrict the policy in ratios and corrections to the tokens that top_k, top_p and min_p "
        "kept (DeepSeek-V3.2); a token of a micro-batch takes one bit per token of the vocabulary",
    )
    dynamic_sampling: bool = key(
        False,
        "DAPO dynamic sampling: drop groups whose rewards are all equal and sample more prompts "
        "instead",
    )
    dynamic_sampling_range: tuple[float, ...] = key(
        (),
        "dynamic_sampling: (low, high) also drops groups whose mean reward is not between the two; "
        "() = only groups of equal rewards",
    )
    dynamic_sampling_batches: int = key(
        4,
        "dynamic_sampling: maximum batches of data.prompts_per_step prompts sampled in one step; "
        "after that, dropped groups fill the step",
        ge=1,
    )
    overlong_filtering: bool = key(
        False,
        "DAPO overlong filtering: responses truncated at data.max_response_len count for the "
        "advantages of their group but are masked in the loss",
    )
    drop_flat_groups: bool = key(
        True,
        "Leave groups whose rewards are all equal out of the update if they have no gradient: "
        "neither a KL term nor an entropy bonus; saves their computation and changes no metric",
    )

    @property
    def part_kinds(self) -> frozenset[str]:
        """The kinds of the entries of `parts`."""
        return frozenset(spec.partition("?")[0] for spec in self.parts)

    @property
    def has_entropy(self) -> bool:
        """Whether the loss has an entropy term."""
        named = "entropy" in self.part_kinds
        return named or self.entropy_coef != 0.0 or self.entropy_target > 0.0

    @property
    def has_kl(self) -> bool:
        """Whether the loss or the reward has a KL to the reference."""
        return self.kl_coef != 0.0 or bool(self.part_kinds & {*KL_PARTS})

    @property
    def removes_rejected(self) -> bool:
        """Whether rejected tokens leave all terms of the loss and its denominator."""
        return self.rejection != "none" and self.rejection_scope == "all"

    @property
    def kl_estimator(self) -> str:
        """The estimator that `kl` names; by place if it is auto."""
        by_place = "k1" if self.kl_in == "reward" else "k3"
        return by_place if self.kl == "auto" else self.kl

    @property
    def divergence_beta(self) -> float:
        """Which divergence over the vocabulary: that of kl_beta, or KL(policy | reference)."""
        return self.kl_beta if self.kl == "jsd" else 1.0

    @property
    def has_correction(self) -> bool:
        """Whether the policy loss has importance weights or masks."""
        named = self.correction != "none" or self.rejection != "none"
        return named or self.off_policy_threshold > 0.0
