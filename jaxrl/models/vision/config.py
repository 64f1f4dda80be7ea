"""The architecture of a vision tower: frozen dataclasses describe those of all families."""

import dataclasses
import math

from jaxrl.models.config import LoRA, MLPConfig, NormNames, target_name


@dataclasses.dataclass(frozen=True)
class TowerNames:
    """Names of a tower's parts in files.

    Norms of a block are those of the decoder's (before and after attention, before and after the
    MLP), and projections of attention (queries, keys and values in one, or each; output).
    """

    patch: str  # the embedding of patches
    table: str | None  # learned embeddings of positions
    block: str  # of a block, before its number
    norms: NormNames
    qkv: tuple[str, ...]
    out: str
    merger: str  # the projector to the decoder
    deepstack: str = ""  # of a projector of deepstack, before its number
    final_norm: str | None = None  # after the last block, before tokens are merged


@dataclasses.dataclass(frozen=True)
class NormConfig:
    """The norms of a part of the tower: RMSNorm, or layer normalization with a bias."""

    rms: bool = False
    eps: float = 1e-6
    unit_offset: bool = False  # an RMSNorm scales by 1 + w
    round_last: bool = False  # it rounds after it scales


@dataclasses.dataclass(frozen=True)
class ImageAttentionConfig:
    """Attention of a block: N heads of H features, all of which see each other in a segment."""

    N: int
    H: int
    bias: bool = True
    theta: float | None = None  # base of the rotation by row and column; None: no rotation
    by_halves: bool = False  # the halves of a head are rotated, not the halves of its pairs
    qk_norms: tuple[str, str] | None = None  # names in files; then values are normalized too
    scale: float | None = None  # of the scores; None: H ** -0.5
    clipped: bool = False  # inputs and outputs of its linear layers have limits

    @property
    def score_scale(self) -> float:
        return self.H**-0.5 if self.scale is None else self.scale


@dataclasses.dataclass(frozen=True)
class MergerConfig:
    """The map from merge x merge patches to one token of the decoder.

    "mlp": their features one after the other, a layer, GELU, a layer. "mean": the mean of their
    features times `scale`, a norm and a matrix.
    """

    kind: str  # "mlp" | "mean"
    norm_name: str | None  # in files; None: without weights
    names: tuple[str, ...]  # in files, of its matrices
    norm: NormConfig = NormConfig()
    transposed: bool = False  # files store the matrix as [in, out]
    scale: float = 1.0
    # In files: (b, s) of a mean x, which becomes (x - b) s.
    standard: tuple[str, str] | None = None


@dataclasses.dataclass(frozen=True)
class PartOptions:
    """The options of the linear layers of a part of the tower."""

    D: int
    lora: LoRA | None
    base_dtype: str = ""


@dataclasses.dataclass(frozen=True)
class TowerConfig:
    """A vision tower and its projector: a transformer without causal mask over patches of images.

    D features, L blocks. Image processors give the patches of an image token by token, those of
    each one next to each other, or all in the order of rows.
    """

    family: str  # key of TOWERS in towers.py
    L: int
    D: int
    attn: ImageAttentionConfig
    ffn: MLPConfig
    out_D: int  # features of a token in the decoder
    patch: int  # pixels on each side of a patch
    patch_shape: tuple[int, ...]  # of the numbers of a patch, in the weights of its embedding
    merge: int  # patches on each side of a token
    merger: MergerConfig
    names: TowerNames
    norm: NormConfig = NormConfig()
    # Learned positions: "" (none), "stretched" from a square over the image, "fixed" to a square
    # that every image is, or one for each row and one for each column ("axes").
    positions: str = ""
    table: int = 0  # learned positions on each side
    rows_first: bool = False  # image processors give patches in the order of rows
    patch_bias: bool = True
    center: float = 0.0  # a number x of a patch enters the tower as (x - center) gain
    gain: float = 1.0
    deepstack: tuple[int, ...] = ()  # blocks whose outputs enter the decoder's first layers
    window: int = 0  # tokens on each side of a window of attention; 0 = none
    full_layers: tuple[int, ...] = ()  # with windows, the blocks that see whole images
    token: int = 0  # the placeholder of its tokens in a text
    lora: LoRA | None = None  # its targets are names of `linear_layers` (adapters.py)
    frozen: bool = False  # training changes the projector only

    @property
    def patch_features(self) -> int:
        """Numbers of a patch."""
        return math.prod(self.patch_shape)

    @property
    def table_shape(self) -> tuple[int, ...]:
        """The learned positions in files."""
        return (2, self.table, self.D) if self.positions == "axes" else (self.table**2, self.D)

    @property
    def n_taps(self) -> int:
        """Learned positions whose weighted sum a patch gets."""
        return {"": 0, "stretched": 4, "fixed": 1, "axes": 2}[self.positions]

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
