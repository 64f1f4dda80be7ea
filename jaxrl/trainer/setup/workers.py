"""Connects a run to Ray, and starts its rollout workers (schedule.rollout_workers)."""

import contextlib
from types import ModuleType

import jax

from jaxrl.config.accelerators import resources
from jaxrl.config.keys import RunConfig
from jaxrl.data.tokenizer import stop_ids
from jaxrl.layout import worker_layout
from jaxrl.rollout.remote.actors import RayActors
from jaxrl.rollout.remote.pool import WorkerPool
from jaxrl.rollout.remote.weights import RemoteWeights
from jaxrl.rollout.remote.work import Settings, model_digest
from jaxrl.runtime.ray_cluster import connect, import_ray
from jaxrl.trainer.setup.devices import Policy, Session
from jaxrl.trainer.setup.models import Models
from sharding import make_mesh


def connect_to_workers(cfg: RunConfig) -> ModuleType | None:
    """Ray, connected to its cluster; None if the run has no rollout workers.

    Raises ValueError if Ray is absent or its cluster cannot be reached.
    """
    if not cfg.schedule.rollout_workers:
        return None
    user = f"config.schedule.rollout_workers={cfg.schedule.rollout_workers}"
    ray = import_ray(user, "set config.schedule.rollout_devices instead")
    try:
        connect(ray)
    except ConnectionError as error:
        raise ValueError(
            f"{user}: no Ray cluster answers ({error}); set RAY_ADDRESS to that of `ray start`, or "
            "unset it to start one on this host"
        ) from error
    return ray


def make_workers(
    cfg: RunConfig,
    ray: ModuleType,
    models: Models,
    policy: Policy,
    session: Session,
    stack: contextlib.ExitStack,
) -> tuple[RemoteWeights, WorkerPool]:
    """Starts the rollout workers. Returns what publishes weights for them, and their pool.

    `stack` ends them.
    """
    layout = worker_layout(cfg, policy.decoder, policy.dtype, make_mesh())
    settings = Settings(
        cfg=cfg,
        decoder=policy.decoder,
        dtype=policy.dtype,
        eos_ids=stop_ids(models.folders.policy, models.renderer.tokenizer),
        platform=jax.default_backend(),
        model=model_digest(layout.abstract_weights(policy.decoder, make_mesh())),
    )
    schedule = cfg.schedule
    cache = {"JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir)}
    n_workers, max_workers = schedule.n_workers
    pool = WorkerPool(
        RayActors(ray, settings, resources(schedule.worker_accelerator), cache),
        n_workers=n_workers,
        max_workers=max_workers,
        timeout_s=schedule.worker_timeout_s,
        report=session.progress.status,
        check=session.stop.check_local,
    )
    stack.callback(pool.close)
    return RemoteWeights(layout, ray.put, delta=schedule.weight_transfer == "delta"), pool
