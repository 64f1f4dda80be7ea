"""The module of each kind of mixer."""

from collections.abc import Callable
from typing import Any

from jaxrl.models.config import AttentionConfig
from jaxrl.models.layers.attention import Attention
from jaxrl.models.layers.gated_delta_net import GatedDeltaNet
from jaxrl.models.layers.short_conv import ShortConv
from jaxrl.models.state_mixers import GatedDeltaNetConfig, ShortConvConfig

MIXERS: dict[type, Callable[..., Any]] = {
    AttentionConfig: Attention,
    GatedDeltaNetConfig: GatedDeltaNet,
    ShortConvConfig: ShortConv,
}
