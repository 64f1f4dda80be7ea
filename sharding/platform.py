"""Where programs run: asked of the mesh, not of the machine that compiles them."""

import jax


def target_platform() -> str:
    """ "cpu", "gpu" or "tpu": the platform of the mesh that is set, else of the default backend.

    A program compiled here for devices that are elsewhere must choose what is best there.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    name = jax.default_backend() if device is None else device.platform
    return "gpu" if name in ("cuda", "rocm") else name
