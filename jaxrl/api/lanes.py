"""Calls that share dispatches: forward and forward_backward, cut into lanes, and optimizer steps.

A lane is a micro-batch [n_ranks, T] with sequences of one call. A dispatch runs several lanes of
the same T, of any calls and adapters. T and the content of the lanes depend on the call alone. An
optimizer step is one lane, too.
"""

import dataclasses
import json
import math
from collections.abc import Sequence

import numpy as np

from jaxrl.api.losses import ChosenLoss
from jaxrl.api.messages import training_output
from jaxrl.config.keys import RunConfig
from jaxrl.data.image_places import TEXT, PackedImages
from jaxrl.data.packing import Packed, gather, pack
from jaxrl.learner.loss import logprob_chunk
from jaxrl.models.config import DecoderConfig
from jaxrl.types import Batch, TrainingSample

MIN_CHUNK = 64  # tokens of a lane whose logits are computed together
MIN_LOGITS = 1024  # tokens of all lanes of a dispatch whose logits may be in memory at one time
MAX_STEPS = 8  # optimizer steps of one dispatch; each power of two has a separate program


@dataclasses.dataclass(eq=False)
class TrainingCall:
    """A call, with the results of the lanes that have run."""

    model: str
    loss: ChosenLoss
    forward_only: bool
    lanes: Sequence[Packed]
    logps: list[np.ndarray] = dataclasses.field(default_factory=list)  # [n_ranks, T] of each lane
    losses: list[float] = dataclasses.field(default_factory=list)  # sum of each lane
    error: Exception | None = None

    @property
    def kind(self) -> tuple[int, bool, bool]:
        """Calls of the same kind may share a dispatch: (tokens of a lane, no gradient, images)."""
        batch = self.lanes[0].batch
        return batch.tokens.shape[1], self.forward_only, batch.images is not None

    @property
    def n_left(self) -> int:
        """The number of lanes that have not run; 0 after an error."""
        return 0 if self.error is not None else len(self.lanes) - len(self.logps)

    async def output(self) -> bytes:
        """The body of the result. Raises the error of the call."""
        if self.error is not None:
            raise self.error
        logprobs = gather(self.logps, self.lanes)
        return training_output(logprobs, {"loss:sum": math.fsum(self.losses)})


@dataclasses.dataclass(frozen=True)
class AdamParams:
    """The hyper-parameters of one optimizer step; the defaults are those of the package tinker."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0  # decoupled: AdamW
    grad_clip_norm: float = 0.0  # 0 = no clipping


@dataclasses.dataclass(eq=False)
class OptimizerCall:
    """An optimizer step of one model, with its metrics once it has run."""

    model: str
    params: AdamParams
    metrics: dict[str, float] | None = None
    error: Exception | None = None
    kind = 0, False, False

    @property
    def n_left(self) -> int:
        """1 until the step has run."""
        return int(self.metrics is None and self.error is None)

    async def output(self) -> bytes:
        """The body of the result. Raises the error of the step."""
        if self.error is not None:
            raise self.error
        return json.dumps({"metrics": self.metrics}, allow_nan=False).encode()


SharedCall = TrainingCall | OptimizerCall


def pack_lanes(
    samples: Sequence[TrainingSample],
    targets: Sequence[np.ndarray],
    cfg: RunConfig,
    n_ranks: int,
) -> list[Packed]:
    """The lanes of a call: those with the fewest tokens, and of equal ones the longest rows.

    All of them have places of images if one has.

    Raises ValueError if a sequence is longer than the longest row.
    """
    learner = cfg.learner
    sizes = [-(-len(sample.tokens) // learner.segment_align) for sample in samples]
    sizes = [n * learner.segment_align for n in sizes]
    row_lens = sorted({row_len for _, row_len in learner.shapes}, reverse=True)
    enough = [row_len for row_len in row_lens if row_len >= max(sizes)] or row_lens[:1]
    row_len = min(enough, key=lambda n: -(-sum(sizes) // (n * n_ranks)) * n)
    packed = pack(samples, shapes=((1, row_len),), align=learner.segment_align, n_ranks=n_ranks)
    packed = [_with_targets(micro, targets) for micro in packed]
    if all(micro.batch.images is None for micro in packed):
        return packed
    return [dataclasses.replace(m, batch=with_places(m.batch)) for m in packed]


def with_places(batch: Batch) -> Batch:
    """The batch with the places of its images; without any, all of its tokens are text."""
    places = PackedImages(np.full(batch.tokens.shape, TEXT, np.int32), ())
    return dataclasses.replace(batch, images=batch.images or places)


def _with_targets(micro: Packed, targets: Sequence[np.ndarray]) -> Packed:
    """The micro-batch with these targets in place of the next tokens."""
    placed = np.array(micro.batch.targets)
    for span in micro.spans:
        placed[span.row, span.start : span.start + span.length] = targets[span.item]
    return dataclasses.replace(micro, batch=dataclasses.replace(micro.batch, targets=placed))


def lane_chunk(cfg: RunConfig, row_len: int) -> int:
    """Tokens of a lane whose logits are computed together; it depends on the length alone.

    That of the largest micro-batch for its share of that one's tokens, but not less than MIN_CHUNK:
    each chunk reads the weights of the head once more.
    """
    chunk = logprob_chunk(cfg)
    return min(chunk, max(chunk * row_len // _most_tokens(cfg), MIN_CHUNK))


def max_lanes(cfg: RunConfig, row_len: int) -> int:
    """Lanes of a full dispatch.

    Its tokens are those of the largest micro-batch at most, and its logits in memory those of one
    chunk, or of MIN_LOGITS tokens.
    """
    n_logits = max(logprob_chunk(cfg), MIN_LOGITS)
    return max(min(_most_tokens(cfg) // row_len, n_logits // lane_chunk(cfg, row_len)), 1)


def _most_tokens(cfg: RunConfig) -> int:
    """Tokens of the largest micro-batch of a rank."""
    return max(rows * row_len for rows, row_len in cfg.learner.shapes)


def step_size(n: int) -> int:
    """Optimizer steps of the program for `n`: a power of two. The others are padding."""
    return 1 << (n - 1).bit_length()


def dispatch_size(n_lanes: int, most: int, decoder: DecoderConfig) -> int:
    """Lanes of the program for `n_lanes`: a full dispatch, `most`, or a half, a quarter, ... of it.

    The others are padding. With experts it is always a full one: their grouped products sum in an
    order that depends on the number of lanes, and results must not depend on other clients.
    """
    size = most
    while size // 2 >= n_lanes and not decoder.expert_layers:
        size //= 2
    return size
