"""Attention over a paged KV cache, for decode and chunked prefill.

One signature, one implementation per backend.
"""

import jax
from jaxtyping import Array, Float, Int

from jaxrl.kernels.attention_spec import AttentionSpec
from jaxrl.kernels.choice import Defaults, Implementations, choose
from jaxrl.kernels.paged_attention.columns import paged_attention_columns
from jaxrl.kernels.paged_attention.limits import unsupported_by_ragged, unsupported_by_triton
from jaxrl.kernels.paged_attention.pages import Pages, write_pages
from jaxrl.kernels.paged_attention.reference import paged_attention_reference

__all__ = ["paged_attention", "write_pages"]

IMPLEMENTATIONS: Implementations = {
    "columns": paged_attention_columns,
    "reference": paged_attention_reference,
    "ragged": "jaxrl.kernels.paged_attention.ragged:paged_attention_ragged",
    "triton": "jaxrl.kernels.paged_attention.triton:paged_attention_triton",
}
DEFAULTS: Defaults = {
    "cpu": ("columns", "bitwise equal to training attention"),
    "gpu": ("triton", "a Pallas kernel that reads only each row's pages"),
    "tpu": ("ragged", "a Pallas kernel that reads only each row's pages"),
}


def paged_attention(
    q: Float[Array, "B T N H"],
    k_pages: Pages,
    v_pages: Pages | None,
    *,
    spec: AttentionSpec,
    page_table: Int[Array, "B C"],
    positions: Int[Array, "B T"],
    window: int | Int[Array, ""],
    sinks: Float[Array, "N"] | None = None,
    ahead: Int[Array, "B T"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T N H"]:
    """Attention of the query at position p over the row's keys at positions 0..p.

    Without `v_pages` the keys are the values, as in multi-head latent attention.
    `window` > 0 keeps the last `window` keys. Row b's keys are in the pages of `page_table[b]`; the
    query's own key has been written before. A position of -1 is padding and gives zeros. `sinks`
    are one more logit of each head, without a value (kernels/sinks.py). With `ahead`, a query sees
    the keys up to that position: also the later ones of its image, which have been written.
    `implementation` is config.model.paged_attention; None or "auto" selects by backend and pages.
    """
    attend = choose(
        "config.model.paged_attention",
        implementation,
        implementations=IMPLEMENTATIONS,
        defaults=paged_defaults(k_pages, page_table),
    )
    with jax.named_scope("paged_attention"):
        return attend(
            q,
            k_pages,
            v_pages,
            spec=spec,
            page_table=page_table,
            positions=positions,
            window=window,
            sinks=sinks,
            ahead=ahead,
        )


def paged_defaults(k_pages: Pages, page_table: jax.Array) -> Defaults:
    """The implementation for each backend, for these pages."""
    defaults = DEFAULTS
    if why := unsupported_by_ragged(k_pages, page_table):
        reason = f"plain XLA, because 'ragged' does not support {why}"
        defaults = defaults | {"tpu": ("columns", reason)}
    if why := unsupported_by_triton(k_pages):
        reason = f"plain XLA, because 'triton' does not support {why}"
        defaults = defaults | {"gpu": ("columns", reason)}
    return defaults
