"""Tests of jaxrl/rollout/agents: exact tokens, branches, rewards and failures of episodes that a
program plays over HTTP."""

import re
import socket
import sys
import time
import urllib.error
import urllib.request

import numpy as np
import pytest

from jaxrl.config.keys import AlgorithmConfig, EnvConfig, SamplingConfig
from jaxrl.data.chat.encoding import ChatRenderer
from jaxrl.data.tokenizer import load_tokenizer
from jaxrl.environments.pool import EnvironmentPool
from jaxrl.rollout.agents.endpoint import AgentEndpoint
from jaxrl.rollout.agents.episode import AgentLimits
from jaxrl.rollout.agents.runner import AgentRunner, Agents
from jaxrl.rollout.agents.turn import TurnReader
from jaxrl.rollout.loop import generate
from jaxrl.trainer.phases.mini_batches import to_samples
from jaxrl.types import Prompt
from tests.trainer.test_multi_turn import EOS, REPLY, Scripted, ids

AGENT = r'''
import asyncio
import json
import os
import socket
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit


def post(url, body, key="any"):
    """(status, body) of a request."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers)) as reply:
            return reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def user(text):
    return {"role": "user", "content": text}


class Chat:
    def __init__(self, base_url, messages):
        self.base_url, self.messages = base_url, list(messages)

    def turn(self, *more, **fields):
        """The text of the next turn, after these messages."""
        self.messages += more
        body = {"model": "any", "messages": self.messages, **fields}
        status, reply = post(f"{self.base_url}/chat/completions", body)
        assert status == 200, reply
        choice = reply["choices"][0]
        self.messages.append(choice["message"] | {"refusal": None})
        return choice


def two_turns(base_url, api_key, task):
    chat = Chat(base_url, task["messages"])
    chat.turn()
    chat.turn(user("c"))
    return {"reward": 1.5, "calls": 2}


def compact(base_url, api_key, task):
    """Rewrites the history after the first turn, then continues the new conversation."""
    chat = Chat(base_url, task["messages"])
    chat.turn()
    chat.messages = [user("short")]
    chat.turn()
    chat.turn(user("c"))
    return 1.0


def fork(base_url, api_key, task):
    """Continues the first turn in two ways."""
    first = Chat(base_url, task["messages"])
    first.turn()
    second = Chat(base_url, first.messages)
    first.turn(user("c"))
    second.turn(user("x"))
    return 0.0


def self_play(base_url, api_key, task):
    """A solver answers what a proposer wrote, in its conversation."""
    proposer = Chat(base_url, task["messages"])
    proposer.turn(model="proposer")
    solver = Chat(base_url, proposer.messages)
    solver.turn(user("c"), model="solver/0")
    return {"reward": 0.0, "proposer": 1.0, "solver/0": -1.0}


async def best_of_two(base_url, api_key, task):
    chats = [Chat(base_url, task["messages"]) for _ in range(2)]
    await asyncio.gather(*(asyncio.to_thread(chat.turn) for chat in chats))
    return len({chat.messages[-1]["content"] for chat in chats})


def options(base_url, api_key, task):
    """The settings of the run win; max_tokens and stop count."""
    chat = Chat(base_url, task["messages"])
    sampling = {"temperature": 0, "top_p": 0.1, "seed": 1, "presence_penalty": 1}
    first = chat.turn(max_tokens=2, **sampling)
    assert (first["finish_reason"], first["message"]["content"]) == ("length", "ab")
    second = chat.turn(user("c"), stop=["!"])
    assert (second["finish_reason"], second["message"]["content"]) == ("stop", "ef")


def over_http(base_url, api_key, task):
    """The id is the API key, and the reward is sent."""
    root = base_url.partition("/episodes/")[0] + "/v1"
    assert os.environ["OPENAI_BASE_URL"] == base_url and os.environ["OPENAI_API_KEY"] == api_key
    status, _ = post(f"{root}/chat/completions", {"messages": task["messages"]}, api_key)
    assert status == 200
    assert post(f"{root}/reward", {"reward": 0.25, "steps": 3}, api_key)[0] == 200
    assert post(f"{root}/chat/completions", {"messages": task["messages"]}, "wrong")[0] == 401


def stream(base_url, api_key, task):
    body = {"messages": task["messages"], "stream": True, "stream_options": {"include_usage": True}}
    request = urllib.request.Request(f"{base_url}/chat/completions", json.dumps(body).encode())
    lines = urllib.request.urlopen(request).read().decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": "ab"}
    assert chunks[1]["choices"][0]["finish_reason"] == "stop"
    assert chunks[2]["usage"]["completion_tokens"] == 3


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def tools(base_url, api_key, task):
    """A call, a malformed call, and an answer."""
    chat = Chat(base_url, task["messages"])
    first = chat.turn(tools=[TOOL])
    assert first["finish_reason"] == "tool_calls" and first["message"]["content"] is None
    (call,) = first["message"]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
    second = chat.turn({"role": "tool", "tool_call_id": call["id"], "content": "3"}, tools=[TOOL])
    assert second["message"]["content"] == "<tool_call>{</tool_call>"
    assert chat.turn(user("?"), tools=[TOOL])["message"]["content"] == "3"


WRONG = [
    (b"{", 400), ([], 400), ({}, 400), ({"messages": []}, 400), ({"messages": ["x"]}, 400),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400),
    ({"messages": [{"role": "assistant", "content": "", "tool_calls": 5}]}, 400),
    ({"n": 0}, 400), ({"top_logprobs": 2}, 400), ({"max_tokens": 0}, 400), ({"stop": [""]}, 400),
    ({"tools": "x"}, 400), ({"tools": [{"function": {"name": "f"}, "type": "function"}]}, 400),
    ({"response_format": {"type": "json_object"}}, 400),
    ({"messages": [{"role": "assistant", "tool_calls": [
        {"function": {"name": "f", "arguments": "[" * 3000}}]}]}, 400),
    ({"tools": [TOOL] * 600}, 400),
    ({"messages": [{"role": "assistant", "tool_calls": [
        {"function": {"name": "f", "arguments": json.dumps({"a": "x" * 20000})}}]}]}, 400),
    ({"messages": [{"role": "user", "content": "x" * 400}]}, 400),
]


def nonsense(base_url, api_key, task):
    ok = {"messages": task["messages"]}
    for body, status in WRONG:
        sent = ok | body if isinstance(body, dict) and body else body
        got, reply = post(f"{base_url}/chat/completions", sent)
        assert got == status and set(reply["error"]) == {"message", "type", "param", "code"}, body
    assert reply["error"]["code"] == "context_length_exceeded"
    assert post(f"{base_url}/completions", ok)[0] == 404
    assert post(f"{base_url}/reward", {"reward": "x"})[0] == 400
    for _ in range(3):
        assert post(f"{base_url}/chat/completions", ok)[0] == 200
    got, reply = post(f"{base_url}/chat/completions", ok)
    assert (got, reply["error"]["code"]) == (400, "too_many_turns")
    return 1.0


def disconnect(base_url, api_key, task):
    """Leaves before the answer to its first request, then has a turn."""
    url = urlsplit(base_url)
    body = json.dumps({"messages": task["messages"]}).encode()
    head = f"POST {url.path}/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}"
    with socket.create_connection((url.hostname, url.port)) as client:
        client.sendall(head.encode() + b"\r\n\r\n" + body)
        time.sleep(0.2)
    time.sleep(0.2)
    Chat(base_url, task["messages"]).turn()


def no_turn(base_url, api_key, task):
    return 1.0


def dies(base_url, api_key, task):
    Chat(base_url, task["messages"]).turn()
    os._exit(3)


def raises(base_url, api_key, task):
    Chat(base_url, task["messages"]).turn()
    raise RuntimeError("out of cheese")


def fills(base_url, api_key, task):
    """Its client raises on a conversation that does not fit, after a turn."""
    chat = Chat(base_url, task["messages"])
    chat.turn()
    chat.turn(user("c" * 300))


def fills_at_once(base_url, api_key, task):
    Chat(base_url, task["messages"]).turn(user("c" * 300))


def raises_on_length(base_url, api_key, task):
    """Its client raises on a truncated turn."""
    if Chat(base_url, task["messages"]).turn()["finish_reason"] == "length":
        raise RuntimeError("incomplete turn")


def shortens(base_url, api_key, task):
    """Has a turn in a shorter conversation after one that did not fit, then fails."""
    assert post(f"{base_url}/chat/completions", {"messages": [user("c" * 300)]})[0] == 400
    raises(base_url, api_key, task)


def hangs(base_url, api_key, task):
    Chat(base_url, task["messages"]).turn()
    time.sleep(1000)


def never_ends(base_url, api_key, task):
    while True:
        post(f"{base_url}/chat/completions", b"{")
        time.sleep(0.01)


def nan(base_url, api_key, task):
    Chat(base_url, task["messages"]).turn()
    return float("nan")


def text(base_url, api_key, task):
    Chat(base_url, task["messages"]).turn()
    return "1.0"


def agent(base_url, api_key, task, *, base=None):
    """The agent that the answer of the task names."""
    return globals()[task["answer"]](base_url, api_key, task)


def wrong_arguments(url):
    pass
'''
TOOL_TEMPLATE = """\
{%- for t in tools or [] %}{{ t | tojson }}<tool_call>{% endfor %}
{%- for m in messages %}
{%- set alone = m.role == "tool" and not loop.previtem.tool_calls %}
{%- if alone %}{{ raise_exception("a result without a call") }}{% endif %}
{{- "" }}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
HI = ({"role": "user", "content": "hi"},)
OPEN = "<|im_start|>user\nshort<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("agents")
    (folder / "agents.py").write_text(AGENT)
    return folder


@pytest.fixture(scope="module")
def agents(folder):
    cfg = EnvConfig(agent=f"{folder}/agents.py:agent", workers=3, timeout_s=60.0)
    with EnvironmentPool(cfg) as pool, AgentEndpoint() as endpoint:
        yield Agents(pool, endpoint)


@pytest.fixture(scope="module")
def renderer(tiny_model):
    """Every byte is a token."""
    return ChatRenderer(load_tokenizer(tiny_model), template="chatml")


def play(agents, renderer, answers, script, *, engine=Scripted, **limits):
    """(rollouts, requests of the engine); one prompt per answer, whose turns `script` holds."""
    prompts = [Prompt(i, HI, renderer.render(HI), answer) for i, answer in enumerate(answers)]
    turns = [ids(renderer, text) for text in script]
    scripted = engine([turns])
    defaults = dict(context_len=300, max_turns=3, timeout_s=0.0, needs_reward=False)
    runner = AgentRunner(
        scripted,
        agents,
        TurnReader(renderer, (EOS,)),
        sampling=SamplingConfig(),
        limits=AgentLimits(**defaults | limits),
    )
    rollouts, found = generate(runner, None, prompts, n=1, seed=3, version=1)
    assert not scripted.left and agents.pool.n_free == 3 and found["time/env_s"] > 0
    return rollouts, scripted.requests


def test_an_episode_has_exactly_the_tokens_that_the_model_saw_and_wrote(agents, renderer):
    ((rollout,), requests) = play(agents, renderer, ["two_turns"], ["ab<|im_end|>", "d<|im_end|>"])
    prompt, between = ids(renderer, renderer.text(HI)), ids(renderer, REPLY)
    n = len(between)
    assert requests[0].tokens.tolist() == prompt == rollout.prompt.tokens.tolist()
    assert requests[1].tokens.tolist() == [*prompt, *rollout.tokens[: 3 + n]]
    assert [r.max_tokens for r in requests] == [300 - len(prompt), 300 - len(prompt) - 3 - n]
    assert rollout.tokens.tolist() == ids(renderer, "ab<|im_end|>" + REPLY + "d<|im_end|>")
    assert rollout.loss_mask.tolist() == [True] * 3 + [False] * n + [True] * 2
    np.testing.assert_allclose(
        rollout.logp, np.where(rollout.loss_mask, -rollout.tokens / 100, 0), rtol=1e-6
    )
    assert rollout.finish == "stop" and rollout.branches == ()
    assert [m["content"] for m in rollout.completion_messages] == ["ab", "c", "d"]
    episode = rollout.episode
    assert episode.reward == 1.5 and episode.n_turns == 2
    assert {n: v for n, v in episode.counts.items() if v} == {"calls": 2, "branches": 1}


def test_text_of_the_model_is_never_tokenized_again(agents, renderer):
    half = ids(renderer, "\u00e9")[:1]  # the first of two bytes: no text has this token alone
    ((rollout,), requests) = play(agents, renderer, ["two_turns"], [[*half, EOS], "d<|im_end|>"])
    assert rollout.completion_messages[0]["content"] == "\ufffd"
    assert half[0] in requests[1].tokens and len(rollout.branches) == 0


def test_a_rewritten_history_begins_a_branch(agents, renderer):
    turns = ["ab<|im_end|>", "cd<|im_end|>", "e<|im_end|>"]
    ((rollout,), requests) = play(agents, renderer, ["compact"], turns)
    (branch,) = rollout.branches
    assert requests[1].tokens.tolist() == ids(renderer, OPEN) == rollout.prompt.tokens.tolist()
    assert rollout.tokens.tolist() == ids(renderer, "cd<|im_end|>" + REPLY + "e<|im_end|>")
    assert branch.prompt.tokens.tolist() == renderer.render(HI).tolist()
    assert branch.tokens.tolist() == ids(renderer, "ab<|im_end|>") and branch.loss_mask.all()
    assert [m["content"] for m in branch.completion_messages] == ["ab"]
    assert rollout.episode.counts["branches"] == 2 and rollout.episode.n_turns == 3


def test_a_fork_keeps_the_tokens_before_it_outside_of_its_loss(agents, renderer):
    turns = ["ab<|im_end|>", "cd<|im_end|>", "e<|im_end|>"]
    ((rollout,), requests) = play(agents, renderer, ["fork"], turns)
    (first,) = rollout.branches
    shared = ids(renderer, renderer.text(HI) + "ab<|im_end|>" + REPLY.replace("\nc<", "\nx<"))
    assert rollout.prompt.tokens.tolist() == shared == requests[2].tokens.tolist()
    assert rollout.tokens.tolist() == ids(renderer, "e<|im_end|>") and rollout.loss_mask.all()
    assert first.tokens.tolist() == ids(renderer, "ab<|im_end|>" + REPLY + "cd<|im_end|>")


def test_conversations_with_rewards_have_the_names_of_their_requests(agents, renderer):
    turns = ["ab<|im_end|>", "e<|im_end|>"]
    ((rollout,), _) = play(agents, renderer, ["self_play"], turns, needs_role_rewards=True)
    (proposer,) = rollout.branches
    assert (rollout.role, proposer.role) == ("solver/0", "proposer")
    assert rollout.loss_mask.all() and rollout.text.startswith("e")
    samples = to_samples(rollout, AlgorithmConfig(advantage="hierarchical_grpo"))
    assert [(s.role, s.role_reward) for s in samples] == [("solver/0", -1.0), ("proposer", 1.0)]
    ((rollout,), _) = play(agents, renderer, ["self_play"], turns)
    assert rollout.role == "" and rollout.branches == (), "without them they are one conversation"


def test_a_conversation_without_a_needed_reward_has_failed(agents, renderer):
    turns = ["ab<|im_end|>", "d<|im_end|>"]
    ((rollout,), _) = play(agents, renderer, ["two_turns"], turns, needs_role_rewards=True)
    assert "no reward of its conversations any; return" in rollout.episode.error


def test_equal_requests_at_one_time_are_branches_with_different_seeds(agents, renderer):
    turns = ["ab<|im_end|>", "cd<|im_end|>"]
    ((rollout,), requests) = play(agents, renderer, ["best_of_two"], turns)
    assert len(rollout.branches) == 1 and rollout.episode.reward == 2.0
    seeds = [r.seed for r in requests]
    assert seeds[0] != seeds[1]
    _, again = play(agents, renderer, ["two_turns"], turns)
    assert again[0].seed == seeds[0]  # it depends on the tokens alone


def test_max_tokens_and_stop_strings_count_and_other_settings_do_not(agents, renderer):
    ((rollout,), requests) = play(
        agents, renderer, ["options"], ["abcd<|im_end|>", "ef!g<|im_end|>"]
    )
    assert rollout.episode.error == "" and requests[0].max_tokens == 2
    assert all(r.sampling == SamplingConfig() for r in requests)
    n = len(ids(renderer, "<|im_end|>" + REPLY))
    assert rollout.tokens.tolist() == ids(renderer, "ab<|im_end|>" + REPLY + "ef!")
    assert rollout.loss_mask.tolist() == [True] * 2 + [False] * n + [True] * 3


@pytest.mark.parametrize("name", ["over_http", "stream"])
def test_the_id_as_api_key_and_streams(agents, renderer, name):
    ((rollout,), _) = play(agents, renderer, [name], ["ab<|im_end|>"])
    assert rollout.episode.error == "" and rollout.n_loss_tokens == 3
    if name == "over_http":
        assert rollout.episode.reward == 0.25 and rollout.episode.counts["steps"] == 3


def test_tool_calls_go_through_the_chat_template(agents, renderer, tmp_path):
    path = tmp_path / "tools.jinja"
    path.write_text(TOOL_TEMPLATE)
    renderer = ChatRenderer(renderer.tokenizer, template=str(path))
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    script = [f"{call}<|im_end|>", "<tool_call>{</tool_call><|im_end|>", "3<|im_end|>"]
    ((rollout,), requests) = play(agents, renderer, ["tools"], script, context_len=900)
    assert rollout.episode.error == "" and rollout.branches == ()
    assert '"name": "add"' in renderer.decode(rollout.prompt.tokens)
    result = "\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n"
    assert requests[1].tokens.tolist() == [
        *requests[0].tokens, *ids(renderer, f"{call}<|im_end|>{result}")
    ]  # fmt: skip
    assert rollout.episode.counts["malformed_calls"] == 1


def test_nonsense_is_answered_and_counted(agents, renderer):
    ((rollout,), _) = play(agents, renderer, ["nonsense"], ["ab<|im_end|>"] * 3)
    assert rollout.episode.error == "" and rollout.finish == "turns"
    # 18 bodies, the reward without a number, and the fourth turn
    assert rollout.episode.counts["rejected"] == 20
    assert rollout.episode.n_turns == 3 and len(rollout.branches) == 2


def test_the_turn_of_a_client_that_left_is_not_kept(agents, renderer):
    class Late(Scripted):
        """Samples nothing for the first request."""

        def generate(self, params):
            time.sleep(0.01)
            return super().generate(params) if len(self.requests) > 1 else []

    script = ["xy<|im_end|>", "ab<|im_end|>"]
    ((rollout,), requests) = play(agents, renderer, ["disconnect"], script, engine=Late)
    assert rollout.tokens.tolist() == ids(renderer, "ab<|im_end|>") and len(requests) == 2
    assert rollout.episode.n_turns == 1 and rollout.episode.error == ""


FAILURES = {
    "no_turn": "without a turn of the model",
    "dies": "process died",
    "raises": "RuntimeError: out of cheese",
    "nan": "return finite numbers",
    "text": "return the reward, a dict",
    "over_http": "",
}


def test_a_failing_agent_ends_only_its_episode(agents, renderer):
    rollouts, _ = play(agents, renderer, list(FAILURES), ["ab<|im_end|>"] * len(FAILURES))
    for rollout, reason in zip(rollouts, FAILURES.values(), strict=True):
        assert re.search(reason or "^$", rollout.episode.error), rollout.episode.error
        assert rollout.finish == ("error" if reason else "stop")
        assert rollout.n_loss_tokens == (0 if reason.startswith("without") else 3)


LIMITS = {  # (limits, the turn, finish, metric)
    "fills": ({}, "ab<|im_end|>", "length", "context_length_exceeded"),
    "raises_on_length": ({"context_len": 64}, "a" * 64, "length", "context_length_exceeded"),
    "two_turns": ({"max_turns": 1}, "ab<|im_end|>", "turns", "too_many_turns"),
}


@pytest.mark.parametrize("name", LIMITS)
def test_an_agent_whose_client_raises_at_a_limit_has_not_failed(agents, renderer, name):
    limits, turn, finish, metric = LIMITS[name]
    ((rollout,), _) = play(agents, renderer, [name], [turn], needs_reward=True, **limits)
    assert rollout.finish == finish and rollout.episode.counts[metric] == 1
    assert rollout.episode.error == "" and rollout.episode.reward == 0
    assert rollout.loss_mask.all() and rollout.n_loss_tokens == len(rollout.tokens) > 0


def test_a_missing_reward_of_a_conversation_is_0_at_a_limit(agents, renderer):
    limits = {"max_turns": 1, "needs_role_rewards": True}
    ((rollout,), _) = play(agents, renderer, ["self_play"], ["ab<|im_end|>"], **limits)
    assert rollout.episode.error == "" and rollout.episode.counts["proposer"] == 0


def test_a_full_context_before_the_first_turn_or_before_a_later_one_excuses_nothing(
    agents, renderer
):
    names, reasons = ["fills_at_once", "shortens"], ["maximum context length is 300", "cheese"]
    rollouts, _ = play(agents, renderer, names, ["ab<|im_end|>"])
    for rollout, reason in zip(rollouts, reasons, strict=True):
        assert rollout.finish == "error" and reason in rollout.episode.error
    counts = [rollout.episode.counts["context_length_exceeded"] for rollout in rollouts]
    assert counts == [1, 0] and rollouts[1].episode.counts["rejected"] == 1


PROGRAM = """
import json, sys
sys.path.insert(0, sys.argv[3])
from agents import two_turns
print(json.dumps(two_turns(sys.argv[1], "", json.load(open(sys.argv[2])))))
"""


def test_a_command_is_an_agent(folder, renderer):
    (folder / "program.py").write_text(PROGRAM)
    command = f"{sys.executable} {folder}/program.py {{base_url}} {{task}} {folder}"
    with (
        EnvironmentPool(EnvConfig(command=command, workers=3, timeout_s=60.0)) as pool,
        AgentEndpoint() as endpoint,
    ):
        script = ["ab<|im_end|>", "d<|im_end|>"]
        ((rollout,), _) = play(Agents(pool, endpoint), renderer, ["5"], script, needs_reward=True)
    assert rollout.episode.error == "" and rollout.episode.reward == 1.5
    assert rollout.episode.counts["calls"] == 2 and rollout.episode.n_turns == 2


def test_an_agent_that_hangs_is_ended(folder, renderer):
    cfg = EnvConfig(agent=f"{folder}/agents.py:agent", workers=3, timeout_s=0.5)
    with EnvironmentPool(cfg) as pool, AgentEndpoint() as endpoint:
        script = ["ab<|im_end|>"] * 2
        ((rollout,), _) = play(Agents(pool, endpoint), renderer, ["hangs"], script)
    assert rollout.finish == "error"
    assert "no request of the agent within 0.5 s (env.timeout_s)" in rollout.episode.error


def test_an_agent_that_never_ends_is_ended(agents, renderer):
    ((rollout,), _) = play(agents, renderer, ["never_ends"], [], timeout_s=0.3)
    assert "did not end within 0.3 s (env.episode_timeout_s)" in rollout.episode.error
    assert rollout.episode.counts["rejected"] > 0


def test_an_episode_without_a_needed_reward_has_failed(agents, renderer):
    names, script = ["over_http", "stream"], ["ab<|im_end|>"] * 2
    rewarded, failed = play(agents, renderer, names, script, needs_reward=True)[0]
    assert rewarded.episode.error == "" and "returned no reward" in failed.episode.error


def test_an_ended_episode_is_not_found(agents):
    url = agents.endpoint.base_url("ended") + "/models"
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(url)


def test_the_endpoint_is_on_loopback_only(agents):
    host, port = agents.endpoint._listening.getsockname()
    assert host == "127.0.0.1"
    with pytest.raises(OSError), socket.create_connection(("127.0.0.2", port), timeout=1):
        pass


@pytest.mark.parametrize(
    "spec, message",
    [
        ("agents.py:wrong_arguments", r"cannot be called with \(base_url, api_key, task\)"),
        ("agents.py:agent?speed=3", r"incorrect arguments; write .*options after '\?'"),
        ("agents.py:missing", "has no function or class 'missing'"),
    ],
)
def test_a_wrong_agent_is_an_error_at_start(folder, spec, message):
    with pytest.raises(ValueError, match=message):
        EnvironmentPool(EnvConfig(agent=f"{folder}/{spec}"))
