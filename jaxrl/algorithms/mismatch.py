"""How far the engine's logprobs are from the trainer's for the same tokens and weights."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl.algorithms.kl import k3


def logp_diff(logp: Float[Array, "B T"], rollout_logp: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """|logp - rollout_logp|."""
    return jnp.abs(logp - rollout_logp)


def rollout_kl(logp: Float[Array, "B T"], rollout_logp: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """k3 estimate of KL(engine | trainer): the engine is the one that sampled.

    The distance that off-policy analyses of rollout engines use (https://fengyao.notion.site/off-policy-rl).
    """
    return k3(rollout_logp, logp)
