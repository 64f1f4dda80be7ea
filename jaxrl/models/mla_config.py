"""Multi-head latent attention of one layer, as a frozen dataclass."""

import dataclasses
import math
from typing import ClassVar

from jaxrl.kernels.attention_spec import AttentionSpec
from jaxrl.models.rope_config import Rope
from sharding import Rules


@dataclasses.dataclass(frozen=True)
class MLAConfig:
    """Multi-head latent attention (https://arxiv.org/abs/2405.04434, section 2.1) of N heads.

    Keys and values of all heads are linear maps of one latent per token. All heads share the part
    of the key that is rotated.
    """

    N: int
    nope: int  # features of a head's query and key that are not rotated, its first ones
    rotated: int  # features that are
    V: int  # features of a head's value
    latent: int  # features from which keys and values are computed
    rope: Rope
    q_rank: int = 0  # features from which queries are computed; 0: from the layer's input
    bias: bool = False  # of the projections from the layer's input to ranks, and of the output
    mscale_all_dim: float = 0.0  # of a rotary scaling: it scales the scores too
    window: ClassVar[int] = 0

    @property
    def H(self) -> int:
        """Features of a head's query and key."""
        return self.nope + self.rotated

    @property
    def K(self) -> int:
        """Heads of expanded keys and values, as in training."""
        return self.N

    @property
    def page_features(self) -> int:
        """Features of a token in KV pages: its latent and its rotated key."""
        return self.latent + self.rotated

    def spec(self, rules: Rules) -> AttentionSpec:
        return AttentionSpec(self.score_scale, None, rules)

    @property
    def score_scale(self) -> float:
        factor = self.rope.factor if self.mscale_all_dim else 1.0
        amplitude = 0.1 * self.mscale_all_dim * math.log(factor) + 1.0 if factor > 1 else 1.0
        return self.H**-0.5 * amplitude * amplitude

    @property
    def head_features(self) -> int:
        """Features of all heads, and of the ranks that they are computed from."""
        return self.N * (self.H + self.V) + self.q_rank + self.page_features

    @property
    def weight_rows(self) -> int:
        """Rows of D weights that a token is multiplied with."""
        queries = self.q_rank or self.N * self.H
        return queries + self.page_features + self.N * self.V

    @property
    def rank_weights(self) -> int:
        """Weights between ranks and heads that a token is multiplied with."""
        return self.N * (self.H * self.q_rank + (self.nope + self.V) * self.latent)

    @property
    def kind(self) -> "MLAConfig":
        return self
