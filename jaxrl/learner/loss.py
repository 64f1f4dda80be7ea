"""The loss of one packed micro-batch, as sums: the one bridge from models to algorithms."""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from jaxrl.algorithms import kl as kl_estimators
from jaxrl.algorithms.aggregate import aggregate
from jaxrl.algorithms.choose import choose
from jaxrl.algorithms.masked import masked_max, masked_mean, only
from jaxrl.algorithms.mismatch import logp_diff, rollout_kl
from jaxrl.algorithms.policy_loss import POLICY_LOSSES, is_clipped
from jaxrl.config import RunConfig
from jaxrl.kernels.logprob import logprob_entropy, logprob_entropy_kl
from jaxrl.learner.needs import full_kl_in_loss, ratio_source
from jaxrl.learner.router import Balance, balance_loss, no_load
from jaxrl.models.config import DecoderConfig
from jaxrl.models.decoder import Decoder, forward_routed
from jaxrl.models.moe import RouterLoad
from jaxrl.types import Batch, Tree
from sharding import Rules


@struct.dataclass
class LossSums:
    """Adds up over micro-batches. Every mean is kept as (sum, weight) until the end."""

    losses: Tree  # name -> sum by `algorithm.aggregation`, all to be divided by `weight`
    weight: Tree
    means: Tree  # name -> mean over tokens, whatever the aggregation
    maxima: Tree  # name -> largest value over tokens
    router: RouterLoad | None  # of a mixture of experts, layers first

    def __add__(self, other: "LossSums") -> "LossSums":
        return LossSums(
            jax.tree.map(jnp.add, self.losses, other.losses),
            self.weight + other.weight,
            jax.tree.map(jnp.add, self.means, other.means),
            jax.tree.map(jnp.maximum, self.maxima, other.maxima),
            jax.tree.map(jnp.add, self.router, other.router),
        )


DEFAULT_CHUNK = {"cpu": 256}  # larger ones leave the cache: a third more time for an update
LOSSES = ("loss/total", "loss/policy")
MEANS = (
    "loss/kl",
    "loss/entropy",
    "loss/clip_fraction",
    "loss/approx_kl",
    "mismatch/logp_diff_mean",
    "mismatch/kl",
)
MAXIMA = ("loss/ratio_max", "mismatch/logp_diff_max")


def zero_sums(model: DecoderConfig) -> LossSums:
    """The sums of no micro-batch."""
    zero = jnp.zeros((), jnp.float32)
    return LossSums(
        losses=dict.fromkeys(LOSSES, zero),
        weight=zero,
        means=dict.fromkeys(MEANS, (zero, zero)),
        maxima=dict.fromkeys(MAXIMA, zero - jnp.inf),
        router=no_load(model),
    )


def score_tokens(
    params: Decoder, batch: Batch, *, cfg: RunConfig, rules: Rules, remat: str = "none"
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """(logp, entropy) of the targets under the policy at the temperature that sampled them."""
    return _score(params, batch, cfg=cfg, rules=rules, remat=remat)[:2]


def count_tokens(
    params: Decoder, so_far: Balance, batch: Batch, *, cfg: RunConfig, rules: Rules
) -> Balance:
    """Adds a micro-batch to the balance of its mini-batch. No logits, no gradient.

    Raises ValueError for a model without experts.
    """
    load = hidden_states(params, batch, cfg=cfg, rules=rules, remat="none")[1]
    if load is None:
        raise ValueError(
            f"config.learner.router_aux_coef = {cfg.learner.router_aux_coef} balances experts, but this "
            f"{params.cfg.family} model has none; set it to 0"
        )
    weight = _aggregate(batch.mask, batch, cfg)[1]
    return jax.tree.map(jnp.add, so_far, Balance(load, weight))


def _score(params: Decoder, batch: Batch, *, cfg: RunConfig, rules: Rules, remat: str):
    """(logp, entropy, router load or None)."""
    hidden, load = hidden_states(params, batch, cfg=cfg, rules=rules, remat=remat)
    logp, entropy = logprob_entropy(
        hidden, params.unembed, batch.targets, **_head(params, cfg, rules)
    )
    return logp, entropy, load


def policy_loss_sums(
    params: Decoder,
    ref_params: Decoder | None,
    batch: Batch,
    balance: Balance | None = None,
    *,
    cfg: RunConfig,
    rules: Rules,
) -> tuple[Float[Array, ""], LossSums]:
    """L = policy loss + kl_coef KL(policy | reference) - entropy_coef entropy, summed over tokens as
    `algorithm.aggregation` says; the caller divides by the weight of the whole mini-batch.

    `ref_params` is needed for kl = "full" alone and gets no gradient. `balance`, of the whole
    mini-batch, adds router_aux_coef times the load-balancing loss.
    """
    algo = cfg.algorithm
    logp, entropy, exact_kl, load = _forward(params, ref_params, batch, cfg=cfg, rules=rules)
    mask = batch.mask
    # Masked tokens drop out here once, so that nothing that stands there can overflow below.
    logp, entropy = only(logp, mask), only(entropy, mask)
    rollout_logp, advantages = only(batch.rollout_logp, mask), only(batch.advantages, mask)
    old_logp = {
        "policy": jax.lax.stop_gradient(logp),
        "rollout": rollout_logp,
        "recompute": only(batch.old_logp, mask),
    }[ratio_source(cfg)]
    clip = dict(clip_low=algo.clip_low, clip_high=algo.clip_high)
    policy_loss = choose(POLICY_LOSSES, algo.policy_loss, "algorithm.policy_loss")
    loss = policy = policy_loss(logp, old_logp, advantages, **clip)
    kl = jnp.zeros_like(logp)
    if algo.kl_coef != 0.0 and algo.kl_in == "loss":
        kl = _sampled_kl(algo.kl, logp, batch) if exact_kl is None else only(exact_kl, mask)
        loss = loss + algo.kl_coef * kl
    if algo.entropy_coef != 0.0:
        loss = loss - algo.entropy_coef * entropy

    loss_sum, weight = _aggregate(loss, batch, cfg)
    if load is not None and balance is not None and balance.load is not None:
        aux = balance_loss(load, balance.load)
        loss_sum = loss_sum + cfg.learner.router_aux_coef * balance.weight * aux
    losses = {"loss/total": loss_sum, "loss/policy": _aggregate(policy, batch, cfg)[0]}
    gap = logp_diff(logp, rollout_logp)
    means = {
        "loss/kl": masked_mean(kl, mask),
        "loss/entropy": masked_mean(entropy, mask),
        "loss/clip_fraction": masked_mean(
            is_clipped(logp, old_logp, advantages, **clip).astype(jnp.float32), mask
        ),
        "loss/approx_kl": masked_mean(kl_estimators.k3(old_logp, logp), mask),
        "mismatch/logp_diff_mean": masked_mean(gap, mask),
        "mismatch/kl": masked_mean(rollout_kl(logp, rollout_logp), mask),
    }
    maxima = {
        "loss/ratio_max": masked_max(jnp.exp(logp - old_logp), mask),
        "mismatch/logp_diff_max": masked_max(gap, mask),
    }
    return loss_sum, jax.lax.stop_gradient(LossSums(losses, weight, means, maxima, load))


def hidden_states(
    params: Decoder, batch: Batch, *, cfg: RunConfig, rules: Rules, remat: str
) -> tuple[Float[Array, "B T D"], RouterLoad | None]:
    implementation = None if cfg.model.attention == "auto" else cfg.model.attention
    return forward_routed(
        params,
        batch.tokens,
        batch.segments,
        batch.positions,
        rules=rules,
        remat=remat,
        implementation=implementation,
    )


def _forward(params: Decoder, ref_params: Decoder | None, batch: Batch, *, cfg, rules):
    """(logp, entropy, exact KL or None), each [B, T], and the router load or None."""
    remat = cfg.learner.remat
    if not full_kl_in_loss(cfg):
        logp, entropy, load = _score(params, batch, cfg=cfg, rules=rules, remat=remat)
        return logp, entropy, None, load
    if ref_params is None:
        raise ValueError("config.algorithm.kl = 'full' needs the reference model; pass ref_params")
    hidden, load = hidden_states(params, batch, cfg=cfg, rules=rules, remat=remat)
    ref_hidden, _ = hidden_states(ref_params, batch, cfg=cfg, rules=rules, remat="none")
    logp, entropy, exact_kl = logprob_entropy_kl(
        hidden,
        params.unembed,
        jax.lax.stop_gradient(ref_hidden),
        ref_params.unembed,
        batch.targets,
        **_head(params, cfg, rules),
    )
    return logp, entropy, exact_kl, load


def _aggregate(per_token: Float[Array, "B T"], batch: Batch, cfg: RunConfig):
    """(sum, weight) of a token loss as `algorithm.aggregation` says."""
    return aggregate(
        per_token,
        batch.mask,
        batch.response_len,
        mode=cfg.algorithm.aggregation,
        max_response_len=cfg.data.max_response_len,
    )


def _head(params: Decoder, cfg: RunConfig, rules: Rules) -> dict:
    return dict(
        temperature=cfg.rollout.sampling.temperature,
        logit_softcap=params.cfg.logit_softcap,
        chunk=cfg.learner.logprob_chunk or DEFAULT_CHUNK.get(jax.default_backend(), 1024),
        rules=rules,
    )


def _sampled_kl(name: str, logp: Float[Array, "B T"], batch: Batch) -> Float[Array, "B T"]:
    estimate = choose(kl_estimators.ESTIMATORS, name, "algorithm.kl")
    return estimate(logp, only(batch.ref_logp, batch.mask))
