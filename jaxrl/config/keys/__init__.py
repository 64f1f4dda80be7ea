"""Every key of a run: its default, unit, range and meaning.

Defaults are defined here and nowhere else; docs/reference/config.md is printed from here.
"""

from jaxrl.config.keys.algorithm import AlgorithmConfig
from jaxrl.config.keys.data import DataConfig, EnvConfig, RewardConfig, RewardModelConfig
from jaxrl.config.keys.devices import (
    DistributedConfig,
    MeshConfig,
    ModelConfig,
    RoleConfig,
    ScoringConfig,
)
from jaxrl.config.keys.judge import JudgeConfig
from jaxrl.config.keys.learner import CriticConfig, LearnerConfig, PreferenceConfig
from jaxrl.config.keys.lora import LoRAConfig
from jaxrl.config.keys.rollout import EvalConfig, RolloutConfig, SamplingConfig
from jaxrl.config.keys.run import CheckpointConfig, LogConfig, ProfileConfig, RunConfig
from jaxrl.config.keys.schedule import ScheduleConfig
from jaxrl.config.keys.self_distillation import SelfDistillationConfig
from jaxrl.config.keys.teacher_endpoint import TeacherEndpointConfig

__all__ = [
    "AlgorithmConfig",
    "CheckpointConfig",
    "CriticConfig",
    "DataConfig",
    "DistributedConfig",
    "EnvConfig",
    "EvalConfig",
    "JudgeConfig",
    "LearnerConfig",
    "LoRAConfig",
    "LogConfig",
    "MeshConfig",
    "ModelConfig",
    "PreferenceConfig",
    "ProfileConfig",
    "RewardConfig",
    "RewardModelConfig",
    "RoleConfig",
    "RolloutConfig",
    "RunConfig",
    "SamplingConfig",
    "ScheduleConfig",
    "ScoringConfig",
    "SelfDistillationConfig",
    "TeacherEndpointConfig",
]
