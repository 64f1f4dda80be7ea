"""State that learner.offload keeps in host memory between uses."""

from collections.abc import Mapping

from jaxrl.config.keys import RunConfig

# Weights in `RunPrograms.resident` that learner.offload keeps in host memory between uses.
IDLE_STATE = {
    "policy": ("params", "base"),
    "reference": ("ref",),
    "critic": ("critic", "critic_base"),
    "reward_model": ("reward_model",),
}


def state_before_offload(resident: Mapping[str, int], on_host: Mapping[str, int]) -> int:
    """Bytes on a device when the rollout's copy is made, before the policy is offloaded."""
    idle = set(on_host) - set(IDLE_STATE["policy"])
    return sum(n_bytes for name, n_bytes in resident.items() if name not in idle)


def host_state(
    cfg: RunConfig, resident: Mapping[str, int], updates: Mapping[str, int]
) -> dict[str, int]:
    """Bytes per device of all state in host memory: of the updates, and of idle roles."""
    found = dict(updates)
    for role in cfg.learner.offload:
        found |= {name: resident.get(name, 0) for name in IDLE_STATE.get(role, ())}
    return {name: n_bytes for name, n_bytes in found.items() if n_bytes}
