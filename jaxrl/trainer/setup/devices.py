"""Opens the process group and the devices of a run; checks that the run fits their memory."""

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.config.checks.memory import offload_keys
from jaxrl.config.keys import RunConfig
from jaxrl.config.resolve import check_devices
from jaxrl.layout import split_devices, training_mesh
from jaxrl.models.config import DecoderConfig, for_platform
from jaxrl.models.decoder import decoder_specs
from jaxrl.models.lora import split, with_adapters
from jaxrl.models.spec import count_params
from jaxrl.planner.check import (
    attached_machine,
    attached_plan,
    check_plan,
    device_memory,
    plan_line,
)
from jaxrl.planner.cpu_time import cpu_time_line
from jaxrl.planner.plan import Plan
from jaxrl.planner.programs import Lengths, OfflineWorkload
from jaxrl.planner.sizes import Job
from jaxrl.runtime.compile_watch import CompileWatch
from jaxrl.runtime.folder_lock import FolderLock
from jaxrl.runtime.host_memory import keep_freed_memory, physical_memory
from jaxrl.runtime.multihost import check_all_joined, join
from jaxrl.runtime.signals import StopFlag
from jaxrl.tracking.loggers import check_loggers
from jaxrl.tracking.progress import Progress
from jaxrl.trainer.memory import explain_out_of_memory
from jaxrl.trainer.setup.folder import hold_folder
from jaxrl.trainer.setup.models import Models
from sharding import check_host_memory, hosts


@dataclasses.dataclass(frozen=True)
class Session:
    """The process-wide services of a run."""

    stop: StopFlag
    progress: Progress
    watch: CompileWatch
    lock: FolderLock | None  # on the run folder; None except in the main process


@dataclasses.dataclass(frozen=True)
class Policy:
    """The policy's configuration on the devices of the run."""

    decoder: DecoderConfig  # "auto" values resolved
    dtype: jnp.dtype  # of the weights
    rollout_devices: Sequence[Any] = ()  # of this process, if they are not those of training


def open_session(cfg: RunConfig, stack: contextlib.ExitStack) -> Session:
    """Joins the process group, locks the run folder and starts progress output."""
    set_compilation_cache(cfg)
    join(cfg)
    with hosts.raise_together():
        check_loggers(cfg.log)
    progress = stack.enter_context(Progress())
    lock = stack.enter_context(hold_folder(cfg, progress))
    watch = CompileWatch(progress.compiled)
    stack.callback(watch.detach)
    progress.status(f"run folder {cfg.run_path}")
    return Session(StopFlag(), progress, watch, lock)


def open_devices(
    cfg: RunConfig, models: Models, session: Session, stack: contextlib.ExitStack
) -> Policy:
    """Opens the backend and sets the mesh of training."""
    dtype, decoder = start_devices(cfg, models.decoder, session.progress)
    mesh = training_mesh(cfg)
    stack.enter_context(jax.set_mesh(mesh))
    rollout = split_devices(cfg, jax.devices())[1]
    if rollout and mesh.is_multi_process:
        stack.enter_context(hosts.exchange_on(mesh.devices.flatten().tolist()))
    shape = " x ".join(f"{axis} {n}" for axis, n in mesh.shape.items() if n > 1) or "1"
    where = f" in {n} processes" if (n := hosts.n_processes()) > 1 else ""
    kind = jax.devices()[0].device_kind
    more = f", rollout on {len(rollout) * hosts.n_processes()} more" if rollout else ""
    session.progress.status(f"mesh {shape} of {kind} ({jax.default_backend()}){where}{more}")
    return Policy(decoder, dtype, rollout)


def checked_plan(
    cfg: RunConfig,
    decoder: DecoderConfig,
    progress: Progress,
    *,
    role_decoders: dict[str, DecoderConfig] | None = None,
    workload: OfflineWorkload | None = None,
) -> Plan | None:
    """The plan of the run; None if plan_check is off or the devices do not report their memory.

    See `check_plan` for `role_decoders` and `workload`. Raises ValueError if the run does not fit.
    """
    memory = device_memory()
    if not cfg.plan_check or memory is None:
        return None
    with progress.waiting("planning: compiling all programs"):
        plan = check_plan(cfg, decoder, memory, role_decoders=role_decoders, workload=workload)
    progress.status(plan_line(plan))
    return plan


def report_cpu_time(
    cfg: RunConfig,
    decoder: DecoderConfig,
    progress: Progress,
    prompt_len: float,
    *,
    role_decoders: dict[str, DecoderConfig] | None = None,
) -> None:
    """Shows the rough time of a step if this process alone runs it on CPUs."""
    alone = hosts.n_processes() == 1 and cfg.schedule.mode == "sync"
    if jax.default_backend() != "cpu" or not alone:
        return
    machine = attached_machine(cfg, device_memory() or physical_memory())
    lengths = Lengths(max(round(prompt_len), 1), cfg.data.max_response_len)
    progress.status(cpu_time_line(Job(cfg, decoder, machine, lengths, role_decoders or {})))


def memory_report(
    cfg: RunConfig,
    decoder: DecoderConfig,
    plan: Plan | None,
    *,
    role_decoders: dict[str, DecoderConfig] | None = None,
    workload: OfflineWorkload | None = None,
) -> contextlib.AbstractContextManager[None]:
    """Explains running out of device memory in the block with `plan`; None makes it then.

    See `explain_out_of_memory`.
    """

    def make_plan() -> Plan:
        memory = device_memory() or physical_memory()
        return attached_plan(cfg, decoder, memory, role_decoders=role_decoders, workload=workload)

    return explain_out_of_memory(cfg.run_path, make_plan if plan is None else lambda: plan)


def set_compilation_cache(cfg: RunConfig) -> None:
    """Sets the folder of the persistent compilation cache. Call before the first compilation."""
    cache = Path(cfg.compilation_cache or "~/.cache/jaxrl/xla").expanduser()
    jax.config.update("jax_compilation_cache_dir", str(cache))


def start_devices(
    cfg: RunConfig, decoder: DecoderConfig, progress: Progress
) -> tuple[jnp.dtype, DecoderConfig]:
    """Opens the backend. Returns (dtype, decoder) with "auto" values resolved for its platform."""
    check_all_joined()
    check_devices(cfg, jax.device_count(), jax.process_count())
    if keys := offload_keys(cfg):
        check_host_memory(keys)
    backend = jax.default_backend()
    if backend == "cpu":
        keep_freed_memory()
    dtype, decoder = for_platform(cfg, decoder, backend)
    decoder = with_adapters(cfg.lora, decoder)
    if cfg.learner.router_aux_coef and not decoder.E:
        raise ValueError(
            f"config.learner.router_aux_coef = {cfg.learner.router_aux_coef} balances experts, but "
            f"this {decoder.family} model has none; set it to 0"
        )
    specs = decoder_specs(dataclasses.replace(decoder, base_dtype=""))
    n_params, n_trained = count_params(specs), count_params(split(specs)[0])
    trained = "" if decoder.lora is None else f", {n_trained / 1e6:.2f} M of them trained"
    progress.status(
        f"model {cfg.model.path}: {decoder.family}, {n_params / 1e6:.1f} M parameters{trained}, "
        f"{dtype}"
    )
    return dtype, decoder
