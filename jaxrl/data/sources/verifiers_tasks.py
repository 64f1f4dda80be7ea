"""Tasks of verifiers (https://github.com/PrimeIntellect-ai/verifiers), 0.4 and later.

"verifiers:ID?limit=500&option=value" is a data source, and env.verifiers="ID?option=value" plays
its tasks. ID is that of an installed taskset, and other options are the taskset's.
"""

import importlib
import itertools
from typing import Any

from jaxrl.config.packages import install_advice
from jaxrl.config.plugins import options

MAX_TASKS = 10_000  # that are read of a taskset without an end, if the source has no limit
RESERVED = ("limit", "harness", "runtime")  # options that are not the taskset's


def import_verifiers(where: str) -> Any:
    """The module verifiers.v1. Raises ImportError with what to install, for the setting `where`."""
    try:
        return importlib.import_module("verifiers.v1")
    except ImportError as error:
        raise ImportError(
            f"{where} needs verifiers 0.4 or later ({error}); install it with "
            f"{install_advice('verifiers')}"
        ) from error


def open_environment(spec: str, where: str) -> Any:
    """The environment of the taskset that `spec` names, with one agent that the policy plays.

    Its harness is the chat loop "null", its runtime "subprocess", unless the options say otherwise.
    Raises ImportError if the package is missing, ValueError if the environment cannot be made.
    """
    verifiers, given = import_verifiers(where), options(spec)
    taskset = {name: value for name, value in given.items() if name not in RESERVED}
    raw: dict[str, Any] = {"taskset": taskset | {"id": spec.partition("?")[0]}}
    agent = {
        "harness": {"id": given.get("harness", "null")},
        "runtime": {"type": given.get("runtime", "subprocess")},
    }
    try:
        config = verifiers.resolve_env_config(raw)
        roles = [name for name, value in config if isinstance(value, verifiers.AgentConfig)]
        if len(roles) == 1:
            return verifiers.load_environment(verifiers.resolve_env_config(raw | {roles[0]: agent}))
    except Exception as error:  # foreign code
        raise ValueError(
            f"{where} cannot be loaded ({type(error).__name__}: {error}); install the package of "
            "the taskset, and check its id and options"
        ) from error
    raise ValueError(
        f"{where} has {len(roles)} agents ({', '.join(roles)}), and the policy plays one; run it "
        "from an agent function of your own (env.agent)"
    )


def task_rows(source: str) -> list[dict[str, Any]]:
    """The tasks of a "verifiers:" source as rows of a dataset.

    extra_info has the place of each task in the taskset, and its hash. Raises as
    `open_environment`.
    """
    spec = source.removeprefix("verifiers:")
    taskset, limit = open_environment(spec, source).taskset, options(spec).get("limit", 0)
    if type(limit) is not int or limit < 0:
        raise ValueError(f"limit={limit!r} in {source!r} is no number of tasks; write limit=500")
    found = itertools.islice(taskset, limit or (None if taskset.bounded else MAX_TASKS))
    name = spec.partition("?")[0]
    return [
        {
            "prompt": task.data.prompt_text,
            "answer": str(getattr(task.data, "answer", "")),
            "data_source": f"verifiers/{name}",
            "extra_info": {"verifiers": {"place": task.data.idx, "hash": task.hash}},
        }
        for task in found
    ]
