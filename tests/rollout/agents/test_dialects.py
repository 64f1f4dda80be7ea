"""Tests of jaxrl/rollout/agents: other dialects, several choices, logprobs, and refused fields."""

import json

import pytest

from jaxrl.config.keys import EnvConfig, SamplingConfig
from jaxrl.data.chat.encoding import ChatRenderer
from jaxrl.data.tokenizer import load_tokenizer
from jaxrl.environments.pool import EnvironmentPool
from jaxrl.http.errors import RequestError
from jaxrl.rollout.agents.chat import RUN_FIELDS, parse_chat
from jaxrl.rollout.agents.dialects import parse_messages, parse_responses
from jaxrl.rollout.agents.endpoint import AgentEndpoint
from jaxrl.rollout.agents.runner import Agents
from tests.rollout.agents.test_runner import TOOL_TEMPLATE, play
from tests.trainer.test_multi_turn import ids

AGENT = r'''
import contextlib
import json

with contextlib.suppress(ImportError):  # once for all episodes
    import anthropic
with contextlib.suppress(ImportError):
    import openai

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def claude(base_url, api_key, task, *, stream=False, edit=None):
    """A tool call and an answer through Anthropic's client, which reads its variables."""
    client, messages = anthropic.Anthropic(max_retries=0), list(task["messages"])
    tools = [{"name": "add", "input_schema": SCHEMA}]
    body = dict(model="claude", max_tokens=200, tools=tools)

    def turn():
        if stream:
            with client.messages.stream(messages=messages, **body) as events:
                return events.get_final_message()
        return client.messages.create(messages=messages, **body)

    first = turn()
    thought, text, call = first.content
    assert (thought.type, thought.thinking) == ("thinking", "Hm.")
    assert (text.text, call.name, call.input) == ("Go.", "add", {"a": 1})
    assert first.stop_reason == "tool_use"
    blocks = first.content[1:] if edit == "thinking" else first.content
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "3"}
    messages += [{"role": "assistant", "content": blocks}, {"role": "user", "content": [result]}]
    counted = client.messages.count_tokens(model="claude", messages=messages, tools=tools)
    second = turn()
    assert (second.content[-1].text, second.stop_reason) == ("3", "end_turn")
    assert second.usage.input_tokens == counted.input_tokens
    for more, kind in (
        ({"extra_body": {"top_logprob": 1}}, anthropic.BadRequestError),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, anthropic.BadRequestError),
    ):
        try:
            client.messages.create(messages=messages, **body | more)
        except kind as error:
            assert error.body["type"] == "error", error.body
        else:
            raise AssertionError(more)
    return 1.0


def claude_stream(base_url, api_key, task):
    return claude(base_url, api_key, task, stream=True)


def claude_edits(base_url, api_key, task):
    return claude(base_url, api_key, task, edit="thinking")


def codex(base_url, api_key, task, *, stream=False):
    """The same through OpenAI's Responses API."""
    client, items = openai.OpenAI(max_retries=0), list(task["messages"])
    tools = [{"type": "function", "name": "add", "parameters": SCHEMA}]

    def turn():
        body = dict(model="gpt", input=items, tools=tools, stream=stream)
        answer = client.responses.create(**body)
        return list(answer)[-1].response if stream else answer

    message, call = turn().output
    assert (call.name, json.loads(call.arguments)) == ("add", {"a": 1})
    items += [item.model_dump(exclude_none=True) for item in (message, call)]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "3"})
    assert turn().output_text == "3"
    try:
        client.responses.create(model="gpt", input=items, previous_response_id="r")
    except openai.BadRequestError as error:
        assert error.param == "previous_response_id"
    return 1.0


def codex_stream(base_url, api_key, task):
    return codex(base_url, api_key, task, stream=True)


def choices(base_url, api_key, task):
    """Two choices with logprobs; the second is continued, with a stop string."""
    client, messages = openai.OpenAI(max_retries=0), list(task["messages"])
    first = client.chat.completions.create(model="m", messages=messages, n=2, logprobs=True)
    assert [choice.message.content for choice in first.choices] == ["ab", "cd"]
    assert [choice.index for choice in first.choices] == [0, 1]
    assert first.usage.completion_tokens == 6
    logprobs = first.choices[1].logprobs.content
    assert [token.token for token in logprobs] == ["c", "d", "<|im_end|>"]
    assert logprobs[0].logprob < 0
    messages += [{"role": "assistant", "content": "cd"}, {"role": "user", "content": "c"}]
    with client.chat.completions.stream(model="m", messages=messages, stop=["!"]) as events:
        assert events.get_final_completion().choices[0].message.content == "ef"
    try:
        client.chat.completions.create(model="m", messages=messages, n=2)
    except openai.BadRequestError as error:
        assert error.code == "too_many_turns"
    return 1.0


def agent(base_url, api_key, task):
    return globals()[task["answer"]](base_url, api_key, task)
'''
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
THOUGHT = "<think>\nHm.\n</think>\n\nGo."
RESULT = "\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def agents(tmp_path_factory):
    path = tmp_path_factory.mktemp("dialects") / "dialect_agents.py"
    path.write_text(AGENT)
    cfg = EnvConfig(agent=f"{path}:agent", workers=3, timeout_s=60.0)
    with EnvironmentPool(cfg) as pool, AgentEndpoint() as endpoint:
        yield Agents(pool, endpoint)


@pytest.fixture(scope="module")
def renderer(tiny_model, tmp_path_factory):
    path = tmp_path_factory.mktemp("template") / "tools.jinja"
    path.write_text(TOOL_TEMPLATE)
    return ChatRenderer(load_tokenizer(tiny_model), template=str(path))


@pytest.mark.parametrize(
    "name",
    [
        "codex",
        *(
            pytest.param(name, marks=pytest.mark.thorough)
            for name in ("claude", "claude_stream", "codex_stream")
        ),
    ],
)
def test_a_dialect_continues_the_tokens_that_were_sampled(agents, renderer, name):
    pytest.importorskip("anthropic" if name.startswith("claude") else "openai")
    turn = f"{THOUGHT}{CALL}<|im_end|>"
    ((rollout,), requests) = play(agents, renderer, [name], [turn, "3<|im_end|>"], context_len=900)
    assert rollout.episode.error == "" and rollout.branches == ()
    assert requests[1].tokens.tolist() == [*requests[0].tokens, *ids(renderer, turn + RESULT)]
    assert rollout.tokens.tolist() == ids(renderer, turn + RESULT + "3<|im_end|>")
    assert rollout.n_loss_tokens == len(ids(renderer, turn)) + 2
    assert rollout.episode.counts["rejected"] == (2 if name.startswith("claude") else 1)


def test_a_client_that_drops_the_reasoning_begins_a_branch(agents, renderer):
    pytest.importorskip("anthropic")
    turn = f"{THOUGHT}{CALL}<|im_end|>"
    script = [turn, "3<|im_end|>"]
    ((rollout,), requests) = play(agents, renderer, ["claude_edits"], script, context_len=900)
    (first,) = rollout.branches
    assert rollout.episode.error == "" and rollout.episode.counts["branches"] == 2
    assert first.tokens.tolist() == ids(renderer, turn)
    assert requests[1].tokens.tolist() == [
        *requests[0].tokens, *ids(renderer, f"Go.{CALL}<|im_end|>{RESULT}")
    ]  # fmt: skip


def test_choices_are_samples_in_branches_with_logprobs(agents, renderer):
    script = ["ab<|im_end|>", "cd<|im_end|>", "ef!g<|im_end|>"]
    ((rollout,), requests) = play(agents, renderer, ["choices"], script, max_turns=4)
    assert rollout.episode.error == "" and rollout.episode.counts["rejected"] == 1
    assert len({request.seed for request in requests}) == 3
    (other,) = rollout.branches
    assert other.tokens.tolist() == ids(renderer, "ab<|im_end|>")
    after = "\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
    assert rollout.tokens.tolist() == ids(renderer, f"cd<|im_end|>{after}ef!")
    assert rollout.episode.n_turns == 3 and rollout.finish == "turns"
    assert all(request.sampling == SamplingConfig() for request in requests)


HI = {"messages": [{"role": "user", "content": "hi"}]}
REFUSED = {
    "response_format": {"response_format": {"type": "json_object"}},
    "tool_choice": {"tool_choice": "required"},
    "top_logprobs": {"top_logprobs": 2},
    "chat_template_kwargs": {"chat_template_kwargs": {"enable_thinking": False}},
    "max_token": {"max_token": 3},
    "n": {"n": 0},
    "messages": {
        "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]
    },
}


@pytest.mark.parametrize("param", REFUSED)
def test_what_a_run_cannot_give_is_refused_by_name(param):
    with pytest.raises(RequestError) as refused:
        parse_chat(json.dumps(HI | REFUSED[param]).encode())
    assert refused.value.param == param and refused.value.status == 400


def test_settings_of_the_run_are_accepted_and_dialects_refuse_the_same():
    ignored = parse_chat(json.dumps(HI | dict.fromkeys(RUN_FIELDS, 0.5)).encode())
    assert ignored == parse_chat(json.dumps(HI).encode())
    schema = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
    for parse, body in (
        (parse_messages, HI | {"max_tokens": 3, "tool_choice": {"type": "any"}}),
        (parse_messages, HI | {"max_tokens": 3, "output_config": {"format": schema}}),
        (parse_responses, {"input": "hi", "text": {"format": schema}}),
    ):
        with pytest.raises(RequestError, match="would change the distribution"):
            parse(json.dumps(body).encode())
