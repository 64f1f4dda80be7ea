"""Rules between the mesh, the meshes of other roles, and what they shard."""

import math

from jaxrl.config.checks.batch import one_or_all
from jaxrl.config.choices import REMATS_OF_1F1B
from jaxrl.config.keys import MeshConfig, RunConfig
from jaxrl.config.schema import to_dict

RING_BLOCK_LEN = 64  # tokens per block of ring attention; other chunk lengths would be padded


def mesh_errors(mesh: MeshConfig, n_devices: int | None) -> list[str]:
    """One line per error in the mesh sizes, and in their product if `n_devices` is known."""
    sizes = to_dict(mesh)
    errors = [
        f"mesh.{axis}=0 is no size; set 1 for an unused axis"
        for axis, size in sizes.items()
        if size == 0
    ]
    open_axes = [axis for axis, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        errors.append(
            f"mesh.{' and mesh.'.join(open_axes)} are -1; give all but one of them a size"
        )
    if errors or n_devices is None:
        return errors
    fixed = math.prod(size for size in sizes.values() if size > 0)
    if n_devices % fixed or (not open_axes and fixed != n_devices):
        used = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size != 1)
        needs = f"a multiple of {fixed}" if open_axes else str(fixed)
        errors.append(
            f"the mesh ({used or 'all axes 1'}) needs {needs} devices but there are {n_devices}; "
            f"change the sizes so that their product is {n_devices}, or set one to -1 to take the "
            "remaining devices"
        )
    return errors


def sharding_errors(run: RunConfig, n_devices: int | None) -> list[str]:
    """One line per mesh of a role that does not divide the rows, the layers or the devices.

    Covers `mesh`, `score`, `ref`, `critic.mesh` and `reward_model.mesh`. Row lengths over an open
    axis (-1) are checked only if `n_devices` is known.
    """
    sizes = to_dict(run.mesh)
    if n_devices is not None:
        rest = n_devices // math.prod(size for size in sizes.values() if size > 0)
        sizes = {axis: rest if size == -1 else size for axis, size in sizes.items()}
    errors = _ulysses_errors(run) + _role_errors(run, "mesh", sizes) + _schedule_errors(run, sizes)
    critic, reward_model = run.critic, run.reward_model
    roles = (
        ("score", run.score, run, 0),
        ("ref", run.ref, run, 0),
        ("critic.mesh", critic.mesh, run.critic_run, critic.token_budget),
        ("reward_model.mesh", reward_model.mesh, run.reward_model_run, reward_model.token_budget),
    )
    for name, role, role_run, token_budget in roles:
        changed = {axis: size for axis, size in to_dict(role).items() if size and axis in sizes}
        if changed or token_budget:
            errors += _role_errors(role_run, name, sizes | changed)
        kept_axes = ("stage", "expert", "sequence", "tensor")
        kept = math.prod(changed.get(axis, sizes[axis]) for axis in kept_axes)
        if changed and not errors and n_devices is not None and n_devices % kept:
            shown = ", ".join(f"{name}.{axis}={size}" for axis, size in changed.items())
            errors.append(
                f"{shown} with the other sizes of mesh needs a multiple of {kept} devices but "
                f"there are {n_devices}; set sizes that divide {n_devices}"
            )
    return errors


def _ulysses_errors(run: RunConfig) -> list[str]:
    learner, sequence = run.learner, run.mesh.sequence
    size = learner.ulysses_size
    if size == 1:
        return []
    if learner.sequence_parallel != "ring":
        return [
            f"learner.ulysses_size={size} groups the devices of a ring, but learner."
            f"sequence_parallel={learner.sequence_parallel!r}; set 'ring', or ulysses_size=1"
        ]
    if sequence > 0 and sequence % size:
        return [
            f"learner.ulysses_size={size} does not divide mesh.sequence={sequence}; set a divisor"
        ]
    return []


def _role_errors(run: RunConfig, section: str, sizes: dict[str, int]) -> list[str]:
    """Errors of one role: unsupported pipeline settings, and rows that do not divide evenly."""
    learner = run.learner
    errors = _stage_errors(run, section, sizes) if sizes["stage"] not in (0, 1) else []
    sequence, stage = max(sizes["sequence"], 1), max(sizes["stage"], 1)
    n = sequence * stage
    if errors or n <= 1:
        return errors
    ring = sequence > 1 and learner.sequence_parallel == "ring"
    places = sequence // math.gcd(learner.ulysses_size, sequence)
    unit = math.lcm(2 * RING_BLOCK_LEN * places, n) if ring else n
    indivisible = sorted({row_len for _, row_len in learner.shapes if row_len % unit})
    if not indivisible:
        return []
    used = {axis: sizes[axis] for axis in ("stage", "sequence") if sizes[axis] > 1}
    shown = " x ".join(f"{section}.{axis}={size}" for axis, size in used.items())
    owner = section.removesuffix(".mesh") if section.endswith(".mesh") else "learner"
    source = "learner.buckets" if learner.buckets else f"{owner}.token_budget"
    return [
        f"{source}={one_or_all(learner.row_lens)} with learner.halvings={learner.halvings} makes "
        f"rows of {', '.join(map(str, indivisible))} tokens, which {shown} devices "
        f"cannot share{' in a ring' if ring else ''}; make {source} a multiple of {unit}, and set "
        "learner.halvings=0 if its halves are not"
    ]


def _stage_errors(run: RunConfig, section: str, sizes: dict[str, int]) -> list[str]:
    errors, stage = [], f"{section}.stage={sizes['stage']}"
    if run.model.layers == "list":
        errors.append(
            f"{stage} splits stacked layers, but model.layers='list'; set 'auto' or 'stacked'"
        )
    return errors


def _schedule_errors(run: RunConfig, sizes: dict[str, int]) -> list[str]:
    """1F1B needs stages, and a remat policy that keeps the same activations of every layer."""
    if run.learner.pipeline_schedule == "gpipe":
        return []
    remats = {}
    if sizes["stage"] != 1:
        remats["learner.remat"] = run.learner.remat
    if run.has_critic and not run.critic.shared and run.critic_run.mesh.stage != 1:
        key = "critic.remat" if run.critic.remat else "learner.remat"
        remats[key] = run.critic_run.learner.remat
    schedule = f"learner.pipeline_schedule={run.learner.pipeline_schedule!r}"
    if not remats:
        return [
            f"{schedule} orders the micro-batches of pipeline stages, but mesh.stage=1; set "
            "mesh.stage, or 'gpipe'"
        ]
    return [
        f"{schedule} keeps the same activations of all layers, but {key}={spec!r}; set one of "
        f"{', '.join(REMATS_OF_1F1B)} without options, or pipeline_schedule='gpipe'"
        for key, spec in remats.items()
        if spec not in REMATS_OF_1F1B
    ]


def mesh_warnings(run: RunConfig) -> list[str]:
    """Warns of a pipeline whose micro-batches have fewer rows than it needs to stay busy."""
    rows, stages = max(rows for rows, _ in run.learner.shapes), run.mesh.stage
    if stages <= 1 or rows >= 2 * stages:
        return []
    return [
        f"mesh.stage={stages} pipeline stages are idle part of the time: with {rows} rows per rank "
        f"they are busy {rows / (rows + stages - 1):.0%} of it; raise learner.token_budget, or "
        "set shorter learner.buckets"
    ]
