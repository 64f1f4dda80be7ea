"""The module of each kind of mixer."""

from collections.abc import Callable, Mapping
from typing import Any

from jaxrl.models.config import AttentionConfig
from jaxrl.models.layers.attention import Attention
from jaxrl.models.layers.gated_delta_net import GatedDeltaNet
from jaxrl.models.layers.mla import MLA
from jaxrl.models.layers.short_conv import ShortConv
from jaxrl.models.mla_config import MLAConfig
from jaxrl.models.state_mixers import GatedDeltaNetConfig, ShortConvConfig

# Config of a mixer -> its module, which is made from (make, decoder's config, mixer's config).
MIXERS: Mapping[type, Callable[..., Any]] = {
    AttentionConfig: Attention,
    MLAConfig: MLA,
    GatedDeltaNetConfig: GatedDeltaNet,
    ShortConvConfig: ShortConv,
}
