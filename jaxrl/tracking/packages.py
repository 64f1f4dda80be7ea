"""Packages of loggers, which are extras and are imported only if they are used."""

import importlib
import importlib.util
from types import ModuleType

from jaxrl.config.packages import install_advice


class MissingPackage(ValueError):
    """The package of a configured logger is not installed."""


def require_package(module: str, extra: str) -> ModuleType:
    """Imports a module. Raises MissingPackage with the extra to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise missing(module, extra, f"cannot be imported ({error})") from error


def check_package(module: str, extra: str) -> None:
    """Raises MissingPackage, without importing the module, if it is not installed."""
    if importlib.util.find_spec(module) is None:
        raise missing(module, extra, "is not installed")


def missing(module: str, extra: str, reason: str) -> MissingPackage:
    key = "log.prometheus_port" if extra == "prometheus" else "log.loggers"
    return MissingPackage(
        f"the logger {extra!r} needs the package {module}, which {reason}; install it with "
        f"{install_advice(extra)}; or change config.{key}"
    )
