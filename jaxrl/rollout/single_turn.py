"""Responses of a single turn: prompts to rollouts without an environment."""

from collections.abc import Callable

from jaxrl.config.keys import SamplingConfig
from jaxrl.engine.api import Request, RequestEngine
from jaxrl.rewards.arguments import Decode
from jaxrl.rollout.schedule.buffer import PromptGroup
from jaxrl.rollout.turns import ActiveTurn, ActiveTurns, Response

# (group, index of the sample) -> the request for all tokens of its response
MakeRequest = Callable[[PromptGroup, int], Request]


class SingleTurnRunner:
    """Implements EpisodeRunner: an episode is one response. Those of a group can be saved."""

    def __init__(self, engine: RequestEngine, make_request: MakeRequest, decode: Decode):
        self.make_request = make_request
        self.turns: ActiveTurns[Response] = ActiveTurns(engine, decode)

    @property
    def n_unfinished(self) -> int:
        return len(self.turns.all)

    def add(self, group: PromptGroup, sample: int) -> Response:
        """A new response of the group, or the one that it has from a checkpoint."""
        if sample == len(group.responses):
            group.responses.append(Response(group.prompt, sample))
        response = group.responses[sample]
        if not response.ended:
            request = self.make_request(group, sample)
            self.turns.submit(ActiveTurn(response, request, response, request.sampling.stop))
        return response

    def after_turn(self, turn: ActiveTurn[Response]) -> None:
        """Nothing: the response has ended."""

    def cancel(self, episode: Response) -> None:
        self.turns.cancel(lambda owner: owner is episode)


def sampled_requests(sampling: SamplingConfig, max_tokens: int) -> MakeRequest:
    """Requests that differ in their prompts and random numbers only."""

    def make_request(group: PromptGroup, sample: int) -> Request:
        return Request(
            tokens=group.prompt.tokens,
            max_tokens=max_tokens,
            sampling=sampling,
            prompt_id=group.prompt.id,
            sample=sample,
            seed=group.seed,
        )

    return make_request
