"""Opens the process group and the devices of a run; checks that the run fits their memory."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.config.checks.memory import offload_keys
from jaxrl.config.keys import RunConfig
from jaxrl.config.resolve import check_devices
from jaxrl.layout import split_devices, training_mesh
from jaxrl.learner.router import check_balanced, check_correction
from jaxrl.learner.xla import check_options
from jaxrl.models.config import DecoderConfig, for_platform
from jaxrl.models.decoder import decoder_specs
from jaxrl.models.lora import split, with_adapters
from jaxrl.models.spec import count_params
from jaxrl.planner.check import (
    attached_job,
    attached_plan,
    check_plan,
    cpu_time_line,
    device_memory,
    plan_line,
)
from jaxrl.planner.plan import Plan
from jaxrl.planner.programs import Lengths, OfflineWorkload
from jaxrl.planner.sizes import Job
from jaxrl.runtime.backend import open_backend
from jaxrl.runtime.host_memory import keep_freed_memory, physical_memory
from jaxrl.runtime.multihost import check_all_joined
from jaxrl.tracking.progress import Progress
from jaxrl.trainer.memory import explain_out_of_memory
from jaxrl.trainer.setup.host import HostSide
from sharding import check_host_memory, hosts


@dataclasses.dataclass(frozen=True)
class Policy:
    """The policy's configuration on the devices of the run."""

    decoder: DecoderConfig  # "auto" values resolved
    dtype: jnp.dtype  # of the weights
    rollout_devices: Sequence[Any] = ()  # of this process, if they are not training's


def open_policy(host: HostSide) -> Policy:
    """Opens the backend and sets the mesh of training.

    Raises ValueError if the compiler does not know an option of config.learner.xla.
    """
    session, cfg, stack = host.session, host.session.cfg, host.session.stack
    dtype, decoder = start_devices(cfg, host.models.decoder, session.progress)
    mesh = training_mesh(cfg)
    stack.enter_context(jax.set_mesh(mesh))
    check_options(cfg.learner.xla)
    rollout = split_devices(cfg, jax.devices())[1]
    if rollout and mesh.is_multi_process:
        stack.enter_context(hosts.exchange_on(mesh.devices.flatten().tolist()))
    shape = " x ".join(f"{axis} {n}" for axis, n in mesh.shape.items() if n > 1) or "1"
    where = f" in {n} processes" if (n := hosts.n_processes()) > 1 else ""
    kind = jax.devices()[0].device_kind
    more = f", rollout on {len(rollout) * hosts.n_processes()} more" if rollout else ""
    session.progress.status(f"mesh {shape} of {kind} ({jax.default_backend()}){where}{more}")
    return Policy(decoder, dtype, rollout)


def open_plan(
    host: HostSide, policy: Policy, workload: OfflineWorkload | None = None
) -> Plan | None:
    """The plan of the run; None if plan_check is off or the devices do not report their memory.

    From now on running out of device memory is explained with it. `workload` is that of offline
    training. Raises ValueError if the run does not fit.
    """
    session, cfg = host.session, host.session.cfg
    roles = host.models.folders.other_configs() if workload is None else None
    memory, plan = device_memory(), None
    job = attached_job(
        cfg,
        policy.decoder,
        memory or physical_memory(),
        roles,
        workload,
        host.models.tower,
    )
    if cfg.plan_check and memory is not None:
        with session.progress.waiting("planning: compiling all programs"):
            plan = check_plan(job)
        session.progress.status(plan_line(plan))
    session.stack.enter_context(
        explain_out_of_memory(cfg.run_path, lambda: plan or attached_plan(job))
    )
    if workload is None:
        report_cpu_time(host, job)
    return plan


def report_cpu_time(host: HostSide, job: Job) -> None:
    """Shows the rough time of a step of RL if this process alone runs it on CPUs."""
    cfg, iterator = host.session.cfg, host.iterator
    alone = hosts.n_processes() == 1 and cfg.schedule.mode == "sync"
    if jax.default_backend() != "cpu" or not alone or iterator is None:
        return
    prompt_len = float(np.mean([len(prompt.tokens) for prompt in iterator.items]))
    lengths = Lengths(max(round(prompt_len), 1), cfg.data.max_response_len)
    host.session.progress.status(cpu_time_line(dataclasses.replace(job, lengths=lengths)))


def check_attached_devices(cfg: RunConfig, backend: str) -> None:
    """Raises ValueError if the meshes do not fit the opened devices, and names CPUs as such."""
    try:
        check_devices(cfg, jax.device_count(), jax.process_count())
    except ValueError as error:
        if backend != "cpu":
            raise
        raise ValueError(
            f"{error}\nThe devices here are CPUs. For a config for TPUs or GPUs, `jaxrl doctor` "
            "shows why JAX does not use them"
        ) from error


def start_devices(
    cfg: RunConfig, decoder: DecoderConfig, progress: Progress
) -> tuple[jnp.dtype, DecoderConfig]:
    """Opens the backend. Returns (dtype, decoder) with "auto" values resolved for its platform."""
    backend = open_backend()
    check_all_joined()
    check_attached_devices(cfg, backend)
    if keys := offload_keys(cfg):
        check_host_memory(keys)
    if backend == "cpu":
        keep_freed_memory()
    dtype, decoder = for_platform(cfg, decoder, backend)
    decoder = with_adapters(cfg.lora, decoder)
    check_balanced(cfg, decoder)
    check_correction(cfg.learner.router_bias_rate, decoder)
    specs = decoder_specs(dataclasses.replace(decoder, base_dtype=""))
    n_params, n_trained = count_params(specs), count_params(split(specs)[0])
    trained = "" if decoder.lora is None else f", {n_trained / 1e6:.2f} M of them trained"
    progress.status(
        f"model {cfg.model.path}: {decoder.family}, {n_params / 1e6:.1f} M parameters{trained}, "
        f"{dtype}"
    )
    return dtype, decoder
