"""Configuration of a run: what a config file imports."""

from jaxrl.config.keys import RunConfig
from jaxrl.config.resolve import default_config, resolve

__all__ = ["RunConfig", "default_config", "resolve"]
