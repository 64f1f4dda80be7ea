"""Agents at a resources server of NeMo Gym (https://github.com/NVIDIA-NeMo/Gym).

The contract of nemo_gym 0.5.1, by its simple_agent: POST /seed_session with the row opens a session
that cookies name, POST /TOOL with its arguments is a call, and POST /verify with the row and the
response of the Responses API returns the reward. By its gymnasium_agent: POST /reset with the row
opens a session, and POST /step with the row and the response of a turn returns an observation and
the reward of the turn.
"""

import json
from typing import Any

from jaxrl.environments.agents.client import JsonClient, ModelClient
from jaxrl.environments.api import AGENT_KEY
from jaxrl.json_text import parse_json


class NemoGymAgent:
    """Plays a row of a "nemo_gym:" source; an agent function (base_url, api_key, task).

    `url` is that of the resources server, and `agent` the contract: "simple" or "gymnasium", whose
    rewards are summed. With "simple" a turn without a call ends the episode, as do a truncated
    turn, the last of env.max_turns and a full context; it is verified in any case.
    """

    def __init__(self, *, url: str, agent: str = "simple"):
        if agent not in ("simple", "gymnasium"):
            raise ValueError(f"agent={agent!r} of NeMo Gym is not known; set simple or gymnasium")
        self._url, self._agent = url, agent

    def __call__(self, base_url: str, api_key: str, task: dict[str, Any]) -> dict[str, Any]:
        """The reward, and the numbers of the verifier's answer that the row does not have.

        Raises RuntimeError if the server fails.
        """
        row = task["extra"].get("nemo_gym")
        if not isinstance(row, dict):
            raise ValueError(
                f"{AGENT_KEY}='nemo_gym' needs rows of data.train='nemo_gym:FILE.jsonl'"
            )
        server, model = JsonClient(self._url), ModelClient(base_url, api_key)
        if self._agent == "gymnasium":
            return {"reward": play_game(row, server, model)}
        server.ask("seed_session", row)
        response, calls = converse(row["responses_create_params"], server, model)
        verdict = server.ask("verify", row | {"response": response})
        if type(verdict.get("reward")) not in (int, float):
            raise RuntimeError(f"{self._url}/verify returned no reward: {str(verdict)[:500]}")
        numbers = {
            name: value
            for name, value in verdict.items()
            if isinstance(value, int | float) and name not in row
        }
        return numbers | {"calls": calls}


def converse(
    params: dict[str, Any], server: JsonClient, model: ModelClient
) -> tuple[dict[str, Any], int]:
    """(the last response with the output of all turns, number of calls).

    Raises RuntimeError if the model had no turn.
    """
    first = _input(params)
    offered = {tool.get("name") for tool in params.get("tools") or ()}
    outputs: list[dict[str, Any]] = []
    response, n_calls = None, 0
    while (reply := model.turn("responses", params | {"input": [*first, *outputs]})) is not None:
        response = reply
        outputs += reply["output"]
        calls = [item for item in reply["output"] if item["type"] == "function_call"]
        if not calls or reply.get("incomplete_details"):
            break
        n_calls += len(calls)
        for call in calls:
            output = _result(call, server) if call["name"] in offered else _unknown(call["name"])
            outputs.append(_output(call["call_id"], output))
    if response is None:
        raise RuntimeError("the prompt does not fit in data.max_prompt_len and max_response_len")
    return response | {"output": outputs}, n_calls


def play_game(row: dict[str, Any], server: JsonClient, model: ModelClient) -> float:
    """The sum of the rewards of a game, which ends with its last step or a full context."""
    params = row["responses_create_params"]
    items = [*_input(params), *_observation(server.ask("reset", row))]
    reward, ended = 0.0, False
    while not ended and (reply := model.turn("responses", params | {"input": items})) is not None:
        step = server.ask("step", row | {"response": reply})
        reward += step["reward"]
        ended = bool(step.get("terminated") or step.get("truncated"))
        given = (step.get("info") or {}).get("tool_outputs", ())
        results = [_output(one["call_id"], one["output"]) for one in given]
        items = [*items, *reply["output"], *results, *_observation(step)]
    return reward


def _input(params: dict[str, Any]) -> list[dict[str, Any]]:
    given = params["input"]
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


def _observation(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """The message of a reset or step, if it has an observation."""
    text = answer.get("observation")
    return [{"role": "user", "content": text}] if text else []


def _output(call_id: str, text: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": text}


def _result(call: dict[str, Any], server: JsonClient) -> str:
    """The answer of the server to a call. Its errors are results, which the model reads."""
    try:
        arguments = parse_json(call["arguments"])
    except ValueError as error:
        return json.dumps({"error": f"Invalid tool call arguments: {error}"})
    return server.post(call["name"], arguments)[1]


def _unknown(name: str) -> str:
    return json.dumps({"error": f"There is no tool {name}."})
