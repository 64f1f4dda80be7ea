"""An environment of verifiers as an agent: its harness calls the endpoint, its tasks score."""

import itertools
import math
from typing import Any

from jaxrl.data.sources.verifiers_tasks import import_verifiers, open_environment
from jaxrl.environments.api import VERIFIERS_KEY


class VerifiersAgent:
    """Plays one task of a taskset; an agent function (base_url, api_key, task).

    The tasks of a taskset that ends are read once, when the object is made. Raises ImportError if
    verifiers is missing, ValueError if the taskset cannot be loaded.
    """

    def __init__(self, spec: str):
        self._where = f"{VERIFIERS_KEY}={spec!r}"
        self._verifiers = import_verifiers(self._where)
        self._env = open_environment(spec, self._where)
        self._tasks = list(self._env.taskset) if self._env.taskset.bounded else self._env.taskset

    async def __call__(self, base_url: str, api_key: str, task: dict[str, Any]) -> dict[str, Any]:
        """The reward and the metrics of an episode. Raises RuntimeError if it failed."""
        vf, chosen = self._verifiers, self._find(task["extra"].get("verifiers"))
        client = vf.EvalClientConfig(base_url=base_url, api_key_var="OPENAI_API_KEY")
        context = vf.ModelContext(model="policy", client=client)
        async with self._env.serving():
            [slot] = self._env.slots(chosen)
            episode = await self._env.run_slot(slot, context)
        if not episode.ok:
            errors = [*episode.errors, *(e for trace in episode.traces for e in trace.errors)]
            raise RuntimeError(f"verifiers: {reason(errors[-1]) if errors else 'no reason given'}")
        [trace] = episode.traces
        return {"reward": trace.reward} | {
            name: value
            for name, value in trace.metrics.items()
            if name != "reward" and value is not None and math.isfinite(value)
        }

    def _find(self, row: Any) -> Any:
        """The task of a row of the data. Raises ValueError if it is not one of the taskset."""
        match row:
            case {"place": int(place), "hash": str(digest)} if place >= 0:
                found = next(itertools.islice(self._tasks, place, None), None)
                if found is not None and found.hash == digest:
                    return found
        raise ValueError(
            f"{self._where} has no such task as the row of the data; set data.train and data.val "
            "to 'verifiers:ID' with the same id and options"
        )


def reason(error: Any) -> str:
    """The type of an error of verifiers, with the first and the last line of its message.

    The message may be the output of a program, which ends with the cause.
    """
    lines = [line for line in error.message.splitlines() if line.strip()] or [""]
    return f"{error.type}: {lines[0]}" + (f" ... {lines[-1]}" if len(lines) > 1 else "")
