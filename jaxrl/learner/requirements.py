"""Which logprobs and models an algorithm needs, so that nothing else is computed or kept."""

from jaxrl.algorithms.advantages import ADVANTAGES
from jaxrl.algorithms.kl import KL_ESTIMATORS, KLEstimator
from jaxrl.algorithms.table import lookup
from jaxrl.config.keys import AlgorithmConfig, RunConfig
from jaxrl.config.teachers import model_teachers, teachers


def ratio_source(cfg: RunConfig) -> str:
    """Source of old_logp in the importance ratio exp(logp - old_logp).

    "rollout": the engine. "recompute": scored before the first update. "policy": the policy of the
    current update, without gradient, which is the same number if a step makes a single update. The
    mean of importance weights over a mini-batch and a selection by entropy need a scoring before
    the update.
    """
    wanted = cfg.algorithm.old_logp
    if wanted == "auto":
        before = cfg.updates_per_step > 1 or cfg.algorithm.correction_normalize
        before = before or cfg.algorithm.top_entropy < 1.0
        return "recompute" if before else "policy"
    if wanted in ("rollout", "recompute"):
        return wanted
    raise ValueError(
        f"config.algorithm.old_logp = {wanted!r} is not known; set 'auto', 'rollout' or 'recompute'"
    )


def needs_old_logp(cfg: RunConfig) -> bool:
    """Whether Batch.old_logp must be scored before the updates of a step."""
    return ratio_source(cfg) == "recompute"


def policy_is_teacher(cfg: RunConfig) -> bool:
    """Whether the KL is to the policy itself, which reads more than its prompt."""
    settings = cfg.self_distillation
    return bool(settings.context) and settings.teacher == "policy"


def needs_score_norms(cfg: RunConfig) -> bool:
    """Whether the advantages need the norm of the policy's score function at every token."""
    row = lookup(ADVANTAGES, cfg.algorithm.advantage, "algorithm.advantage")
    return "score_norms" in row.inputs


def needs_role_baselines(cfg: RunConfig) -> bool:
    """Whether the advantages need running means of the rewards of roles."""
    row = lookup(ADVANTAGES, cfg.algorithm.advantage, "algorithm.advantage")
    return "role_baselines" in row.inputs


def needs_collision(cfg: RunConfig) -> bool:
    """Whether the policy's scoring also gives Σ π² over the vocabulary.

    A run of RL does not read `preference`, and may need another second result.
    """
    entropies_or_experts = cfg.algorithm.top_entropy < 1.0 or cfg.learner.router_replay == "R2"
    return needs_score_norms(cfg) or (cfg.preference.weighted and not entropies_or_experts)


def needs_policy_logp(cfg: RunConfig) -> bool:
    """Whether the policy is scored in a step before its updates.

    As the old policy, as the teacher, or for the norms of its score function.
    """
    return needs_old_logp(cfg) or policy_is_teacher(cfg) or needs_score_norms(cfg)


def needs_ref(cfg: RunConfig) -> bool:
    """Whether a reference model is kept."""
    algo = cfg.algorithm
    if not algo.has_kl or policy_is_teacher(cfg):
        return False
    return not algo.teacher or bool(model_teachers(algo))


def scores_by_teacher(cfg: RunConfig) -> bool:
    """Whether the logprobs of the KL come from several teachers, or from a server."""
    algo = cfg.algorithm
    if not algo.teacher or not algo.has_kl or policy_is_teacher(cfg):
        return False
    found = teachers(algo)
    return len(found) > 1 or any(teacher.is_endpoint for teacher in found)


def reads_responses(cfg: RunConfig) -> bool:
    """Whether teachers score the responses of a step before these are packed in mini-batches."""
    return scores_by_teacher(cfg) or bool(teacher_top_k(cfg))


def shares_base(cfg: RunConfig) -> bool:
    """Whether the reference model is the base of the policy's adapters, in training's arrays."""
    return bool(cfg.lora.rank) and not cfg.algorithm.teacher


def kl_in_loss(cfg: AlgorithmConfig) -> bool:
    """Whether the KL to the reference is part of the loss."""
    return cfg.has_kl and cfg.kl_in == "loss"


def needs_every_response(cfg: RunConfig) -> bool:
    """Whether an update needs responses with advantages of 0.

    KL, entropy, load-balancing and value terms, the squared log ratio and a part of the objective
    on observations give them a gradient. If
    rejected tokens leave the denominator, only the update knows which do. The quantile of a
    selection by entropy is over the tokens of all.
    """
    algo = cfg.algorithm
    in_loss = algo.has_entropy or kl_in_loss(algo) or cfg.critic.shared
    in_loss = in_loss or algo.log_ratio_penalty != 0.0 or algo.top_entropy < 1.0
    in_loss = in_loss or "observations" in algo.part_kinds
    return in_loss or algo.removes_rejected or balances_experts(cfg)


def balances_experts(cfg: RunConfig) -> bool:
    """Whether the loss has a load-balancing term."""
    return cfg.learner.router_aux_coef != 0.0 or "router" in cfg.algorithm.part_kinds


def full_kl_in_loss(cfg: RunConfig) -> bool:
    """Whether the loss runs the reference model itself, for the KL over the whole vocabulary.

    Raises ValueError for a full KL in the reward, which only has sampled tokens.
    """
    if not needs_ref(cfg) or "exact_kl" not in _kl_estimator(cfg).inputs:
        return False
    if cfg.algorithm.kl_top_k:  # the teacher scores before the update
        return False
    if cfg.algorithm.kl_in != "loss":
        raise ValueError(
            f"config.algorithm.kl = {cfg.algorithm.kl_estimator!r} is a loss, but kl_in = "
            f"{cfg.algorithm.kl_in!r}; set kl_in='loss', or kl='k1'"
        )
    return True


def teacher_top_k(cfg: RunConfig) -> int:
    """Number of most likely ids of a model that the loss compares; 0 = it compares no ids."""
    return cfg.algorithm.kl_top_k if kl_in_loss(cfg.algorithm) else 0


def compares_student_ids(cfg: RunConfig) -> bool:
    """Whether some of these ids are the most likely ones of the policy."""
    return bool(teacher_top_k(cfg)) and cfg.algorithm.kl_top_k_from != "teacher"


def n_compared_ids(cfg: RunConfig) -> int:
    """Number of ids of a token in a batch of the update: those of one model, or of both."""
    return teacher_top_k(cfg) * (2 if cfg.algorithm.kl_top_k_from == "union" else 1)


def needs_ref_scores(cfg: RunConfig) -> bool:
    """Whether a reference on the devices scores tokens before the updates of a step."""
    only_servers = bool(cfg.algorithm.teacher) and not model_teachers(cfg.algorithm)
    return needs_ref_logp(cfg) or (bool(teacher_top_k(cfg)) and not only_servers)


def needs_ref_logp(cfg: RunConfig) -> bool:
    """Whether Batch.ref_logp must be scored with the reference model."""
    if teacher_top_k(cfg):
        return False
    if full_kl_in_loss(cfg):
        return "ref_logp" in _kl_estimator(cfg).inputs
    return needs_ref(cfg)


def adapts_coefs(cfg: RunConfig) -> bool:
    """Whether the coefficients of the loss change from update to update."""
    algo = cfg.algorithm
    targets = algo.kl_target > 0.0 or algo.entropy_target > 0.0
    return targets or algo.correction_normalize or bool(algo.parts)


def _kl_estimator(cfg: RunConfig) -> KLEstimator:
    return lookup(KL_ESTIMATORS, cfg.algorithm.kl_estimator, "algorithm.kl")
