"""Whether sequences with common prefixes share them in training and scoring, and their packing."""

import functools
import logging
from collections.abc import Sequence

from jaxrl.config.keys import RunConfig
from jaxrl.data.packing import Packed, pack
from jaxrl.kernels.attention import one_range_kernel
from jaxrl.kernels.ring_attention import one_range_ring
from jaxrl.types import TrainingSample

log = logging.getLogger(__name__)


def shares_prefixes(cfg: RunConfig) -> bool:
    """Whether the common tokens of sequences are computed once: learner.shared_prefixes.

    With "auto" they are, unless the attention kernel of these devices does not support it, which is
    logged once. Raises ValueError if it does not and the key is "on".
    """
    wanted = cfg.learner.shared_prefixes
    one_range = one_range_ring if cfg.learner.sequence_parallel == "ring" else one_range_kernel
    kernel = None if wanted == "off" else one_range(cfg.model.attention)
    if kernel is None:
        return wanted != "off"
    if wanted == "on":
        raise ValueError(
            f"config.learner.shared_prefixes='on', but a query of the attention kernel {kernel!r} "
            f"(config.model.attention={cfg.model.attention!r}) sees one range of keys; set "
            "shared_prefixes to 'auto' or 'off', or config.model.attention to 'blockwise'"
        )
    _log_separate(kernel)
    return False


def pack_samples(samples: Sequence[TrainingSample], cfg: RunConfig, n_ranks: int) -> list[Packed]:
    """Micro-batches of the samples for `n_ranks` data-parallel ranks, as the config sets."""
    learner = cfg.learner
    return pack(
        samples,
        shapes=learner.shapes,
        align=learner.segment_align,
        n_ranks=n_ranks,
        share_prefixes=shares_prefixes(cfg),
    )


@functools.cache
def _log_separate(kernel: str) -> None:
    log.info(
        "learner.shared_prefixes: off, because a query of the attention kernel %r sees one range "
        "of keys",
        kernel,
    )
