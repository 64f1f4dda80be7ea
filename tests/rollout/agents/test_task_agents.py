"""The agents of Harbor and NeMo Gym at the run's endpoint: tokens continue over their calls."""

import json
import threading

import pytest

from jaxrl.config.keys import EnvConfig
from jaxrl.data.chat.encoding import ChatRenderer
from jaxrl.data.tokenizer import load_tokenizer
from jaxrl.environments.pool import EnvironmentPool
from jaxrl.rollout.agents.endpoint import AgentEndpoint
from jaxrl.rollout.agents.runner import Agents
from tests.environments.agents.test_harbor import folder, needs_namespaces
from tests.environments.agents.test_nemo_gym import ROW, Server
from tests.rollout.agents.test_runner import TOOL_TEMPLATE, play
from tests.trainer.test_multi_turn import ids

__all__ = ["folder"]
AGENT = """
from jaxrl.environments.agents.harbor import HarborAgent
from jaxrl.environments.agents.nemo_gym import NemoGymAgent


def agent(base_url, api_key, task):
    kind, _, where = task["answer"].partition(" ")
    made = HarborAgent() if kind == "harbor" else NemoGymAgent(url=where)
    extra = {{"harbor": where, "nemo_gym": {row}}}
    return made(base_url, api_key, task | {{"extra": extra}})
"""
pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def agents(tmp_path_factory):
    path = tmp_path_factory.mktemp("agents") / "task_agents.py"
    path.write_text(AGENT.format(row=ROW))
    cfg = EnvConfig(agent=f"{path}:agent", workers=3, timeout_s=60.0)
    with EnvironmentPool(cfg) as pool, AgentEndpoint() as endpoint:
        yield Agents(pool, endpoint)


@pytest.fixture(scope="module")
def renderer(tiny_model, tmp_path_factory):
    path = tmp_path_factory.mktemp("template") / "tools.jinja"
    path.write_text(TOOL_TEMPLATE)
    return ChatRenderer(load_tokenizer(tiny_model), template=str(path))


def play_one(agents, renderer, answer, name, arguments, result):
    """The rollout of an episode with one call and an answer."""
    call = json.dumps({"name": name, "arguments": arguments})
    turn = f"Go.<tool_call>{call}</tool_call><|im_end|>"
    script = [turn, "Done.<|im_end|>"]
    ((rollout,), requests) = play(agents, renderer, [answer], script, context_len=3000)
    assert rollout.episode.error == "" and rollout.branches == ()
    after = f"\n<|im_start|>tool\n{result}<|im_end|>\n<|im_start|>assistant\n"
    assert requests[1].tokens.tolist() == [*requests[0].tokens, *ids(renderer, turn + after)]
    return rollout


@needs_namespaces
def test_a_task_of_harbor_is_solved(agents, renderer, folder):
    command = {"command": "echo 7 > sum.txt; ls"}
    rollout = play_one(
        agents, renderer, f"harbor {folder}", "bash", command, "numbers.txt\nsum.txt\n"
    )
    assert rollout.episode.reward == 1.0
    assert rollout.episode.counts["files"] == 2 and rollout.episode.counts["calls"] == 1


def test_a_row_of_nemo_gym_is_solved(agents, renderer):
    server = Server([], verifies=True)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    try:
        rollout = play_one(agents, renderer, f"gym {url}", "add", {"by": 5}, '{"count": 5}')
    finally:
        server.shutdown()
        server.server_close()
    assert rollout.episode.reward == 1.0 and rollout.episode.counts["right"] == 1
    _, verified = server.bodies[-1]
    kinds = [item["type"] for item in verified["response"]["output"]]
    assert kinds == ["message", "function_call", "function_call_output", "message"]
