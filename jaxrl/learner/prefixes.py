"""Whether sequences with common prefixes share them in training and scoring, and their packing."""

import functools
import logging
from collections.abc import Sequence

from jaxrl.config.keys import RunConfig
from jaxrl.data.packing import Packed, pack
from jaxrl.kernels.attention import ONE_RANGE
from jaxrl.types import TrainingSample

log = logging.getLogger(__name__)


def shares_prefixes(cfg: RunConfig) -> bool:
    """Whether the common tokens of sequences are computed once: learner.shared_prefixes.

    With "auto" they are, unless the named attention kernel does not support it, which is logged
    once. Raises ValueError if it does not and the key is "on".
    """
    wanted, kernel = cfg.learner.shared_prefixes, cfg.model.attention
    if wanted == "off" or kernel not in ONE_RANGE:
        return wanted != "off"
    if wanted == "on":
        raise ValueError(
            f"config.learner.shared_prefixes='on', but a query of the attention kernel {kernel!r} "
            "sees one range of keys; set shared_prefixes to 'auto' or 'off', or "
            "config.model.attention to 'auto'"
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
