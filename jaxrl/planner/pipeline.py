"""Idle time and activations of a pipeline (jaxrl/models/pipeline*.py), by formula."""

import dataclasses
from collections.abc import Mapping

from jaxrl.config.keys import RunConfig
from jaxrl.config.remat import parse_remat
from jaxrl.layout import training_rules
from jaxrl.models.config import DecoderConfig
from jaxrl.planner.estimate import kept_features
from jaxrl.planner.sizes import n_kept, n_ticks


@dataclasses.dataclass(frozen=True)
class PipelinePlan:
    """The pipeline of the policy's update, for its largest micro-batch.

    The compiled program computes on idle ticks too: its flops and times include them.
    """

    schedule: str  # learner.pipeline_schedule
    stages: int
    rows: int  # per data-parallel rank; they pass through the stages one after the other
    bubble: float  # share of the ticks in which a stage has no row
    activation_bytes: int  # that backward keeps of the layers, per device

    @property
    def ticks(self) -> int:
        """Times that a stage runs its layers forward; as often backward."""
        return n_ticks(self.rows, self.stages)


def pipeline_plan(
    cfg: RunConfig, decoder: DecoderConfig, mesh: Mapping[str, int], item_bytes: int
) -> PipelinePlan | None:
    """The pipeline of a run on a mesh of these sizes; None without stages.

    `item_bytes` is the size of an activation. Layer inputs that learner.remat offloads count too.
    """
    stages, (rows, row_len) = mesh.get("stage", 1), cfg.learner.shapes[-1]
    if stages == 1:
        return None
    tensor = mesh["tensor"]
    stream = decoder.D / (tensor if training_rules(cfg).residual else 1)
    kept = kept_features(decoder, tensor=tensor, expert=mesh["expert"], stream=stream, stacked=True)
    layers = sum(
        part.n_layers * kept[part.policy]
        if part.group == 1
        else part.n_layers / part.group * stream
        for part in parse_remat(cfg.learner.remat).ranges(decoder.L // stages)
    )
    schedule = cfg.learner.pipeline_schedule
    tokens = n_kept(schedule, rows, stages) * row_len / mesh["sequence"]
    bubble = (stages - 1) / n_ticks(rows, stages)
    kept_bytes = round(tokens * layers * item_bytes)
    return PipelinePlan(schedule, stages, rows, bubble, kept_bytes)
