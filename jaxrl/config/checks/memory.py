"""Rules of recomputation, offload, token budgets of roles, and the dtype of products."""

import importlib.util

from jaxrl.config.keys import RunConfig
from jaxrl.config.packages import install_advice
from jaxrl.config.remat import parse_remat, read_remat


def memory_errors(run: RunConfig) -> list[str]:
    """One line per broken rule, with the values and what to set instead."""
    return [
        *_remat_errors(run),
        *_offload_errors(run),
        *_zero_errors(run),
        *_budget_errors(run),
        *_matmul_errors(run),
    ]


def offload_keys(run: RunConfig) -> str:
    """The settings that keep arrays in host memory, with their values; "" if there are none."""
    found = [f"config.learner.offload={run.learner.offload}"] if run.learner.offload else []
    found += [
        f"config.{key}={spec!r}" for key, spec in _remats(run).items() if parse_remat(spec).offloads
    ]
    return " and ".join(found)


def _remats(run: RunConfig) -> dict[str, str]:
    """The policies that are set, by key."""
    found = {"learner.remat": run.learner.remat, "critic.remat": run.critic.remat}
    return {key: spec for key, spec in found.items() if spec or key == "learner.remat"}


def _remat_errors(run: RunConfig) -> list[str]:
    errors = []
    for key, spec in _remats(run).items():
        remat, wrong = read_remat(spec)
        errors += [f"{key}={line}" for line in wrong]
        if remat.offloads and run.model.layers == "list":
            errors.append(
                f"{key}={spec!r} needs stacked layers, but model.layers='list'; set 'auto' or "
                "'stacked'"
            )
    return errors


def _offload_errors(run: RunConfig) -> list[str]:
    """Weights of a role can be in host memory only if the run has the role, and it is idle."""
    separate = run.has_critic and not run.critic.shared
    absent = {
        "critic": "" if separate else "has no separate critic",
        "reward_model": "" if run.reward_model.path else "has no reward_model.path",
        "judge": "" if run.reward.judge.path else "has no reward.judge.path",
    }
    errors = [
        f"learner.offload={run.learner.offload}, but the run {absent[role]}; leave out {role!r}"
        for role in run.learner.offload
        if absent.get(role)
    ]
    if "policy" in run.learner.offload and run.schedule.mode != "sync":
        errors.append(
            f"learner.offload={run.learner.offload} with schedule.mode={run.schedule.mode!r}: the "
            "policy is idle in synchronous rollouts only; leave out 'policy', or set "
            "schedule.mode='sync'"
        )
    elif "policy" in run.learner.offload and not run.rollout.release_kv:
        errors.append(
            f"learner.offload={run.learner.offload} frees the policy's memory during a rollout "
            "only, so the KV pages can use it only if they are allocated then; set "
            "rollout.release_kv=True, or leave out 'policy'"
        )
    return errors


def _zero_errors(run: RunConfig) -> list[str]:
    if not run.learner.zero or run.mesh.replica != 1:
        return []
    return [
        f"learner.zero={run.learner.zero} shards training state over mesh.replica, but "
        "mesh.replica=1: mesh.fsdp shards all of it already; set learner.zero=0, or mesh.replica"
    ]


def _budget_errors(run: RunConfig) -> list[str]:
    """Scoring joins whole micro-batches of the update."""
    unit, errors = run.learner.token_budget, []
    for name, budget in (("score", run.score.token_budget), ("ref", run.ref.token_budget)):
        if budget % unit:
            errors.append(
                f"{name}.token_budget={budget} is not a multiple of learner.token_budget={unit}; "
                f"set {-(-budget // unit) * unit}, or 0 for the same"
            )
    return errors


def _matmul_errors(run: RunConfig) -> list[str]:
    kind, errors = run.learner.matmul_dtype, []
    if kind == "auto":
        return errors
    if importlib.util.find_spec("qwix") is None:
        errors.append(
            f"learner.matmul_dtype={kind!r} needs the package qwix; install it with "
            f"{install_advice('qwix')}; or set 'auto'"
        )
    if run.lora.base_dtype != "auto":
        errors.append(
            f"learner.matmul_dtype={kind!r} with lora.base_dtype={run.lora.base_dtype!r}: the "
            "weights are quantized already; set one of them to 'auto'"
        )
    return errors
