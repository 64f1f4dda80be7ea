"""The experts that a run replays: learner.router_replay with "auto" resolved.

R2 is the routing of the old policy (https://arxiv.org/abs/2507.18071, section 5.3), R3 that of the
rollout (https://arxiv.org/abs/2510.11370). https://arxiv.org/abs/2512.01374 compares them.
"""

import dataclasses

from jaxrl.config.checks.algorithm import router_replay_errors
from jaxrl.config.keys import RunConfig
from jaxrl.config.schema import to_dict
from jaxrl.models.config import DecoderConfig
from jaxrl.models.router_replay import routing_shape


def with_router_replay(
    cfg: RunConfig, decoder: DecoderConfig, platform: str
) -> tuple[RunConfig, str]:
    """(the run with R2, R3 or off, why "auto" was resolved so; "" if it was not "auto").

    Raises ValueError for a model without experts whose run sets R2 or R3.
    """
    mode, reason = cfg.learner.router_replay, ""
    if mode == "auto":
        mode, reason = _automatic(cfg, decoder, platform)
    elif mode != "off":
        routing_shape(decoder)
    learner = dataclasses.replace(cfg.learner, router_replay=mode)
    return dataclasses.replace(cfg, learner=learner), reason


def _automatic(cfg: RunConfig, decoder: DecoderConfig, platform: str) -> tuple[str, str]:
    """(R3 or off, the reason)."""
    if not decoder.expert_layers:
        return "off", "the model has no experts"
    found = rollout_differences(cfg, platform)
    if not found:
        return "off", "rollout and training compute the same"
    if errors := router_replay_errors(cfg, "R3"):
        return "off", "; ".join(errors)
    return "R3", "; ".join(found)


def rollout_differences(cfg: RunConfig, platform: str) -> list[str]:
    """Settings with which the rollout may choose other experts than training."""
    rollout, schedule = cfg.rollout, cfg.schedule
    found = [] if platform == "cpu" else [f"rollout and training have other kernels on {platform}"]
    settings = {
        "rollout.dtype": (rollout.dtype, "auto"),
        "rollout.kv_dtype": (rollout.kv_dtype, "auto"),
        "rollout.tensor": (rollout.tensor, 0),
        "rollout.expert": (rollout.expert, 0),
        "learner.matmul_dtype": (cfg.learner.matmul_dtype, "auto"),
        "schedule.mode": (schedule.mode, "sync"),
        "schedule.rollout_devices": (schedule.rollout_devices, 0),
        "schedule.rollout_workers": (schedule.rollout_workers, 0),
    }
    settings |= {
        f"mesh.{axis}": (size, 1)
        for axis, size in to_dict(cfg.mesh).items()
        if axis in ("tensor", "expert", "sequence", "stage")
    }
    return found + [f"{key}={value!r}" for key, (value, same) in settings.items() if value != same]
