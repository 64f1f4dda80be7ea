"""Choice of an operation's implementation: the named one, or the backend's default, logged once."""

import functools
import logging
import pkgutil
from collections.abc import Callable, Mapping

from sharding import target_platform

log = logging.getLogger(__name__)

# By name: a function, or "module:function" of one that is imported when it is chosen. Pallas takes
# half a second to import, and runs on no CPU.
Implementations = Mapping[str, Callable | str]
Defaults = dict[str, tuple[str, str]]  # backend -> name, and the reason for it

ONLY_ON = {  # kernel -> platform
    "splash": "tpu",
    "ragged": "tpu",
    "mosaic": "tpu",
    "triton": "gpu",
    "cudnn": "gpu",
}
# Part of `device_kind` of GPUs of data centers since Hopper.
SINCE_HOPPER = ("H100", "H200", "H800", "H20", "GH200", "B100", "B200", "B300")


def is_since_hopper(device_kind: str) -> bool:
    """Whether JAX's name of a GPU is one of a data center, of the Hopper generation or newer."""
    return any(chip in device_kind for chip in SINCE_HOPPER)


def choose(
    key: str,
    name: str | None,
    *,
    implementations: Implementations,
    defaults: Defaults,
) -> Callable:
    """The entry of `implementations` called `name`; None and "auto" select the backend's default.

    `key` is the config key that sets the name. `defaults` holds each backend's name and the reason
    for it. Raises ValueError for an unknown name.
    """
    if name is None or name == "auto":
        backend = target_platform()
        name, reason = defaults[backend]
        _log_choice(key, name, backend, reason)
    if name not in implementations:
        known = ", ".join(["auto", *implementations])
        raise ValueError(f"{key}={name!r} is not known; set one of {known}")
    found = implementations[name]
    return pkgutil.resolve_name(found) if isinstance(found, str) else found


def check_kernels(names: Mapping[str, str], platform: str) -> None:
    """Raises ValueError if a kernel does not run on `platform`; `names` are by config key."""
    for key, name in names.items():
        if ONLY_ON.get(name, platform) != platform:
            raise ValueError(
                f"{key}={name!r} runs on {ONLY_ON[name]} and these devices are {platform}; set it "
                "to 'auto'"
            )


def check_platform(key: str, name: str, platform: str) -> None:
    """Raises NotImplementedError unless programs are compiled for `platform`."""
    if (here := target_platform()) != platform:
        raise NotImplementedError(
            f"{key}={name!r} runs on {platform} and these devices are {here}; set it to 'auto'"
        )


@functools.cache
def _log_choice(key: str, name: str, backend: str, reason: str) -> None:
    log.info("%s: %r on %s, %s", key, name, backend, reason)
