"""Rules between the schedule, the algorithm and the processes."""

from collections.abc import Iterable

from jaxrl.config.accelerators import resources
from jaxrl.config.keys import RunConfig
from jaxrl.config.keys.schedule import ScheduleConfig
from jaxrl.config.schema import to_dict

WORKER_KEYS = (
    "max_rollout_workers",
    "hosts_per_worker",
    "worker_accelerator",
    "worker_timeout_s",
    "weight_transfer",
)
ASYNC_ONLY = ("rollout_devices", "rollout_workers", *WORKER_KEYS)


def schedule_errors(run: RunConfig) -> list[str]:
    """One line per broken rule, with the values and what to set instead."""
    schedule = run.schedule
    if schedule.mode == "sync":
        return _unused_errors(schedule)
    return [
        *_bound_errors(schedule),
        *_kv_errors(run),
        *_device_errors(run),
        *_algorithm_errors(run),
    ]


def schedule_warnings(run: RunConfig) -> list[str]:
    """Warns of old responses without an importance correction."""
    schedule, algorithm = run.schedule, run.algorithm
    if schedule.mode == "sync" or schedule.max_staleness <= 1:
        return []
    if algorithm.correction != "none" or algorithm.old_logp == "rollout":
        return []
    return [
        f"schedule.max_staleness={schedule.max_staleness} trains on responses of older policies, "
        "and algorithm.correction='none' treats them as samples of the current one: the gradient "
        "is biased; set algorithm.correction='token_tis'"
    ]


def _changed(schedule: ScheduleConfig, names: Iterable[str]) -> list[str]:
    """The keys that differ from their defaults."""
    values, default = to_dict(schedule), to_dict(ScheduleConfig())
    return [name for name in names if values[name] != default[name]]


def _unused_errors(schedule: ScheduleConfig) -> list[str]:
    return [
        f"schedule.{name}={getattr(schedule, name)!r} has no effect with schedule.mode='sync'; set "
        f"schedule.mode={'async' if name in ASYNC_ONLY else 'partial'!r}, or omit it"
        for name in _changed(schedule, [key for key in to_dict(schedule) if key != "mode"])
    ]


def _bound_errors(schedule: ScheduleConfig) -> list[str]:
    factor, most = schedule.oversample, schedule.max_oversample
    if 0 < factor < 1:
        return [
            f"schedule.oversample={factor:g} is less than the prompts of one step; set 1 or more, "
            "or 0 for as many as schedule.max_staleness allows"
        ]
    if factor > most:
        return [
            f"schedule.oversample={factor:g} keeps prompts in flight for {factor:g} steps, of "
            f"which the last would be older than schedule.max_staleness={schedule.max_staleness}; "
            f"set at most {most}, or a larger schedule.max_staleness"
        ]
    return []


def _kv_errors(run: RunConfig) -> list[str]:
    """Released pages cannot keep the KV of unfinished responses."""
    if not (run.schedule.mode == "partial" and run.schedule.keep_kv and run.rollout.release_kv):
        return []
    return [
        "schedule.keep_kv keeps the KV of unfinished responses during updates, but "
        "rollout.release_kv frees all KV pages before them; set one of them to False"
    ]


def _device_errors(run: RunConfig) -> list[str]:
    """Rules of the devices of mode = "async"."""
    schedule, rollout = run.schedule, run.rollout
    n = schedule.rollout_devices
    if schedule.mode != "async":
        return [
            f"schedule.{name}={getattr(schedule, name)!r} has no effect with schedule.mode="
            f"{schedule.mode!r}, which generates on the devices of training; set "
            "schedule.mode='async', or omit it"
            for name in _changed(schedule, ASYNC_ONLY)
        ]
    if not n and not schedule.rollout_workers:
        return [
            "schedule.mode='async' generates on separate devices; set schedule.rollout_devices to "
            "their number, schedule.rollout_workers for other hosts, or schedule.mode='partial'"
        ]
    tensor, expert = (
        own or mesh
        for own, mesh in ((rollout.tensor, run.mesh.tensor), (rollout.expert, run.mesh.expert))
    )
    errors = [*_worker_errors(schedule), *_host_errors(schedule, tensor, expert)]
    if rollout.layout == "training":
        errors.append(
            "rollout.layout='training' has the mesh of training, but schedule.mode='async' "
            "generates on other devices; set rollout.layout='replicas'"
        )
    if rollout.release_kv:
        errors.append(
            "rollout.release_kv frees memory for training, but schedule.mode='async' trains on "
            "other devices; omit it"
        )
    if n and tensor > 0 and expert > 0 and n % (tensor * expert):
        errors.append(
            f"schedule.rollout_devices={n} cannot be divided into replicas of {tensor} x {expert} "
            "devices (tensor x expert); set a multiple, or rollout.tensor and rollout.expert to "
            f"sizes whose product divides {n}"
        )
    return errors


def _worker_errors(schedule: ScheduleConfig) -> list[str]:
    """Rules of rollout workers."""
    n, most = schedule.n_workers
    if not n:
        return [
            f"schedule.{name}={getattr(schedule, name)!r} is for rollout workers; set "
            "schedule.rollout_workers, or omit it"
            for name in _changed(schedule, WORKER_KEYS)
        ]
    errors = []
    if schedule.rollout_devices:
        errors.append(
            f"schedule.rollout_devices={schedule.rollout_devices} and schedule.rollout_workers={n} "
            "are two places to generate; set one of them"
        )
    if most < n:
        errors.append(
            f"schedule.max_rollout_workers={most} is less than schedule.rollout_workers={n}; set "
            f"at least {n}, or 0"
        )
    try:
        resources(schedule.worker_accelerator, "schedule.worker_accelerator")
    except ValueError as error:
        errors.append(str(error))
    return errors


def _host_errors(schedule: ScheduleConfig, tensor: int, expert: int) -> list[str]:
    """Rules of rollout workers that span hosts, with engine replicas of `tensor` x `expert`."""
    n_hosts, accelerator = schedule.hosts_per_worker, schedule.worker_accelerator
    kind, _, count = accelerator.partition(":")
    if n_hosts == 1 or not schedule.rollout_workers:
        return []
    shown = f"schedule.hosts_per_worker={n_hosts} with schedule.worker_accelerator={accelerator!r}"
    if kind == "tpu" and max(schedule.n_workers) > 1:
        return [
            f"{shown} needs the hosts of one slice for each worker, but Ray may give one worker "
            f"hosts of several slices if there are {max(schedule.n_workers)} workers; set "
            "schedule.rollout_workers=1 on a cluster with one free slice"
        ]
    if kind != "gpu" or not count.isdigit() or tensor < 1 or expert < 1:
        return []
    n_devices, replica = n_hosts * int(count), tensor * expert
    if replica <= int(count):
        return [
            f"{shown} has engine replicas of {replica} devices (tensor x expert), which fit on one "
            "host, and would decode all of them in lock-step; set schedule.hosts_per_worker=1 and "
            "more schedule.rollout_workers, or a larger rollout.tensor"
        ]
    if n_devices % replica:
        return [
            f"{shown} has {n_devices} devices, which cannot be divided into engine replicas of "
            f"{tensor} x {expert} devices (tensor x expert); set rollout.tensor and rollout.expert "
            f"to sizes whose product divides {n_devices}"
        ]
    return []


def _algorithm_errors(run: RunConfig) -> list[str]:
    schedule, algorithm = run.schedule, run.algorithm
    if schedule.max_staleness == 0:
        return []
    shown = f"schedule.mode={schedule.mode!r} with schedule.max_staleness={schedule.max_staleness}"
    if algorithm.policy_loss == "policy_gradient" and algorithm.correction == "none":
        return [
            f"{shown} trains on responses of older policies, but algorithm.policy_loss="
            "'policy_gradient' has no importance ratio, so it is only valid on-policy; set "
            "algorithm.correction='token_tis', another policy loss such as 'ppo_clip', or "
            "schedule.max_staleness=0"
        ]
    return []
