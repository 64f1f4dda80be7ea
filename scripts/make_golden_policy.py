"""Writes what verl, TRL and prime-rl compute from the same responses to tests/algorithms/golden/.

policy.json has a batch of responses; for each case the keys of config.algorithm with the loss and
its gradient by the policy's logprobs, or the advantages, that the function of the project itself
returns; and the same for verl's rejections, importance weights and value loss. All in float64.

The projects are no dependencies; run this in a separate environment, with a checkout of prime-rl:
    python -m venv /tmp/peers
    /tmp/peers/bin/pip install torch trl==1.16.0 beartype jaxtyping ray orjson pandas tensordict
    /tmp/peers/bin/pip install --no-deps verl==0.9.1
    /tmp/peers/bin/python scripts/make_golden_policy.py PRIME_RL tests/algorithms/golden
"""

import collections
import importlib.util
import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]  only in that environment
import trl  # pyright: ignore[reportMissingImports]
from omegaconf import OmegaConf  # pyright: ignore[reportMissingImports]
from verl.trainer.ppo import core_algos as verl  # pyright: ignore[reportMissingImports]
from verl.trainer.ppo import rollout_corr_helper  # pyright: ignore[reportMissingImports]
from verl.workers.config import ActorConfig, PolicyLossConfig  # pyright: ignore[reportMissingImports]

VERL_VERSION = "0.9.1"
N, T, SAMPLES, LONGEST = 12, 11, 4, 16  # responses, tokens, responses of a prompt, longest
RNG = np.random.default_rng(3)
BOUNDS = {"clip_low": 0.2, "clip_high": 0.28}
MODES = {
    "token_mean": "token-mean",
    "token_sum": "token-sum",
    "seq_mean_token_mean": "seq-mean-token-mean",
    "seq_mean_token_sum": "seq-mean-token-sum",
    "seq_mean_token_sum_norm": "seq-mean-token-sum-norm",
}
TRUST = {"clip_low": 0.01, "clip_high": 0.02, "ratio_max": 1.3}
# keys of config.algorithm: (policy_loss.loss_mode of verl, further settings)
VERL_LOSSES: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    ({"policy_loss": "dual_clip", "clip_dual": 1.3}, "vanilla", {"clip_ratio_c": 1.3}),
    ({"policy_loss": "dppo_tv"} | TRUST, "dppo_tv", {"clip_ratio_c": 1.3}),
    (
        {"policy_loss": "dppo_kl"} | TRUST | {"clip_low": 1e-3, "clip_high": 2e-3},
        "dppo_kl",
        {"clip_ratio_c": 1.3},
    ),
    ({"policy_loss": "gspo_token", "clip_low": 0.03, "clip_high": 0.04}, "gspo", {}),
    ({"policy_loss": "sapo", "aggregation": "seq_mean_token_mean"}, "sapo", {}),
    (
        {"policy_loss": "sapo", "aggregation": "seq_mean_token_mean"}
        | {"sapo_tau_positive": 2.0, "sapo_tau_negative": 3.0},
        "sapo",
        {"tau_pos": 2.0, "tau_neg": 3.0},
    ),
    ({"policy_loss": "policy_gradient"}, "gpg", {}),
    ({"policy_loss": "gmpo", "aggregation": "seq_mean_token_mean"}, "geo_mean", {}),
    ({"policy_loss": "dro", "log_ratio_penalty": 0.3}, "dro", {"dro_beta": 0.3}),
    ({"policy_loss": "cispo"}, "cispo", {}),
    (
        {"policy_loss": "kl_cov", "cov_fraction": 0.1, "kl_cov_coef": 0.7},
        "kl_cov",
        {"kl_cov_ratio": 0.1, "ppo_kl_coef": 0.7},
    ),
]
VERL_ADVANTAGES: list[tuple[dict[str, Any], str]] = [
    ({"advantage": "gae", "gamma": 0.9, "lam": 0.8}, "gae"),
    ({"advantage": "grpo"}, "grpo"),
    ({"advantage": "grpo"}, "grpo_vectorized"),
    ({"advantage": "grpo", "norm_adv_by_std": False}, "grpo"),
    ({"advantage": "grpo_passk"}, "grpo_passk"),
    ({"advantage": "grpo_passk", "norm_adv_by_std": False}, "grpo_passk"),
    ({"advantage": "rloo"}, "rloo"),
    ({"advantage": "rloo"}, "rloo_vectorized"),
    ({"advantage": "opo"}, "opo"),
    ({"advantage": "remax"}, "remax"),
    ({"advantage": "reinforce_plus_plus_baseline"}, "reinforce_plus_plus_baseline"),
    ({"advantage": "optimal_token_baseline"}, "optimal_token_baseline"),  # without observations
    ({"advantage": "optimal_token_baseline"}, "tir_optimal_token_baseline"),
]
# keys of config.algorithm: arguments of TRL
TRL_LOSSES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"aggregation": "seq_mean_token_mean"}, {"loss_type": "grpo"}),
    ({}, {"loss_type": "bnpo"}),
    ({}, {"loss_type": "dapo"}),
    ({"aggregation": "seq_mean_token_sum_norm"}, {"loss_type": "dr_grpo"}),
    ({"kl": "k3", "kl_coef": 0.3}, {"loss_type": "dapo", "beta": 0.3}),
    (
        {"kl": "k3_unbiased", "kl_coef": 0.3},
        {"loss_type": "dapo", "beta": 0.3, "use_bias_correction_kl": True},
    ),
    ({"off_policy_threshold": 0.02}, {"loss_type": "dapo", "off_policy_mask_threshold": 0.02}),
    (
        {"policy_loss": "gspo", "clip_low": 0.03, "clip_high": 0.04}
        | {"aggregation": "seq_mean_token_mean"},
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    ),
    (
        {"policy_loss": "gspo", "clip_low": 0.03, "clip_high": 0.04}
        | {"aggregation": "seq_mean_token_sum"},
        {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    ),
    ({"policy_loss": "cispo", "clip_low": 1.0}, {"loss_type": "cispo"}),
    ({"policy_loss": "sapo", "aggregation": "seq_mean_token_mean"}, {"loss_type": "sapo"}),
    ({"policy_loss": "vespo"}, {"loss_type": "vespo"}),
]
PRIME_LOSSES: list[tuple[dict[str, Any], dict[str, float]]] = [
    (
        {"policy_loss": "dppo_tv", "clip_low": low, "clip_high": high}
        | {"log_ratio_penalty": 2 * tau, "ratio_max": 1e9, "old_logp": "rollout"},
        {"dppo_mask_low": low, "dppo_mask_high": high, "kl_tau": tau, "adv_tau": 1.0},
    )
    for low, high, tau in ((0.2, 0.2, 1e-3), (0.01, 0.02, 0.1))
]
RATIO_BOUNDS = {"token_k1": (0.8, 1.2), "seq_sum_k1": (0.6, 1.6), "seq_mean_k1": (0.95, 1.05)}
MAXIMA = {"token_k2": 0.02, "token_k3": 0.02, "seq_sum_k2": 0.3, "seq_sum_k3": 0.3}
MAXIMA |= {"seq_mean_k2": 0.04, "seq_mean_k3": 0.04, "seq_max_k2": 0.15, "seq_max_k3": 0.15}


def make_batch() -> dict[str, np.ndarray]:
    """Responses of uneven length with observations in them; values are those of float32."""

    def around(base: np.ndarray, spread: float) -> np.ndarray:
        return (base + spread * RNG.standard_normal((N, T))).astype(np.float32).astype(float)

    lengths = RNG.integers(3, T + 1, N)
    in_response = np.arange(T) < lengths[:, None]
    mask = (in_response & (RNG.random((N, T)) > 0.25)).astype(float)
    mask[:, 0] = 1.0
    rollout = around(np.full((N, T), -3.0), 0.3)
    old = around(rollout, 0.3)
    scores = RNG.integers(0, 3, N).astype(float)
    scores[:SAMPLES] = 1.0  # a group of equal rewards
    return {
        "lengths": lengths,
        "mask": mask,
        "rollout_logp": rollout,
        "old_logp": old,
        "logp": around(old, 0.3),
        "ref_logp": around(old, 0.5),
        "advantages": np.repeat(around(np.zeros((N, T)), 1.0)[:, :1], T, axis=1),
        "scores": scores,
        "baselines": np.repeat(RNG.random(N // SAMPLES), SAMPLES),
        "values": around(np.zeros((N, T)), 1.0),
        "old_values": around(np.zeros((N, T)), 1.0),
        "returns": around(np.zeros((N, T)), 1.0),
        "collisions": np.exp(around(np.full((N, T), -1.5), 0.3)),  # Σ π² of the old policy
    }


ARRAYS = make_batch()
BATCH = {name: torch.from_numpy(array) for name, array in ARRAYS.items()}
MASK = BATCH["mask"]
GROUPS = np.arange(N) // SAMPLES
IN_RESPONSE = torch.from_numpy((np.arange(T) < ARRAYS["lengths"][:, None]).astype(float))


def last_rewards(mask: torch.Tensor) -> torch.Tensor:
    """The score of each response at its last token of `mask`, [N, T]."""
    found = torch.zeros_like(mask)
    for row, score in enumerate(ARRAYS["scores"]):
        found[row, np.flatnonzero(mask[row].numpy())[-1]] = score
    return found


TOKEN_REWARDS = last_rewards(MASK)


def bounds(keys: dict[str, Any]) -> tuple[float, float]:
    return keys.get("clip_low", BOUNDS["clip_low"]), keys.get("clip_high", BOUNDS["clip_high"])


def verl_loss(
    keys: dict[str, Any], mode: str, settings: dict[str, Any], logp: torch.Tensor
) -> torch.Tensor:
    low, high = bounds(keys)
    names = {"dro_beta", "kl_cov_ratio", "ppo_kl_coef"}
    inner = {name: value for name, value in settings.items() if name in names}
    actor = ActorConfig(
        strategy="fsdp",
        rollout_n=SAMPLES,
        ppo_micro_batch_size_per_gpu=N,
        clip_ratio=low,
        clip_ratio_low=low,
        clip_ratio_high=high,
        policy_loss=PolicyLossConfig(loss_mode=mode, **inner),
        **{name: value for name, value in settings.items() if name not in names},
    )
    aggregation = MODES[keys.get("aggregation", "token_mean")]
    function = verl.get_policy_loss_fn(mode)
    return function(BATCH["old_logp"], logp, BATCH["advantages"], MASK, aggregation, config=actor)[
        0
    ]


def aggregated_loss(mode: str, logp: torch.Tensor) -> torch.Tensor:
    """PPO's clipped loss, aggregated by verl."""
    ratio = torch.exp(logp - BATCH["old_logp"])
    low, high = bounds({})
    advantages = BATCH["advantages"]
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    return verl.agg_loss(loss, MASK, mode, loss_scale_factor=LONGEST)


def verl_advantages(keys: dict[str, Any], name: str) -> torch.Tensor:
    config = OmegaConf.create({"norm_adv_by_std_in_grpo": keys.get("norm_adv_by_std", True)})
    arguments = {"token_level_rewards": TOKEN_REWARDS.clone(), "response_mask": MASK}
    function = verl.get_adv_estimator_fn(name)
    if name == "gae":
        return function(**arguments, values=BATCH["values"], gamma=keys["gamma"], lam=keys["lam"])[
            0
        ]
    if name == "remax":
        return function(**arguments, reward_baselines=BATCH["baselines"])[0]
    if name.endswith("optimal_token_baseline"):
        mask = IN_RESPONSE if name == "optimal_token_baseline" else MASK
        return function(
            last_rewards(mask),
            mask,
            GROUPS,
            old_log_probs=BATCH["old_logp"],
            sum_pi_squared=BATCH["collisions"],
        )[0]
    if name in ("grpo", "grpo_vectorized"):
        arguments["norm_adv_by_std_in_grpo"] = config.norm_adv_by_std_in_grpo
    return function(**arguments, index=GROUPS, config=config)[0]


def trl_loss(keys: dict[str, Any], settings: dict[str, Any], logp: torch.Tensor) -> torch.Tensor:
    low, high = bounds(keys)
    kind = trl.GRPOTrainer

    def same(x, **kwargs):
        return x

    trainer = types.SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *a, **k: (logp, torch.zeros_like(logp), None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=settings.get("off_policy_mask_threshold"),
        importance_sampling_level=settings.get("importance_sampling_level", "token"),
        loss_type=settings["loss_type"],
        beta=settings.get("beta", 0.0),
        epsilon_low=low,
        # TRL's cispo bounds the ratio itself
        epsilon_high=1 + high if settings["loss_type"] == "cispo" else high,
        args=trl.GRPOConfig(
            bf16=False,
            use_cpu=True,
            use_bias_correction_kl=settings.get("use_bias_correction_kl", False),
        ),
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        max_completion_length=LONGEST,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        model=types.SimpleNamespace(training=False),
        accelerator=types.SimpleNamespace(
            num_processes=1, gather=same, gather_for_metrics=same, reduce=same
        ),
        _metrics=collections.defaultdict(lambda: collections.defaultdict(list)),
        get_off_policy_mask=kind.get_off_policy_mask,
        get_gamma_weights=kind.get_gamma_weights,
    )
    inputs = {
        "prompt_ids": torch.zeros(N, 1),
        "prompt_mask": torch.ones(N, 1),
        "completion_ids": torch.zeros(N, T),
        "completion_mask": MASK,
        "advantages": BATCH["advantages"][:, 0],
        "old_per_token_logps": BATCH["old_logp"],
        "ref_per_token_logps": BATCH["ref_logp"],
        "num_items_in_batch": MASK.sum(),
    }
    if trainer.off_policy_mask_threshold is not None:
        inputs["sampling_per_token_logps"] = BATCH["rollout_logp"]
    return kind._compute_loss(trainer, None, inputs)


def load_prime_rl(checkout: Path) -> Any:
    """Its module of losses; the modules of its configs, which the losses do not need, are empty."""
    names = ("CustomLossConfig", "DefaultLossConfig", "IPOLossConfig", "LossConfig")
    configs = types.ModuleType("prime_rl.configs.trainer")
    for name in names:
        setattr(configs, name, type(name, (), {}))
    utils = types.ModuleType("prime_rl.utils.utils")
    utils.import_object = None  # pyright: ignore[reportAttributeAccessIssue]
    sys.modules |= {"prime_rl.configs.trainer": configs, "prime_rl.utils.utils": utils}
    path = checkout / "src" / "prime_rl" / "trainer" / "rl" / "loss.py"
    spec = importlib.util.spec_from_file_location("prime_rl_loss", path)
    module = importlib.util.module_from_spec(spec)  # pyright: ignore[reportArgumentType]
    sys.modules["prime_rl_loss"] = module
    spec.loader.exec_module(module)  # pyright: ignore[reportOptionalMemberAccess]
    return module


def prime_loss(prime_rl: Any, settings: dict[str, float], logp: torch.Tensor) -> torch.Tensor:
    inputs = prime_rl.LossInputs(
        trainer_logprobs=logp.flatten(),
        inference_logprobs=BATCH["rollout_logp"].flatten(),
        ref_logprobs=None,
        advantages=BATCH["advantages"].flatten(),
        loss_mask=MASK.flatten() > 0,
    )
    return prime_rl.default_loss_fn(inputs, types.SimpleNamespace(**settings)).loss / MASK.sum()


def case(function: str, keys: dict[str, Any], loss: Any) -> dict[str, Any]:
    logp = BATCH["logp"].clone().requires_grad_()
    value = loss(logp)
    (slope,) = torch.autograd.grad(value, [logp])
    keys = BOUNDS | keys
    gradient = (slope * MASK).numpy()
    return {"function": function, "keys": keys, "loss": value.item(), "gradient": gradient.tolist()}


def loss_cases(prime_rl: Any) -> list[dict[str, Any]]:
    found = [
        case(f"verl {mode}", keys, lambda x, k=keys, m=mode, s=settings: verl_loss(k, m, s, x))
        for keys, mode, settings in VERL_LOSSES
    ]
    found += [
        case("verl agg_loss", {"aggregation": ours}, lambda x, m=mode: aggregated_loss(m, x))
        for ours, mode in MODES.items()
    ]
    found += [
        case(f"trl {settings['loss_type']}", keys, lambda x, k=keys, s=settings: trl_loss(k, s, x))
        for keys, settings in TRL_LOSSES
    ]
    found += [
        case("prime-rl default", keys, lambda x, s=settings: prime_loss(prime_rl, s, x))
        for keys, settings in PRIME_LOSSES
    ]
    return found


def kl_cases() -> list[dict[str, Any]]:
    """verl's KL of the loss, by their names, as the mean over tokens."""
    names = {"k1": "kl", "abs": "abs", "k2": "mse", "k3": "low_var_kl"}
    names |= {f"{name}+": f"{theirs}+" for name, theirs in (("k1", "k1"), ("k3", "k3"))}

    def loss(theirs: str, logp: torch.Tensor) -> torch.Tensor:
        return verl.agg_loss(verl.kl_penalty(logp, BATCH["ref_logp"], theirs), MASK, "token-mean")

    return [
        case(
            f"verl kl_penalty {theirs}",
            {"kl": ours, "kl_coef": 1.0},
            lambda x, t=theirs: loss(t, x),
        )
        for ours, theirs in names.items()
    ]


def correction_cases() -> list[dict[str, Any]]:
    """Weights and kept tokens [N, T] between the engine and the old policy."""
    ratio = BATCH["old_logp"] - BATCH["rollout_logp"]
    found = []
    for name in (*RATIO_BOUNDS, *MAXIMA):
        if name in RATIO_BOUNDS:
            low, high = RATIO_BOUNDS[name]
            keys, threshold = (
                {"rejection_low": low, "rejection_high": high},
                f"{1 / high}_{1 / low}",
            )
        else:
            keys, threshold = {"rejection_max": MAXIMA[name]}, MAXIMA[name]
        kept, _ = rollout_corr_helper.compute_rollout_rejection_mask(ratio, MASK, name, threshold)
        keys |= {"rejection": name}
        found.append({"function": f"verl {name}", "keys": keys, "values": (kept * MASK).tolist()})
    for level, threshold, keys in (
        ("token", 1.2, {"correction": "token_tis", "correction_high": 1.2}),
        ("sequence", 1.2, {"correction": "seq_tis", "correction_high": 1.2}),
        (
            "token",
            "0.8_1.2",
            {"correction": "icepop", "correction_low": 0.8, "correction_high": 1.2},
        ),
        (
            "sequence",
            "0.4_2.5",
            {"correction": "seq_icepop", "correction_low": 0.4, "correction_high": 2.5},
        ),
    ):
        weights, _ = rollout_corr_helper.compute_rollout_correction_weights(
            ratio, MASK, level, threshold
        )
        row = {"function": f"verl {level} {threshold}", "keys": keys}
        found.append(row | {"values": (weights * MASK).tolist()})
    return found


def value_case() -> dict[str, Any]:
    values = BATCH["values"].clone().requires_grad_()
    loss, _ = verl.compute_value_loss(
        values, BATCH["returns"], BATCH["old_values"], MASK, 0.3, "token-mean"
    )
    (slope,) = torch.autograd.grad(loss, [values])
    return {"clip": 0.3, "loss": loss.item(), "gradient": (slope * MASK).numpy().tolist()}


def rounded(tree: Any) -> Any:
    """Floats with 10 significant digits."""
    if isinstance(tree, dict):
        return {name: rounded(value) for name, value in tree.items()}
    if isinstance(tree, list):
        return [rounded(value) for value in tree]
    return float(f"{tree:.10g}") if isinstance(tree, float) else tree


def main() -> None:
    checkout = Path(sys.argv[1])
    commit = subprocess.run(
        ["git", "-C", checkout, "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    advantages = [
        {"function": f"verl {name}", "keys": keys, "values": verl_advantages(keys, name).tolist()}
        for keys, name in VERL_ADVANTAGES
    ]
    found = {
        "versions": {"verl": VERL_VERSION, "trl": trl.__version__, "prime-rl": commit},
        "n_samples": SAMPLES,
        "longest": LONGEST,
        "batch": {name: array.tolist() for name, array in ARRAYS.items()},
        "losses": loss_cases(load_prime_rl(checkout)) + kl_cases(),
        "advantages": advantages,
        "corrections": correction_cases(),
        "value": value_case(),
    }
    text = json.dumps(rounded(found), indent=0)
    text = text.replace(",\n", ", ").replace("[\n", "[").replace("\n]", "]")
    Path(sys.argv[2], "policy.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
