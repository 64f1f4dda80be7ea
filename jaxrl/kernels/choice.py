"""Which implementation of an operation runs: the named one, or the backend's default, said once."""

import functools
import logging
from collections.abc import Callable, Mapping

from sharding import target_platform

log = logging.getLogger(__name__)


def choose(
    key: str,
    name: str | None,
    *,
    built: Mapping[str, Callable],
    planned: Mapping[str, str],
    defaults: Mapping[str, tuple[str, str]],
) -> Callable:
    """The function of `built` that `name` names; None and "auto" mean the default of this backend.

    `key` is the config key that sets the name, `planned` says of names without a function what they
    will be, `defaults` gives each backend's name and the reason for it. Raises ValueError for an
    unknown name and NotImplementedError for a planned one.
    """
    if name is None or name == "auto":
        backend = target_platform()
        name, reason = defaults[backend]
        _say(key, name, backend, reason)
    if name in planned:
        raise NotImplementedError(
            f"{key}={name!r} ({planned[name]}) is not built yet; set it to 'auto' or one of "
            f"{', '.join(built)}"
        )
    if name not in built:
        known = ", ".join(["auto", *built, *planned])
        raise ValueError(f"{key}={name!r} is not known; set one of {known}")
    return built[name]


def check_platform(key: str, name: str, platform: str) -> None:
    """Raises NotImplementedError where programs are compiled for devices that `name` cannot run on."""
    if (here := target_platform()) != platform:
        raise NotImplementedError(
            f"{key}={name!r} runs on {platform} and these devices are {here}; set it to 'auto'"
        )


@functools.cache
def _say(key: str, name: str, backend: str, reason: str) -> None:
    log.info("%s: %r on %s, %s", key, name, backend, reason)
