"""Episodes that outlive a weight update, in environments or of agents."""

import time
from collections.abc import Iterable

from jaxrl.rollout.episodes import EpisodeRunner, PlayedEpisode
from jaxrl.rollout.generate import Response
from jaxrl.rollout.schedule.buffer import PromptGroup
from jaxrl.types import Prompt, Tree


class EpisodeStream[E: PlayedEpisode]:
    """The unfinished episodes of groups. Implements `GroupStream`.

    An episode waits for its environment without a slot of the engine. A turn that the model writes
    during a weight update continues under the new weights with the tokens that it has. An episode
    cannot be saved: the groups of a checkpoint begin again.
    """

    def __init__(self, runner: EpisodeRunner[E], *, n: int, keep_kv: bool = False):
        self.runner, self.engine = runner, runner.engine
        self.n, self.keep_kv = n, keep_kv
        self._episodes: dict[int, tuple[PromptGroup, list[E]]] = {}  # by id of the group
        self._version: int | None = None
        self._dispatched_at = time.monotonic()
        self._waited_s = 0.0

    @property
    def n_running(self) -> int:
        """Episodes that have not ended."""
        return self.runner.n_unfinished

    def responses(self, prompt: Prompt) -> list[Response]:
        """None: a group has episodes."""
        return []

    def resume(self, version: int, groups: Iterable[PromptGroup]) -> None:
        """Continues the episodes under the weights of `version`, and starts those of new groups.

        The time limits of environments leave out the time since the last dispatch. The episodes of
        groups that are no longer listed end without effect.
        """
        if version != self._version and not self.keep_kv:
            self.release()
        self._version = version
        self.engine.set_version(version)
        self.runner.resume(time.monotonic() - self._dispatched_at)
        unfinished = [group for group in groups if group.rollouts is None]
        known = {id(group): self._episodes.get(id(group)) for group in unfinished}
        self._episodes = {key: found for key, found in known.items() if found is not None}
        for group in unfinished:
            if id(group) not in self._episodes:
                prompt, seed = group.prompt, group.seed
                episodes = [self.runner.add(prompt, i, seed) for i in range(self.n)]
                self._episodes[id(group)] = group, episodes

    def dispatch(self, params: Tree) -> list[PromptGroup]:
        """Starts episodes, takes what environments sent, and runs one dispatch of the engine.

        Returns the groups whose episodes have all ended; they then have their rollouts.
        """
        runner = self.runner
        runner.start_waiting()
        start, idle = time.monotonic(), not runner.in_engine
        runner.poll(idle=idle)
        self._waited_s += idle * (time.monotonic() - start)
        if runner.in_engine:
            runner.decode(params)
        self._dispatched_at = time.monotonic()
        return self._completed()

    def release(self) -> None:
        """Frees all slots of the engine; `resume` computes the KV again."""
        self.runner.pause()

    def take_metrics(self) -> dict[str, float]:
        """time/env_s: seconds with nothing to decode, waiting for environments."""
        waited_s, self._waited_s = self._waited_s, 0.0
        return {"time/env_s": waited_s}

    def _completed(self) -> list[PromptGroup]:
        completed = []
        for key, (group, episodes) in list(self._episodes.items()):
            if all(episode.ended for episode in episodes):
                group.rollouts = [episode.rollout(self.runner.renderer) for episode in episodes]
                del self._episodes[key]
                completed.append(group)
        return completed
