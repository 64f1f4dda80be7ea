"""Logprob, entropy, KL and support mass of target tokens from hidden states and unembedding."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from jaxrl.kernels.logprob.chunked import Head, chunked_logprob, token_logp
from jaxrl.kernels.logprob.collision import chunked_collision
from jaxrl.kernels.logprob.reference import HeadChange
from jaxrl.kernels.logprob.top_k import chunked_top_k
from sharding import Rules, target_platform

__all__ = ["TokenScores", "collision_logp", "token_logp", "token_scores", "top_k_logp"]

# Chunks of tokens per step of the backward pass; 4 on TPU. On CPU one chunk is large enough for the
# matrix products, and larger blocks waste time on more rows without a token. On GPU all tokens are
# one step: each step reads and writes the float32 dW.
GROUPED_CHUNKS = {"cpu": 1, "gpu": 2**20}
# Platforms on which maximum, sum and entropy of a row of logits are one reduction, which reads the
# logits once in place of twice.
ONE_PASS = ("gpu",)


def grouped_chunks() -> int:
    """Largest number of chunks per step of the backward pass on the target platform."""
    return GROUPED_CHUNKS.get(target_platform(), 4)


class TokenScores(NamedTuple):
    """Scores of the targets under p = softmax(cap(h Wᵀ) / temperature), float32 [B, T]."""

    logp: Float[Array, "B T"]  # log p(target)
    entropy: Float[Array, "B T"]  # -Σ p log p
    kl: Float[Array, "B T"]  # divergence from the reference q, such as KL(p | q); 0 without one
    log_mass: Float[Array, "B T"]  # log Σ p over the support; 0 without one
    of_ids: Float[Array, "B T k"] | None = None  # log p(id) of further ids; None without them


def token_scores(
    hidden: Float[Array, "B T D"],
    unembed: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    *,
    change: HeadChange | None = None,
    ref: tuple[Float[Array, "B T E"], Float[Array, "V E"]] | None = None,
    support: UInt32[Array, "B T W"] | None = None,
    ids: Int[Array, "B T k"] | None = None,
    beta: float = 1.0,
    temperature: float,
    logit_softcap: float | None = None,
    chunk: int,
    rules: Rules,
    mask: Float[Array, "B T"] | None = None,
    with_entropy: bool = True,
) -> TokenScores:
    """The scores of every target.

    `change` is the low-rank change of the unembedding by an adapter; both parts get gradients.
    `ref` has the hidden states and the unembedding of the reference, at the same temperature; it
    gets no gradient. `support` has one bit per id of the vocabulary (data/support.py): logp -
    log_mass is the logprob under p restricted to these ids. `ids` are k different ids per token.
    `beta` is that of the divergence from the reference (divergence.py): 1 = KL(p | q), 0 = KL(q |
    p), between them the generalised Jensen-Shannon divergence.

    The logits of `chunk` tokens (per device) exist at one time; the backward pass recomputes them.
    Rows are sharded over the batch axes, the vocabulary over its own axes. dW is summed in float32
    and has the sharding of `unembed`. Tokens whose `mask` is 0 give zeros, get no gradient and cost
    nothing; `with_entropy=False` does the same for the entropy. Raises ValueError for a temperature
    or chunk that is not positive.
    """
    if temperature <= 0:
        raise ValueError(
            f"logprobs need a positive temperature, got {temperature}; set 1.0 to score the model "
            "itself"
        )
    if chunk <= 0:
        raise ValueError(f"the logprob chunk is {chunk} tokens; set it to 1 or more")
    head = Head(
        temperature,
        logit_softcap,
        chunk,
        rules,
        with_entropy,
        with_kl=ref is not None,
        with_support=support is not None,
        n_grouped=grouped_chunks(),
        one_pass=target_platform() in ONE_PASS,
        beta=beta,
        with_ids=ids is not None,
    )
    keep = jnp.ones(targets.shape, bool) if mask is None else mask > 0
    targets, keep = (jax.reshard(a, rules.spec("batch", "time")) for a in (targets, keep))
    hidden, unembed = _reshard(rules, hidden, unembed)
    changes = () if change is None else _reshard_change(rules, *change)
    supports, chosen = (
        () if a is None else (jax.reshard(a, rules.spec("batch", "time", None)),)
        for a in (support, ids)
    )
    reference = () if ref is None else jax.lax.stop_gradient(_reshard(rules, *ref))
    with jax.named_scope("logprob"):
        scores = chunked_logprob(
            head,
            (hidden, *changes[:1]),
            (unembed, *changes[1:]),
            targets,
            keep,
            reference,
            supports,
            chosen,
        )
    return TokenScores(*scores)


def top_k_logp(
    hidden: Float[Array, "B T D"],
    unembed: Float[Array, "V D"],
    k: int,
    *,
    change: HeadChange | None = None,
    temperature: float,
    logit_softcap: float | None = None,
    chunk: int,
    rules: Rules,
    mask: Float[Array, "B T"],
) -> tuple[Int[Array, "B T k"], Float[Array, "B T k"]]:
    """(ids, log p) of the k most likely ids of every token, without gradient.

    The arguments are those of `token_scores`. Zeros where `mask` is 0.
    """
    head = Head(temperature, logit_softcap, chunk, rules, False, False, False)
    return chunked_top_k(head, k, *_resharded(rules, hidden, unembed, change, mask))


def collision_logp(
    hidden: Float[Array, "B T D"],
    unembed: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    *,
    change: HeadChange | None = None,
    temperature: float,
    logit_softcap: float | None = None,
    chunk: int,
    rules: Rules,
    mask: Float[Array, "B T"],
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """(log p(target), log Σ p² over the vocabulary) of every token, without gradient.

    The arguments are those of `token_scores`. Zeros where `mask` is 0.
    """
    head = Head(temperature, logit_softcap, chunk, rules, False, False, False)
    xs, ws, keep = _resharded(rules, hidden, unembed, change, mask)
    targets = jax.reshard(targets, rules.spec("batch", "time"))
    return chunked_collision(head, xs, ws, targets, keep)


def _resharded(rules: Rules, hidden, unembed, change: HeadChange | None, mask):
    """(xs, ws, keep) of the kernels without gradient."""
    keep = jax.reshard(mask > 0, rules.spec("batch", "time"))
    hidden, unembed = _reshard(rules, hidden, unembed)
    changes = () if change is None else _reshard_change(rules, *change)
    return (hidden, *changes[:1]), (unembed, *changes[1:]), keep


def _reshard(rules: Rules, hidden, unembed):
    """hidden and unembed in the shardings that the kernel's shard_map expects."""
    return (
        jax.reshard(hidden, rules.spec("batch", "time", None)),
        jax.reshard(unembed, rules.spec("vocab", "w_embed")),
    )


def _reshard_change(rules: Rules, low, b):
    """The same of a change of the unembedding, whose rank is not sharded."""
    return (
        jax.reshard(low, rules.spec("batch", "time", None)),
        jax.reshard(b, rules.spec("vocab", None)),
    )
