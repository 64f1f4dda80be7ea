"""Reference logprobs, entropy and KL: all logits at once, in float32."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl.kernels.bits import materialize

# Low-rank change of the unembedding: (l, B), which adds l Bᵀ to the logits. l is scale A h.
HeadChange = tuple[Float[Array, "*B R"], Float[Array, "V R"]]


def head_logits(
    hidden: Float[Array, "*B D"],
    unembed: Float[Array, "V D"],
    *,
    temperature: float,
    softcap: float | None,
    change: HeadChange | None = None,
) -> Float[Array, "*B V"]:
    """cap(h Wᵀ + l Bᵀ) / temperature in float32, cap(l) = softcap * tanh(l / softcap)."""
    dims = (((hidden.ndim - 1,), (1,)), ((), ()))
    logits = jax.lax.dot_general(hidden, unembed, dims, preferred_element_type=jnp.float32)
    if change is not None:
        logits += jax.lax.dot_general(*change, dims, preferred_element_type=jnp.float32)
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    return materialize(logits / temperature)


def logprob_reference(
    hidden: Float[Array, "B T D"],
    unembed: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    ref_hidden: Float[Array, "B T E"],
    ref_unembed: Float[Array, "V E"],
    *,
    temperature: float,
    softcap: float | None,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"], Float[Array, "B T"]]:
    """logp[targets], -Σ p log p and Σ p (log p - log q) over the vocabulary."""
    logp = jax.nn.log_softmax(
        head_logits(hidden, unembed, temperature=temperature, softcap=softcap)
    )
    ref_logp = jax.lax.stop_gradient(
        jax.nn.log_softmax(
            head_logits(ref_hidden, ref_unembed, temperature=temperature, softcap=softcap)
        )
    )
    probs = jnp.exp(logp)
    chosen = jnp.take_along_axis(logp, targets[..., None], axis=-1)[..., 0]
    return chosen, -jnp.sum(probs * logp, -1), jnp.sum(probs * (logp - ref_logp), -1)
