"""Options of each built-in optimizer, set as learner.optimizer="NAME?OPTION=VALUE&..."."""

import dataclasses

from jaxrl.config.schema import key


@dataclasses.dataclass(frozen=True)
class NoOptions:
    """Everything is a key of the learner."""


@dataclasses.dataclass(frozen=True)
class AdafactorOptions:
    """Options of Adafactor, with the names and defaults of optax.adafactor."""

    min_dim_size_to_factor: int = key(
        128, "Second moments of matrices with both sides at least this long are factored", ge=1
    )
    decay_rate: float = key(0.8, "Second moments decay by 1 - step^-decay_rate", gt=0, le=1)
    clipping_threshold: float = key(
        1.0, "Maximum root mean square of a tensor's update before the learning rate", gt=0
    )
    multiply_by_parameter_scale: bool = key(
        True, "Multiply the learning rate by the root mean square of the tensor's weights"
    )


@dataclasses.dataclass(frozen=True)
class LionOptions:
    b1: float = key(0.9, "Weight of the momentum in the update", ge=0, le=1)
    b2: float = key(0.99, "Decay of the momentum", ge=0, le=1)


@dataclasses.dataclass(frozen=True)
class MuonOptions:
    momentum: float = key(0.95, "Decay of the momentum", ge=0, le=1)
    nesterov: bool = key(True, "Nesterov momentum")
    steps: int = key(5, "Newton-Schulz iterations", ge=1)
    scale: str = key(
        "rms",
        "Factor of a [rows, columns] matrix: rms = 0.2 sqrt(max(rows, columns)), which suits "
        "AdamW's learning rates; shape = sqrt(max(1, rows / columns))",
        choices=("rms", "shape"),
    )
    dtype: str = key(
        "auto",
        "Dtype of the iterations: auto = float32 on CPU, bfloat16 elsewhere",
        choices=("auto", "float32", "bfloat16"),
    )


OptimizerOptions = NoOptions | AdafactorOptions | LionOptions | MuonOptions
OPTIMIZER_OPTIONS: dict[str, type[OptimizerOptions]] = {
    "adamw": NoOptions,
    "adafactor": AdafactorOptions,
    "lion": LionOptions,
    "muon": MuonOptions,
    "sgd": NoOptions,
}
