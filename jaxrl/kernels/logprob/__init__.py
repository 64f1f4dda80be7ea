"""Logprob, entropy and KL of target tokens straight from hidden states and the unembedding."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl.kernels.logprob.chunked import Head, chunked_logprob, token_logp
from sharding import Rules, target_platform

__all__ = ["logprob_entropy", "logprob_entropy_kl", "token_logp"]

# Chunks of tokens that backward takes at a time. On CPU one fills the products, and rows without a token,
# of which a larger block has more, cost time.
GROUPED = {"cpu": 1}


def logprob_entropy(
    hidden: Float[Array, "B T D"],
    unembed: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    *,
    temperature: float,
    logit_softcap: float | None = None,
    chunk: int,
    rules: Rules,
    mask: Float[Array, "B T"] | None = None,
    with_entropy: bool = True,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """log p(targets) and -Σ p log p of p = softmax(cap(h Wᵀ) / temperature), float32.

    The logits of `chunk` tokens (per device) exist at one time; backward computes them again. Rows
    lie on the batch axes, the vocabulary on its own; dW is summed in float32 and comes back in the
    sharding of `unembed`. Tokens whose `mask` is 0 give zeros, take no gradient and cost nothing, and
    so does the entropy with `with_entropy=False`.
    Raises ValueError for a temperature or chunk that is not positive.
    """
    head = _head(temperature, logit_softcap, chunk, rules, with_entropy, with_kl=False)
    hidden, unembed = _lay_out(rules, hidden, unembed)
    targets, keep = _lay_out_tokens(rules, targets, mask)
    with jax.named_scope("logprob"):
        logp, entropy, _ = chunked_logprob(head, hidden, unembed, targets, keep, ())
    return logp, entropy


def logprob_entropy_kl(
    hidden: Float[Array, "B T D"],
    unembed: Float[Array, "V D"],
    ref_hidden: Float[Array, "B T E"],
    ref_unembed: Float[Array, "V E"],
    targets: Int[Array, "B T"],
    *,
    temperature: float,
    logit_softcap: float | None = None,
    chunk: int,
    rules: Rules,
    mask: Float[Array, "B T"] | None = None,
    with_entropy: bool = True,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"], Float[Array, "B T"]]:
    """`logprob_entropy`, and the exact KL(p | q) = Σ p (log p - log q) over the vocabulary, where q
    is the reference's distribution at the same temperature. No gradient goes into the reference."""
    head = _head(temperature, logit_softcap, chunk, rules, with_entropy, with_kl=True)
    hidden, unembed = _lay_out(rules, hidden, unembed)
    targets, keep = _lay_out_tokens(rules, targets, mask)
    ref = jax.lax.stop_gradient(_lay_out(rules, ref_hidden, ref_unembed))
    with jax.named_scope("logprob"):
        return chunked_logprob(head, hidden, unembed, targets, keep, ref)


def _head(temperature, softcap, chunk, rules, with_entropy, *, with_kl) -> Head:
    if temperature <= 0:
        raise ValueError(
            f"logprobs need a positive temperature, got {temperature}; set 1.0 to score the model itself"
        )
    if chunk <= 0:
        raise ValueError(f"the logprob chunk is {chunk} tokens; set it to 1 or more")
    n_grouped = GROUPED.get(target_platform(), 4)
    return Head(temperature, softcap, chunk, rules, with_entropy, with_kl, n_grouped)


def _lay_out(rules: Rules, hidden, unembed):
    """The shardings that the kernel's shard_map expects."""
    return (
        jax.reshard(hidden, rules.spec("batch", "time", None)),
        jax.reshard(unembed, rules.spec("vocab", "w_embed")),
    )


def _lay_out_tokens(rules: Rules, targets, mask):
    keep = jnp.ones(targets.shape, bool) if mask is None else mask > 0
    spec = rules.spec("batch", "time")
    return jax.reshard(targets, spec), jax.reshard(keep, spec)
