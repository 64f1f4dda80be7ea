"""Plain Python functions as tools, with an answer that a reward function judges."""

from collections.abc import Callable
from typing import Any

from jaxrl.config.plugins import load_plugin
from jaxrl.environments.api import KEY
from jaxrl.environments.builtin.answers import Answers


class Functions(Answers):
    """Offers functions to the model; a turn without a call is the answer and ends the episode.

    `names` are import paths, "package.module:function" or "path/to/file.py:function", joined by
    commas. `reward` and `system` are as in `Answers`.
    """

    def __init__(self, names: str, *, reward: str = "", system: str = ""):
        super().__init__(reward=reward, system=system)
        self.tools: list[Callable[..., Any]] = [
            load_plugin(name, built_in={}, key=KEY) for name in names.split(",") if name
        ]
        if not self.tools:
            raise ValueError("names is empty; set it to the import paths of functions")
