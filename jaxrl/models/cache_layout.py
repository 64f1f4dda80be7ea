"""The place of each layer in the cache: whose cache it uses, and where that is."""

import dataclasses
import functools

from jaxrl.kernels.paged_attention.limits import LANES
from jaxrl.models.config import AttentionConfig, DecoderConfig, MLAConfig
from jaxrl.models.state_mixers import GatedDeltaNetConfig, ShortConvConfig

PageShape = tuple[int, int]  # heads, and features of a head


@dataclasses.dataclass(frozen=True)
class CachePlace:
    """The cache of one layer."""

    layer: int  # whose cache it is: an earlier one if the layer uses its keys and values
    pool: int  # number of its stacked pool: pages of one shape are in one pool
    index: int  # of the cache among those of its pool, or among those of states


@functools.cache
def cache_places(cfg: DecoderConfig) -> tuple[CachePlace, ...]:
    """The place of every layer."""
    pools, places, counts = page_shapes(cfg), [], {}
    for i, layer in enumerate(cfg.layers):
        mixer = layer.mixer
        if isinstance(mixer, AttentionConfig) and mixer.shared is not None and mixer.shared.reads:
            places.append(places[mixer.shared.layer])
            continue
        shape = page_shape(mixer)
        index = counts.get(shape, 0)
        counts[shape] = index + 1
        places.append(CachePlace(i, 0 if shape is None else pools.index(shape), index))
    return tuple(places)


@functools.cache
def page_shapes(cfg: DecoderConfig) -> tuple[PageShape, ...]:
    """The different shapes of pages, in the order of their first layers."""
    shapes = [page_shape(mixer) for mixer in page_owners(cfg)]
    return tuple(dict.fromkeys(shape for shape in shapes if shape is not None))


def page_shape(
    mixer: AttentionConfig | MLAConfig | GatedDeltaNetConfig | ShortConvConfig,
) -> PageShape | None:
    """The shape of a layer's pages; None for a layer without: it has a state, or uses others."""
    if isinstance(mixer, GatedDeltaNetConfig | ShortConvConfig):
        return None
    if isinstance(mixer, MLAConfig):
        return 1, mixer.page_features
    return None if mixer.reads_kv else (mixer.K, mixer.H)


def page_width(features: int, platform: str) -> int:
    """Features of a head in the pages of a platform: on TPU whole tiles, as its memory has anyway.

    The kernels of kernels/paged_attention read whole tiles only.
    """
    return -(-features // LANES) * LANES if platform == "tpu" else features


def page_owners(cfg: DecoderConfig) -> list[AttentionConfig | MLAConfig]:
    """The mixers of the layers that have pages: those that use no earlier layer's."""
    return [mixer for mixer in cfg.paged_layers if page_shape(mixer) is not None]


def kept_layers(cfg: DecoderConfig) -> dict[int, PageShape]:
    """(K, H) of the layers whose keys and values later layers use."""
    sources = {mixer.shared.layer for mixer in cfg.attention_layers if mixer.shared is not None}
    mixers = {i: cfg.layers[i].mixer for i in sorted(sources)}
    return {i: (m.K, m.H) for i, m in mixers.items() if isinstance(m, AttentionConfig)}
