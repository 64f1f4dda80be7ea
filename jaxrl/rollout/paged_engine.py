"""The paged engine of a run, in the trainer's process or in a rollout worker."""

import jax.numpy as jnp
import numpy as np

from jaxrl.config.keys import RolloutConfig, RunConfig
from jaxrl.engine.device.sampling import FILTERS
from jaxrl.engine.engine import PagedEngine
from jaxrl.engine.images import ImageSettings
from jaxrl.layout import Layout
from jaxrl.models.config import DecoderConfig
from jaxrl.models.image_features import whole_images
from jaxrl.models.vision.config import TowerConfig


def paged_engine(
    cfg: RunConfig,
    rollout: RolloutConfig,
    layout: Layout,
    decoder: DecoderConfig,
    eos_ids: tuple[int, ...],
    *,
    adjustable: bool = False,
    tower: TowerConfig | None = None,
) -> PagedEngine:
    """The engine with the sizes in `rollout`, for requests with images of `tower` if it is given.

    It has the sampling filters of the run and of its validation; with `adjustable`, which is as in
    PagedEngine, all of them.
    """
    name = cfg.model.paged_attention
    adjustable = adjustable or cfg.reward.judge.on_own_engine  # for the grammar of its verdicts
    used = cfg.rollout.sampling.filters | cfg.eval.sampling.filters
    return PagedEngine(
        decoder,
        rollout,
        rules=layout.rules,
        dtype=layout.dtype,
        max_len=cfg.engine_len,
        eos_ids=eos_ids,
        implementation=None if name == "auto" else name,
        keep_support=cfg.algorithm.keep_sampling_mask,
        keep_experts=cfg.learner.router_replay == "R3",
        filters=tuple(name for name in FILTERS if adjustable or name in used),
        adjustable=adjustable,
        images=None if tower is None else image_settings(tower, decoder, layout.dtype),
    )


def image_settings(tower: TowerConfig, decoder: DecoderConfig, dtype: jnp.dtype) -> ImageSettings:
    """The images that the engine of a model with a tower reads."""
    by_axis = any(mixer.rope.mrope_section for mixer in decoder.paged_layers)
    merge = tower.merge if by_axis else 0
    return ImageSettings(
        token=tower.token,
        D=tower.out_D,
        n_deep=len(tower.deepstack),
        merge=merge,
        dtype=np.dtype(dtype),
        whole=whole_images(decoder),
    )
