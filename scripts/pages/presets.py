"""Off-policy corrections of other projects by their names, as keys of config.algorithm.

verl: the constructors of RolloutCorrectionConfig with their default thresholds. Its bounds of k1
are of the engine's probability over the trainer's, here they are of the trainer's over the
engine's: a_b becomes 1 / b and 1 / a. TRL: vllm_importance_sampling_mode with
vllm_importance_sampling_clip_max = 3, and two more keys. OpenRLHF: is_correction_type with
is_correction_threshold = 0.5 5.0; its seq-mask-tis does not truncate.

python -m scripts.pages.presets    prints their table of docs/reference/algorithms.md
"""

from typing import Any

Keys = dict[str, Any]

_TOKEN: Keys = dict(correction="token_tis", correction_high=2.0)
_SEQUENCE: Keys = dict(correction="seq_tis", correction_high=2.0)
_PRODUCT: Keys = dict(rejection="seq_sum_k1", rejection_low=0.5, rejection_high=2.0)
_GEO: Keys = dict(rejection="seq_mean_k1", rejection_low=1 / 1.001, rejection_high=1 / 0.999)
_K3: Keys = dict(rejection="seq_mean_k3", rejection_max=0.01)
_BYPASS_PPO: Keys = dict(old_logp="rollout", policy_loss="dual_clip")
_BYPASS_PG: Keys = dict(old_logp="rollout", policy_loss="policy_gradient")

CORRECTION_PRESETS: dict[str, dict[str, Keys]] = {
    "verl": {
        "disabled": {},
        "decoupled_token_is": _TOKEN,
        "decoupled_seq_is": _SEQUENCE,
        "decoupled_seq_is_rs": _SEQUENCE | _PRODUCT,
        "decoupled_geo_rs": _GEO,
        "decoupled_geo_rs_seq_tis": _SEQUENCE | _GEO,
        "decoupled_geo_rs_token_tis": _TOKEN | _GEO,
        "decoupled_k3_rs": _K3,
        "decoupled_k3_rs_seq_tis": _SEQUENCE | _K3,
        "decoupled_k3_rs_token_tis": _TOKEN | _K3,
        "bypass_ppo_clip": _BYPASS_PPO,
        "bypass_ppo_clip_geo_rs": _BYPASS_PPO | _GEO,
        "bypass_ppo_clip_k3_rs": _BYPASS_PPO | _K3,
        "bypass_pg_is": _BYPASS_PG | _SEQUENCE,
        "bypass_pg_geo_rs": _BYPASS_PG | _GEO,
        "bypass_pg_geo_rs_seq_tis": _BYPASS_PG | _SEQUENCE | _GEO,
        "bypass_pg_geo_rs_token_tis": _BYPASS_PG | _TOKEN | _GEO,
    },
    "TRL": {
        "token_truncate": dict(correction="token_tis", correction_high=3.0),
        "token_mask": dict(correction="icepop", correction_low=0.0, correction_high=3.0),
        "sequence_truncate": dict(correction="seq_tis", correction_high=3.0),
        "sequence_mask": dict(correction="seq_icepop", correction_low=0.0, correction_high=3.0),
        "off_policy_mask_threshold=0.5": dict(off_policy_threshold=0.5),
        "use_bias_correction_kl": dict(kl="k3_unbiased", kl_in="loss"),
    },
    "OpenRLHF": {
        "tis": dict(correction="token_tis", correction_floor=0.5, correction_high=5.0),
        "icepop": dict(correction="icepop", correction_low=0.5, correction_high=5.0),
        "seq-mask-tis": dict(
            correction="token_tis",
            correction_high=1e9,
            rejection="seq_mean_k1",
            rejection_low=0.5,
            rejection_high=5.0,
            rejection_scope="policy_loss",
        ),
    },
}


def markdown() -> str:
    """The table of presets in docs/reference/algorithms.md."""
    lines = ["| preset | jaxrl |", "|---|---|"]
    for project, presets in CORRECTION_PRESETS.items():
        for name, keys in presets.items():
            shown = ", ".join(f"`algorithm.{key}={_text(value)}`" for key, value in keys.items())
            lines.append(f"| {project} `{name}` | {shown or 'the defaults'} |")
    return "\n".join(lines) + "\n"


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    print(markdown(), end="")
