"""The platform that programs are compiled for, read from the mesh, not from this machine."""

import jax


def target_platform() -> str:
    """ "cpu", "gpu" or "tpu": the platform of the current mesh, or of the default backend.

    Implementations are chosen by this platform, so a program that is compiled here for devices
    elsewhere gets the implementation that is best there.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    name = jax.default_backend() if device is None else device.platform
    return "gpu" if name in ("cuda", "rocm") else name


def target_device_kind() -> str:
    """JAX's name ("TPU v5 lite") of the chip of the current mesh, or of the default device."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.devices()[0].device_kind if device is None else device.device_kind


def needs_trial_run() -> bool:
    """Whether a compiled program should run once on padding before its first use.

    On accelerators this loads the program and shows before the first rollout that its memory does
    not suffice. On CPU neither is needed, and the run takes seconds.
    """
    return target_platform() != "cpu"
