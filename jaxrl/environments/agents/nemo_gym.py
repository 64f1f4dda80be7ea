"""Agents at a resources server of NeMo Gym (https://github.com/NVIDIA-NeMo/Gym).

The contract of nemo_gym 0.5.1, by its simple_agent: POST /seed_session with the row opens a session
that cookies name, POST /TOOL with its arguments is a call, and POST /verify with the row and the
response of the Responses API returns the reward.
"""

import json
from typing import Any

from jaxrl.environments.agents.client import JsonClient, ModelClient
from jaxrl.environments.api import AGENT_KEY
from jaxrl.json_text import parse_json


class NemoGymAgent:
    """Plays a row of a "nemo_gym:" source; an agent function (base_url, api_key, task).

    `url` is that of the resources server. A turn without a call ends the episode, as do a truncated
    turn, the last of env.max_turns and a full context; it is verified in any case.
    """

    def __init__(self, *, url: str):
        self._url = url

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
    given = params["input"]
    first = [{"role": "user", "content": given}] if isinstance(given, str) else given
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
            outputs.append(
                {"type": "function_call_output", "call_id": call["call_id"], "output": output}
            )
    if response is None:
        raise RuntimeError("the prompt does not fit in data.max_prompt_len and max_response_len")
    return response | {"output": outputs}, n_calls


def _result(call: dict[str, Any], server: JsonClient) -> str:
    """The answer of the server to a call. Its errors are results, which the model reads."""
    try:
        arguments = parse_json(call["arguments"])
    except ValueError as error:
        return json.dumps({"error": f"Invalid tool call arguments: {error}"})
    return server.post(call["name"], arguments)[1]


def _unknown(name: str) -> str:
    return json.dumps({"error": f"There is no tool {name}."})
