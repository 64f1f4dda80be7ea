"""Mixers that keep a state of constant size of a sequence, in place of keys and values."""

import dataclasses
from typing import ClassVar

# Shapes of a sequence's slot: the convolution's inputs at the last tokens, of queries and keys and
# of values, and the float32 state. None: there is no such part.
SlotShapes = tuple[tuple[int, ...] | None, tuple[int, ...], tuple[int, ...] | None]


@dataclasses.dataclass(frozen=True)
class GatedDeltaNetConfig:
    """Gated DeltaNet of one layer (https://arxiv.org/abs/2412.06464): a state per value head.

    K heads of queries and keys, D wide; N heads of values, V wide, of which N / K share a key.
    """

    K: int
    N: int
    D: int
    V: int
    conv_len: int = 4  # tokens that the causal convolution before it reads
    fused: bool = False  # two projections, by key head (Qwen3-Next), not four (Qwen3.5)
    rope: ClassVar[None] = None
    window: ClassVar[int] = 0

    @property
    def head_features(self) -> int:
        """Features of all heads: queries, keys and values, and half of their gates."""
        return self.K * self.D + self.N * self.V

    @property
    def weight_rows(self) -> int:
        """Rows of D weights that a token is multiplied with."""
        return 2 * self.K * self.D + 3 * self.N * self.V + 2 * self.N

    @property
    def token_products(self) -> int:
        """Products of a token with its state: two reads and one write."""
        return 3 * self.N * self.D * self.V

    @property
    def slot_shapes(self) -> "SlotShapes":
        W1 = self.conv_len - 1
        return (W1, self.K, 2 * self.D), (W1, self.N, self.V), (self.N, self.D, self.V)

    @property
    def kind(self) -> "GatedDeltaNetConfig":
        return self


@dataclasses.dataclass(frozen=True)
class ShortConvConfig:
    """Short convolution of one layer: of N blocks of H features each, as many as the model's."""

    N: int
    H: int
    conv_len: int = 3  # tokens that the causal convolution reads
    bias: bool = False  # of the projections and of the convolution
    rope: ClassVar[None] = None
    window: ClassVar[int] = 0

    @property
    def head_features(self) -> int:
        """Half of the inputs and outputs of its products, as of attention."""
        return 2 * self.N * self.H

    @property
    def weight_rows(self) -> int:
        """Rows of D weights that a token is multiplied with."""
        return 4 * self.N * self.H

    @property
    def token_products(self) -> int:
        """Products of a token with those before it."""
        return self.conv_len * self.N * self.H

    @property
    def slot_shapes(self) -> SlotShapes:
        return None, (self.conv_len - 1, self.N, self.H), None

    @property
    def kind(self) -> "ShortConvConfig":
        return self
