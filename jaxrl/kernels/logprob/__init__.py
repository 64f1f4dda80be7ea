"""Logprob, entropy and KL of target tokens, computed from hidden states and the unembedding."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl.kernels.logprob.chunked import Head, chunked_logprob, token_logp
from sharding import Rules, target_platform

__all__ = ["logprob_entropy", "logprob_entropy_kl", "token_logp"]

# Chunks of tokens per step of the backward pass. On CPU one chunk is large enough for the matrix
# products, and larger blocks waste time on more rows without a token.
GROUPED_CHUNKS = {"cpu": 1}


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

    The logits of `chunk` tokens (per device) exist at one time; the backward pass recomputes them.
    Rows are sharded over the batch axes, the vocabulary over its own axes. dW is summed in float32
    and has the sharding of `unembed`. Tokens whose `mask` is 0 give zeros, get no gradient and cost
    nothing; `with_entropy=False` does the same for the entropy. Raises ValueError for a temperature
    or chunk that is not positive.
    """
    head = _head(temperature, logit_softcap, chunk, rules, with_entropy, with_kl=False)
    hidden, unembed = _reshard(rules, hidden, unembed)
    targets, keep = _reshard_tokens(rules, targets, mask)
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
    """`logprob_entropy` and the exact KL(p | q) = Σ p (log p - log q) over the vocabulary.

    q is the reference's distribution at the same temperature; the reference gets no gradient.
    """
    head = _head(temperature, logit_softcap, chunk, rules, with_entropy, with_kl=True)
    hidden, unembed = _reshard(rules, hidden, unembed)
    targets, keep = _reshard_tokens(rules, targets, mask)
    ref = jax.lax.stop_gradient(_reshard(rules, ref_hidden, ref_unembed))
    with jax.named_scope("logprob"):
        return chunked_logprob(head, hidden, unembed, targets, keep, ref)


def _head(temperature, softcap, chunk, rules, with_entropy, *, with_kl) -> Head:
    if temperature <= 0:
        raise ValueError(
            f"logprobs need a positive temperature, got {temperature}; set 1.0 to score the model "
            "itself"
        )
    if chunk <= 0:
        raise ValueError(f"the logprob chunk is {chunk} tokens; set it to 1 or more")
    n_grouped = GROUPED_CHUNKS.get(target_platform(), 4)
    return Head(temperature, softcap, chunk, rules, with_entropy, with_kl, n_grouped)


def _reshard(rules: Rules, hidden, unembed):
    """hidden and unembed in the shardings that the kernel's shard_map expects."""
    return (
        jax.reshard(hidden, rules.spec("batch", "time", None)),
        jax.reshard(unembed, rules.spec("vocab", "w_embed")),
    )


def _reshard_tokens(rules: Rules, targets, mask):
    keep = jnp.ones(targets.shape, bool) if mask is None else mask > 0
    spec = rules.spec("batch", "time")
    return jax.reshard(targets, spec), jax.reshard(keep, spec)
