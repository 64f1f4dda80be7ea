"""The architecture of a vision tower: one frozen dataclass describes those of all families."""

import dataclasses
import math

from jaxrl.models.config import LoRA, MLPConfig, target_name


@dataclasses.dataclass(frozen=True)
class TowerNames:
    """Names of a tower's parts in files.

    Norms of a block are named (before attention, before the MLP), and projections of attention
    (queries, keys and values in one, or each; output).
    """

    patch: str  # the embedding of patches
    table: str | None  # learned embeddings of positions, without ".weight"
    block: str  # of the block {layer}
    norms: tuple[str, str]
    qkv: tuple[str, ...]
    out: str
    final_norm: str | None  # after the last block, before tokens are merged
    merger: str  # the projector to the decoder
    merger_norm: str
    deepstack: str = ""  # of the merger {layer} of deepstack


@dataclasses.dataclass(frozen=True)
class MergerConfig:
    """The map from merge x merge patches to one token of the decoder.

    "mlp": their features one after the other, a layer, GELU, a layer. "mean": the mean of their
    features, and a matrix that files store as [in, out].
    """

    kind: str  # "mlp" | "mean"
    names: tuple[str, ...]  # in files, of its matrices
    rms: bool = False  # the norm before it: RMSNorm, or layer normalization
    unit_offset: bool = False  # of an RMSNorm


@dataclasses.dataclass(frozen=True)
class PartOptions:
    """What the linear layers of a part of the tower take from its config."""

    D: int
    lora: LoRA | None
    base_dtype: str = ""


@dataclasses.dataclass(frozen=True)
class TowerConfig:
    """A vision tower and its projector: a transformer without causal mask over patches of images.

    D features, N heads, L blocks. Image processors give the patches of an image token by token,
    those of each one next to each other, or all in the order of rows.
    """

    family: str  # key of TOWERS in towers.py
    L: int
    D: int
    N: int
    ffn: MLPConfig
    out_D: int  # features of a token in the decoder
    patch_shape: tuple[int, ...]  # of a patch in files: channels, frames if any, height, width
    merge: int  # patches on each side of a token
    merger: MergerConfig
    names: TowerNames
    rows_first: bool = False  # image processors give patches in the order of rows
    table: int = 0  # learned positions on each side; 0 = none
    fixed: bool = False  # every image has exactly the positions of the table
    theta: float | None = None  # base of the rotation by row and column; None: no rotation
    rms: bool = False  # norms of blocks: RMSNorm, or layer normalization
    eps: float = 1e-6
    patch_bias: bool = True
    deepstack: tuple[int, ...] = ()  # blocks whose outputs enter the decoder's first layers
    window: int = 0  # tokens on each side of a window of attention; 0 = none
    full_layers: tuple[int, ...] = ()  # with windows, the blocks that see whole images
    lora: LoRA | None = None  # its targets are names of `linear_layers` (adapters.py)

    @property
    def H(self) -> int:
        """Features of a head."""
        return self.D // self.N

    @property
    def patch_features(self) -> int:
        """Numbers of a patch."""
        return math.prod(self.patch_shape)

    @property
    def merged_D(self) -> int:
        """Input features of the projector."""
        return self.D * (self.merge**2 if self.merger.kind == "mlp" else 1)

    def sees_image(self, block: int) -> bool:
        """Whether attention of a block is over whole images, not windows of them."""
        return not self.window or block in self.full_layers

    def options(self, part: str) -> PartOptions:
        """The options of the linear layers whose names begin with `part`, without it."""
        lora = self.lora
        if lora is not None:
            own = [name.removeprefix(part) for name in lora.targets if name.startswith(part)]
            names = tuple(map(target_name, own))
            lora = dataclasses.replace(lora, targets=names) if names else None
        return PartOptions(self.D, lora)
