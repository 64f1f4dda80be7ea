"""The paged engine of a run, in the trainer's process or in a rollout worker."""

from jaxrl.config.keys import RolloutConfig, RunConfig
from jaxrl.engine.engine import PagedEngine
from jaxrl.layout import Layout
from jaxrl.models.config import DecoderConfig


def paged_engine(
    cfg: RunConfig,
    rollout: RolloutConfig,
    layout: Layout,
    decoder: DecoderConfig,
    eos_ids: tuple[int, ...],
    *,
    adjustable: bool = False,
) -> PagedEngine:
    """The engine with the sizes in `rollout`; `adjustable` as in PagedEngine."""
    name = cfg.model.paged_attention
    return PagedEngine(
        decoder,
        rollout,
        rules=layout.rules,
        dtype=layout.dtype,
        max_len=cfg.data.max_len,
        eos_ids=eos_ids,
        implementation=None if name == "auto" else name,
        keep_support=cfg.algorithm.keep_sampling_mask,
        adjustable=adjustable,
    )
