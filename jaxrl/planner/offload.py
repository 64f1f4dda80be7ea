"""State that learner.offload keeps in host memory, and the programs that need it on the devices."""

from collections.abc import Collection, Mapping

from jaxrl.config.keys import RunConfig
from jaxrl.learner.requirements import full_kl_in_loss
from jaxrl.learner.step import Update
from jaxrl.types import TrainState
from sharding import host_bytes_per_device

ENGINE_PROGRAMS = ("prefill", "mixed", "copy_pages", "decode")
CRITIC_PROGRAMS = ("values", "critic_accumulate", "critic_apply")
# Weights in `RunPrograms.resident` that learner.offload keeps in host memory between uses.
IDLE_STATE = {
    "policy": ("params", "base"),
    "reference": ("ref",),
    "critic": ("critic", "critic_base"),
    "reward_model": ("reward_model",),
}


def uses_weights(cfg: RunConfig, program: str, role: str) -> bool:
    """Whether a program needs the weights of an offloaded role on the devices."""
    if role == "policy":
        return program not in ENGINE_PROGRAMS
    if role == "critic":
        return program in CRITIC_PROGRAMS
    if role == "reference" and program in ("count", "accumulate", "apply"):
        return full_kl_in_loss(cfg)
    return program == role


def n_transfers(cfg: RunConfig, programs: Collection[str], role: str) -> int:
    """Copies of a role's weights, from or to host memory, in a phase with these programs."""
    if role == "policy":  # to the host and back around a rollout
        return 2 * ("decode" in programs)
    used = any(uses_weights(cfg, name, role) for name in programs)
    return used + ("critic_apply" in programs and role == "critic")


def state_before_offload(resident: Mapping[str, int], on_host: Mapping[str, int]) -> int:
    """Bytes on a device when the rollout's copy is made, before the policy is offloaded."""
    idle = set(on_host) - set(IDLE_STATE["policy"])
    return sum(n_bytes for name, n_bytes in resident.items() if name not in idle)


def add_host_state(host: dict[str, int], name: str, state: TrainState, update: Update) -> None:
    """Adds the bytes of optimizer state and summed gradients that an update has in host memory."""
    host[name] = host_bytes_per_device(state.opt_state)
    sums = host_bytes_per_device(update.abstract_zeros(state.params).grads)
    host["gradients"] = max(host.get("gradients", 0), sums)  # the updates take turns


def host_state(
    cfg: RunConfig, resident: Mapping[str, int], updates: Mapping[str, int]
) -> dict[str, int]:
    """Bytes per device of all state in host memory: of the updates, and of idle roles."""
    found = dict(updates)
    for role in cfg.learner.offload:
        found |= {name: resident.get(name, 0) for name in IDLE_STATE.get(role, ())}
    return {name: n_bytes for name, n_bytes in found.items() if n_bytes}
