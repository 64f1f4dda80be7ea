"""The smallest config that resolves, for the tests of this folder."""

import pytest
from ml_collections import ConfigDict

from jaxrl.config import default_config, resolve


def runnable(**changes) -> ConfigDict:
    """The defaults with a model and data; `changes` are dotted keys with __ for dots."""
    config = default_config()
    config.model.path = "somewhere"
    config.data.train = ("task:addition",)
    config.data.max_prompt_len = 64
    for name, value in changes.items():
        *sections, last = name.split("__")
        section = config
        for part in sections:
            section = section[part]
        section[last] = value
    return config


def complaint(config, **kwargs) -> str:
    with pytest.raises(ValueError) as error:
        resolve(config, **kwargs)
    return str(error.value)
