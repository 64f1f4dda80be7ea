"""Requirements of a choice of the algorithm on the other choices, as data.

The functions of the names are in the tables of jaxrl/algorithms. jaxrl/config/checks walks the
table below; scripts/pages/combinations.py prints the matrix of docs/reference/algorithms.md.
"""

import dataclasses

from jaxrl.config.choices import (
    ADVANTAGES,
    BASELINE_ADVANTAGES,
    DISCOUNTED_ADVANTAGES,
    FULL_KLS,
    KLS,
    ROLE_ADVANTAGES,
)
from jaxrl.config.keys import AlgorithmConfig
from jaxrl.config.schema import is_import_path

RESPONSE_ADVANTAGES = tuple(
    a for a in ADVANTAGES if a not in (*DISCOUNTED_ADVANTAGES, *BASELINE_ADVANTAGES)
)


@dataclasses.dataclass(frozen=True)
class Requires:
    """The key `key` of config.algorithm must have one of `values`."""

    key: str
    values: tuple[str, ...]
    reason: str  # why, after the two settings and a colon
    remedy: str  # what to set instead
    refused: bool  # otherwise it is a warning


def _aggregation(value: str, reason: str, *others: str) -> Requires:
    remedy = f"set algorithm.aggregation={value!r}"
    return Requires("aggregation", (value, *others), reason, remedy, refused=False)


def _no_kl_in_reward(reason: str) -> Requires:
    return Requires("kl_in", ("loss",), reason, "set algorithm.kl_in='loss'", refused=True)


PER_RESPONSE = _aggregation(
    "seq_mean_token_mean", "the paper's loss is a mean over responses of the mean over their tokens"
)
PER_RESPONSE_OR_LUSPO = _aggregation(
    "seq_mean_token_mean",
    "GSPO's loss is a mean over responses of the mean over their tokens, LUSPO's of the sum "
    "('seq_mean_token_sum')",
    "seq_mean_token_sum",
)
ONE_ADVANTAGE = Requires(
    "advantage",
    RESPONSE_ADVANTAGES,
    "the loss has one ratio per response, so its gradient averages the advantages of the tokens",
    "set algorithm.policy_loss='gspo_token', or an advantage per response such as 'grpo'",
    refused=True,
)
RESPONSE_WEIGHTS = (
    Requires(
        "correction",
        ("none", "seq_tis", "seq_icepop"),
        "the loss is one term per response, so the weights of its tokens act as their mean",
        "set algorithm.correction='seq_tis' or 'seq_icepop', or algorithm.policy_loss='gspo_token'",
        refused=False,
    ),
    Requires(
        "rejection",
        (
            "none",
            "seq_sum_k1",
            "seq_sum_k2",
            "seq_sum_k3",
            "seq_mean_k1",
            "seq_mean_k2",
            "seq_mean_k3",
            "seq_mean_binary_kl",
            "seq_max_k2",
            "seq_max_k3",
        ),
        "the loss is one term per response, so rejected tokens only scale it down",
        "set a rejection of responses such as 'seq_mean_k1', or algorithm.policy_loss='gspo_token'",
        refused=False,
    ),
)
WEIGHT_FROM_ENGINE = Requires(
    "correction",
    ("none",),
    "the weight of a response is a function of its ratio to the policy that sampled it, which no "
    "further factor replaces",
    "set algorithm.old_logp='rollout' for the ratio to the engine, and algorithm.correction='none'",
    refused=True,
)
ONLY_IN_REWARD = Requires(
    "kl_in",
    ("reward",),
    "as a loss its gradient is zero on average, so it regularizes nothing",
    "set algorithm.kl='k3' or 'k2', or algorithm.kl_in='reward'",
    refused=True,
)
ONLY_IN_LOSS = Requires(
    "kl_in",
    ("loss",),
    "subtracted from the reward, its policy gradient is not that of the KL, and almost vanishes "
    "near the reference",
    "set algorithm.kl='k1', or algorithm.kl_in='loss'",
    refused=True,
)
OVER_VOCABULARY = Requires(
    "kl_in",
    ("loss",),
    "it is a loss over the whole vocabulary and cannot be a token reward",
    "set algorithm.kl_in='loss', or algorithm.kl='k1'",
    refused=True,
)

PRECONDITIONS: dict[str, dict[str, tuple[Requires, ...]]] = {
    "advantage": {
        "dr_grpo": (
            _aggregation(
                "seq_mean_token_sum_norm",
                "Dr.GRPO removes the bias towards short responses from both advantage and mean",
            ),
        ),
        "max_rl": (
            _no_kl_in_reward(
                "it divides by the mean reward of a prompt, which a KL makes negative"
            ),
        ),
        "gdpo": (
            _no_kl_in_reward("it normalizes each reward apart, and the KL is in none of them"),
        ),
        **{
            name: (_no_kl_in_reward("it reads the rewards that the agent gives, without a KL"),)
            for name in ROLE_ADVANTAGES
        },
        "online_dpo": (
            Requires(
                "kl_in",
                ("reward",),
                "its margins are the KL penalties of the responses",
                "set algorithm.kl_in='reward'",
                refused=True,
            ),
            _aggregation("seq_mean_token_sum", "DPO's loss is of the logprobs of whole responses"),
        ),
    },
    "policy_loss": {
        "gspo": (ONE_ADVANTAGE, PER_RESPONSE_OR_LUSPO, *RESPONSE_WEIGHTS),
        "gspo_token": (PER_RESPONSE_OR_LUSPO,),
        "gmpo": (ONE_ADVANTAGE, PER_RESPONSE, *RESPONSE_WEIGHTS),
        "sapo": (PER_RESPONSE,),
        "vespo": (ONE_ADVANTAGE, WEIGHT_FROM_ENGINE),
    },
    # rules of kl_in hold only with a KL
    # "k1+" has the value of k1 and the gradient of k2
    "kl": {
        "k1": (ONLY_IN_REWARD,),
        **{kl: (ONLY_IN_LOSS,) for kl in KLS if kl not in ("k1", "k1+", *FULL_KLS)},
        **{kl: (OVER_VOCABULARY,) for kl in FULL_KLS},
    },
}


def unmet(algorithm: AlgorithmConfig, *, refused: bool) -> list[str]:
    """One line per precondition that is not met: those refused, or those warned about."""
    lines = []
    for key, table in PRECONDITIONS.items():
        name = algorithm.kl_estimator if key == "kl" else getattr(algorithm, key)
        for rule in table.get(name, ()):
            value = getattr(algorithm, rule.key)
            if rule.key == "kl_in" and not algorithm.has_kl:
                continue
            if is_import_path(value):  # the user's own rows declare what they need
                continue
            if value not in rule.values and rule.refused == refused:
                lines.append(
                    f"algorithm.{key}={name!r} with algorithm.{rule.key}={value!r}: {rule.reason}; "
                    f"{rule.remedy}"
                )
    return lines
