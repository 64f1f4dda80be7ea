"""Starts the rollout workers of a run on Ray (schedule.rollout_workers)."""

from types import ModuleType

import jax
from jax.sharding import Mesh

from jaxrl.config.accelerators import resources
from jaxrl.data.tokenizer import stop_ids
from jaxrl.layout import worker_layout
from jaxrl.rollout.engines import workers_of_process
from jaxrl.rollout.remote.actors import RayActors
from jaxrl.rollout.remote.groups import WorkerGroups
from jaxrl.rollout.remote.pool import WorkerPool
from jaxrl.rollout.remote.weights import RemoteWeights
from jaxrl.rollout.remote.work import WorkerSettings, model_digest
from jaxrl.trainer.setup.devices import Policy
from jaxrl.trainer.setup.host import HostSide
from sharding import Resharding, make_mesh, process_mesh_sizes, reshape_mesh


def make_workers(
    ray: ModuleType, host: HostSide, policy: Policy
) -> tuple[RemoteWeights, WorkerPool]:
    """Starts the rollout workers. Returns what publishes weights for them, and their pool.

    The stack of the session ends them.
    """
    session, cfg, models = host.session, host.session.cfg, host.models
    device = make_mesh(jax.local_devices()[:1])
    layout = worker_layout(cfg, policy.decoder, policy.dtype, device)
    settings = WorkerSettings(
        cfg=cfg,
        decoder=policy.decoder,
        dtype=policy.dtype,
        eos_ids=stop_ids(models.folders.policy, models.renderer.tokenizer),
        platform=jax.default_backend(),
        model=model_digest(layout.abstract_weights(policy.decoder, device)),
        tower=models.tower,
    )
    cache = {"JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir)}
    n_workers, max_workers = workers_of_process(cfg)
    reserved = resources(cfg.schedule.worker_accelerator)
    actors = RayActors(ray, settings, reserved, cache)
    if cfg.schedule.hosts_per_worker > 1:
        actors = WorkerGroups(
            actors,
            n_hosts=cfg.schedule.hosts_per_worker,
            distributed=cfg.distributed,
            detects_hosts="TPU" in reserved,
        )
    pool = WorkerPool(
        actors,
        n_workers=n_workers,
        max_workers=max_workers,
        timeout_s=cfg.schedule.worker_timeout_s,
        report=session.progress.status,
        check=session.stop.check_local,
    )
    session.stack.callback(pool.close)
    weights = RemoteWeights(
        layout,
        ray.put,
        delta=cfg.schedule.weight_transfer == "delta",
        gather=gather_to_processes(jax.sharding.get_mesh()),
        publishes=max_workers > 0,
    )
    return weights, pool


def gather_to_processes(mesh: Mesh) -> Resharding | None:
    """The resharding of all arrays of the mesh to each process's devices; None for one process.

    Raises ValueError if the devices of a process are no block of the mesh.
    """
    if not mesh.is_multi_process:
        return None
    try:
        return reshape_mesh(mesh, per_process=True, **process_mesh_sizes(mesh))
    except ValueError as error:
        raise ValueError(
            f"config.schedule.rollout_workers is not possible: {error}, so it cannot gather the "
            "weights for its workers; set config.mesh sizes of which one, such as fsdp or replica, "
            "is a multiple of the number of processes"
        ) from error
