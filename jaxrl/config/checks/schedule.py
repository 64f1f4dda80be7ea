"""Rules between the schedule, the algorithm and the processes."""

from jaxrl.config.keys import RunConfig
from jaxrl.config.keys.schedule import ScheduleConfig
from jaxrl.config.schema import to_dict


def schedule_errors(run: RunConfig) -> list[str]:
    """One line per broken rule, with the values and what to set instead."""
    schedule = run.schedule
    if schedule.mode == "sync":
        return _unused_errors(schedule)
    return [
        *_bound_errors(schedule),
        *_device_errors(run),
        *_algorithm_errors(run),
        *_rollout_errors(run),
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


def _unused_errors(schedule: ScheduleConfig) -> list[str]:
    values, default = to_dict(schedule), to_dict(ScheduleConfig())
    return [
        f"schedule.{name}={value!r} has no effect with schedule.mode='sync'; set "
        f"schedule.mode={'async' if name == 'rollout_devices' else 'partial'!r}, or omit it"
        for name, value in values.items()
        if value != default[name]
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


def _device_errors(run: RunConfig) -> list[str]:
    """Rules of the devices of mode = "async"."""
    n, rollout = run.schedule.rollout_devices, run.rollout
    if run.schedule.mode != "async":
        return [
            f"schedule.rollout_devices={n} has no effect with schedule.mode={run.schedule.mode!r}, "
            "which generates on the devices of training; set schedule.mode='async', or omit it"
        ] * bool(n)
    if not n:
        return [
            "schedule.mode='async' generates on separate devices; set schedule.rollout_devices to "
            "their number, or schedule.mode='partial'"
        ]
    errors = []
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
    if run.data.skip_solved:
        errors.append(
            f"data.skip_solved={run.data.skip_solved:g} needs the rewards of a step before the "
            "next prompts are drawn, but schedule.mode='async' draws them earlier; set "
            "data.skip_solved=0, or schedule.mode='partial'"
        )
    tensor, expert = (
        own or mesh
        for own, mesh in ((rollout.tensor, run.mesh.tensor), (rollout.expert, run.mesh.expert))
    )
    if tensor > 0 and expert > 0 and n % (tensor * expert):
        errors.append(
            f"schedule.rollout_devices={n} cannot be divided into replicas of {tensor} x {expert} "
            "devices (tensor x expert); set a multiple, or rollout.tensor and rollout.expert to "
            f"sizes whose product divides {n}"
        )
    return errors


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


def _rollout_errors(run: RunConfig) -> list[str]:
    if not run.env.episodes:
        return []
    return [
        f"schedule.mode={run.schedule.mode!r} interrupts responses and saves them in the "
        f"checkpoint, which {run.env.episodes!r} does not support: the state of an environment or "
        "agent cannot be saved; set schedule.mode='sync'"
    ]
