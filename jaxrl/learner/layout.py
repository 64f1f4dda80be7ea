"""How scoring and updates of a run lie on the mesh."""

from jaxrl.config import RunConfig
from sharding.rules import PIPELINE, PRESETS, TRAIN, Rules


def training_rules(cfg: RunConfig) -> Rules:
    """The rules of the axes that the mesh uses."""
    if cfg.mesh.stage != 1:
        return PIPELINE
    return TRAIN if cfg.mesh.sequence == 1 else PRESETS[cfg.learner.sequence_parallel]
