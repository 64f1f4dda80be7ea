"""Attention of new tokens over keys that lie in the pages of a pool: one signature for decode and
chunked prefill, one implementation per backend."""

import jax
from jaxtyping import Array, Float, Int

from jaxrl.kernels.attention_spec import AttentionSpec
from jaxrl.kernels.choice import choose
from jaxrl.kernels.paged_attention.columns import paged_attention_columns
from jaxrl.kernels.paged_attention.pages import Pages, write_pages
from jaxrl.kernels.paged_attention.ragged import paged_attention_ragged, why_not_ragged
from jaxrl.kernels.paged_attention.reference import paged_attention_reference
from jaxrl.kernels.paged_attention.triton import paged_attention_triton, why_not_triton

__all__ = ["paged_attention", "write_pages"]

BUILT = {
    "columns": paged_attention_columns,
    "reference": paged_attention_reference,
    "ragged": paged_attention_ragged,
    "triton": paged_attention_triton,
}
DEFAULTS = {
    "cpu": ("columns", "bitwise equal to training attention"),
    "gpu": ("triton", "the Pallas kernel that reads each row's own pages"),
    "tpu": ("ragged", "the Pallas kernel that reads each row's own pages"),
}


def paged_attention(
    q: Float[Array, "B T N H"],
    k_pages: Pages,
    v_pages: Pages,
    *,
    spec: AttentionSpec,
    page_table: Int[Array, "B C"],
    positions: Int[Array, "B T"],
    window: int | Int[Array, ""],
    implementation: str | None = None,
) -> Float[Array, "B T N H"]:
    """The query at position p attends to the row's keys at positions 0..p (the last `window` of them
    where it is > 0), which lie in the pages of `page_table`; its own key has been written already.

    A position of -1 is padding and gives zeros. `implementation` is config.model.paged_attention:
    None or "auto" picks for the backend and the pages.
    """
    defaults = DEFAULTS
    if why := why_not_ragged(k_pages, page_table):
        defaults = defaults | {
            "tpu": ("columns", f"plain XLA, because 'ragged' does not take {why}")
        }
    if why := why_not_triton(k_pages):
        defaults = defaults | {
            "gpu": ("columns", f"plain XLA, because 'triton' does not take {why}")
        }
    attend = choose(
        "config.model.paged_attention", implementation, built=BUILT, planned={}, defaults=defaults
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
        )
