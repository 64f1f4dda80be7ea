"""The server, through OpenAI's client, compared with direct calls of the engine.

Tests of jaxrl/serve: __main__.py, app.py, engine_thread.py, metrics.py, model.py,
logit_fields.py, openai_format.py, options.py, response.py, score.py, tokenize.py and structured.
"""

import concurrent.futures
import dataclasses
import json
import math
import re
import socket
import threading

import httpx2 as httpx
import jsonschema
import numpy as np
import openai
import pytest

from jaxrl.config.keys import SamplingConfig, TeacherEndpointConfig
from jaxrl.config.teachers import read_teacher
from jaxrl.http.listener import listener, url
from jaxrl.serve.__main__ import read, require_key, serve, server
from jaxrl.serve.compilation import BackgroundCompiler
from jaxrl.serve.engine_thread import ServingThread
from jaxrl.serve.metrics import ServerMetrics
from jaxrl.serve.model import open_model
from jaxrl.serve.requests.request import parse_completion
from jaxrl.serve.structured.grammar import MAX_QUEUED
from jaxrl.teachers.endpoint import TeacherEndpoint
from jaxrl.types import TrainingSample
from tests.serve.serve_cases import KEY, arguments, direct, metric, running, serving, wait_until

GREEDY = SamplingConfig(temperature=0.0)
HI = [{"role": "user", "content": "What is the sum?"}]
IDS = {"return_token_ids": True}
LONG = {"max_tokens": 900, "extra_body": {"ignore_eos": True}}
MAX_TASKS = 6  # 4 in the batch and 2 in the queue


@pytest.fixture(scope="module")
def served(model_folder):
    """A running server."""
    with serving(arguments(model_folder)) as served:
        yield served
    assert not served.service.engine.alive


@pytest.fixture(scope="module")
def model(served):
    """A second engine with the same model, called directly."""
    return open_model(served.run, max_len=1024)


def idle(served):
    return metric(served, "jaxrl_pages_used") == metric(served, "jaxrl_running") == 0


def test_a_greedy_chat_completion_is_the_engines(served, model):
    prompt = model.renderer.render(HI)
    (tokens, _, finish) = direct(model, [prompt], max_tokens=30, sampling=GREEDY)[0]
    answer = served.client.chat.completions.create(
        model="tiny", messages=HI, max_tokens=30, temperature=0, extra_body=IDS
    )
    choice = answer.choices[0]
    assert choice.token_ids == tokens
    assert choice.message.role == "assistant"
    assert choice.message.content == model.renderer.decode(tokens)
    assert choice.finish_reason == finish
    assert choice.prompt_token_ids == prompt.tolist()
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == len(tokens)
    assert answer.usage.total_tokens == len(prompt) + len(tokens)


def test_stream_chunks_join_to_the_full_response(served):
    body = dict(model="tiny", messages=HI, max_tokens=60, seed=5, n=2, logprobs=True)
    full = served.client.chat.completions.create(**body)
    texts, ends, tokens = ["", ""], ["", ""], [[], []]
    chunks = list(
        served.client.chat.completions.create(
            **body, stream=True, stream_options={"include_usage": True}
        )
    )
    for chunk in chunks[:-1]:
        assert chunk.id == chunks[0].id and chunk.usage is None
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        ends[choice.index] += choice.finish_reason or ""
        tokens[choice.index] += choice.logprobs.content if choice.logprobs else []
    assert len(chunks) > 8  # a dispatch has 8 steps
    assert chunks[-1].choices == [] and chunks[-1].usage == full.usage
    for i, choice in enumerate(full.choices):
        assert texts[i] == choice.message.content
        assert ends[i] == choice.finish_reason
        assert tokens[i] == choice.logprobs.content
    assert texts[0] != texts[1]


def test_a_seed_gives_the_engines_samples(served, model):
    sampling = SamplingConfig(temperature=0.8, top_p=0.9, top_k=20)
    body = dict(temperature=0.8, top_p=0.9, seed=7, max_tokens=20, extra_body={"top_k": 20} | IDS)
    want = direct(model, ["the thing"], max_tokens=20, sampling=sampling, seed=7)[0]
    choices = served.client.completions.create(
        model="tiny", prompt="the thing", n=2, **body
    ).choices
    assert choices[0].token_ids == want[0]
    assert choices[1].token_ids != want[0]
    unseeded = [
        served.client.completions.create(model="tiny", prompt="x", max_tokens=20).choices[0].text
        for _ in range(2)
    ]
    assert unseeded[0] != unseeded[1]  # each request draws its own seed


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_completion_logprobs_are_the_engines(served, model, temperature):
    sampling = SamplingConfig(temperature=temperature)
    want = direct(model, ["The sum"], max_tokens=20, sampling=sampling, seed=3)[0]
    choice = served.client.completions.create(
        model="tiny", prompt="The sum", max_tokens=20, temperature=temperature, seed=3, logprobs=0
    ).choices[0]
    assert choice.logprobs.token_logprobs == want[1]
    assert len(choice.logprobs.tokens) == len(want[0])
    assert choice.logprobs.text_offset[0] == 0
    assert choice.logprobs.text_offset == sorted(choice.logprobs.text_offset)


def test_chat_logprobs_are_the_engines(served, model):
    want = direct(model, [model.renderer.render(HI)], max_tokens=12, sampling=GREEDY)[0]
    content = (
        served.client.chat.completions.create(
            model="tiny", messages=HI, max_tokens=12, temperature=0, logprobs=True
        )
        .choices[0]
        .logprobs.content
    )
    assert [token.logprob for token in content] == want[1]
    tokenizer = model.renderer.tokenizer
    assert [token.token for token in content] == [tokenizer.decode([t]) for t in want[0]]


def test_top_logprobs_and_prompt_logprobs(served, model):
    (tokens, logps, _) = direct(model, ["The sum"], max_tokens=10, sampling=GREEDY)[0]
    prompt = model.renderer.tokenizer("The sum")["input_ids"]
    (choice,) = served.client.completions.create(
        model="tiny", prompt=[*prompt, *tokens], max_tokens=1, temperature=0, logprobs=3, echo=True
    ).choices
    logprobs = choice.logprobs
    n = len(prompt) + len(tokens) + 1
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == n
    assert logprobs.text_offset == sorted(logprobs.text_offset) and logprobs.text_offset[-1] <= len(
        choice.text
    )
    assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
    # The greedy tokens are part of this prompt, and the most likely at their positions.
    np.testing.assert_allclose(logprobs.token_logprobs[len(prompt) : n - 1], logps, atol=1e-5)
    rows = list(zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True))
    for name, logp, top in rows[len(prompt) :]:
        assert len(top) <= 3 and max(top, key=top.get) == name
        assert abs(top[name] - logp) < 1e-5
    content = (
        served.client.chat.completions.create(
            model="tiny", messages=HI, max_tokens=5, seed=1, logprobs=True, top_logprobs=20
        )
        .choices[0]
        .logprobs.content
    )
    for token in content:
        top = [other.logprob for other in token.top_logprobs]
        assert len(top) == 20 and top == sorted(top, reverse=True)
        assert sum(map(math.exp, top)) < 1 and token.logprob <= top[0] + 1e-5


@pytest.mark.parametrize("chat", [True, False])
def test_a_stream_has_the_logprobs_of_the_full_response(served, chat):
    create = served.client.chat.completions.create if chat else served.client.completions.create
    prompt = {"messages": HI, "logprobs": True, "top_logprobs": 4} if chat else {"prompt": "The"}
    body = dict(model="tiny", max_tokens=20, seed=2) | ({} if chat else {"logprobs": 4}) | prompt
    full = create(**body).choices[0].logprobs
    parts = [chunk.choices[0].logprobs for chunk in create(**body, stream=True)]
    for name in ["content"] if chat else ["tokens", "token_logprobs", "top_logprobs"]:
        joined = [one for part in parts if part for one in getattr(part, name)]
        assert joined == getattr(full, name) and len(joined) > 8


def test_logit_bias_min_tokens_and_penalties_change_what_is_sampled(served):
    def tokens(**fields):
        body = {"model": "tiny", "prompt": "The", "max_tokens": 40, "temperature": 0} | fields
        choice = served.client.post("/completions", body=body | IDS, cast_to=dict)["choices"][0]
        return choice["token_ids"]

    assert tokens(logit_bias={"77": 100}) == [77] * 40
    ends = {"logit_bias": {"2": 100}}  # <|im_end|>
    assert tokens(**ends) == [2]
    late = tokens(**ends, min_tokens=5)
    assert len(late) == 6 and late[-1] == 2 and 2 not in late[:-1]
    for penalty in {"frequency_penalty": 2}, {"presence_penalty": 2}, {"repetition_penalty": 100}:
        assert len(set(tokens(ignore_eos=True, **penalty))) > len(set(tokens(ignore_eos=True)))
    text = served.client.completions.create(
        model="tiny", prompt="The", max_tokens=9, logit_bias={"77": 100}
    )
    stop = text.choices[0].text[:1]
    assert len(tokens(logit_bias={"77": 100}, stop=stop, min_tokens=7)) == 8


def test_tokens_of_prompts_and_messages(served, model):
    def post(path, **body):
        return served.client.post(f"{served.base}/{path}", body=body, cast_to=dict)

    found = post("tokenize", prompt="The sum", return_token_strs=True)
    assert found["tokens"] == model.renderer.tokenizer("The sum")["input_ids"]
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["max_model_len"] == 1024
    assert post("detokenize", tokens=found["tokens"]) == {"prompt": "The sum"}
    chat = post("tokenize", messages=HI)["tokens"]
    assert chat == model.renderer.render(HI).tolist()
    assert post("detokenize", tokens=chat)["prompt"].startswith("<|im_start|>user")
    for body in {"prompt": "x", "messages": HI}, {}, {"prompt": ["x"]}:
        with pytest.raises(openai.BadRequestError, match="prompt"):
            post("tokenize", **body)
    with pytest.raises(openai.BadRequestError, match="from 0 to 271"):
        post("detokenize", tokens=[272])


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bc"]}, "maxItems": 3},
        "parent": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/name"}]},
    },
    "required": ["name", "age", "tags", "parent"],
    "additionalProperties": False,
    "$defs": {"name": {"type": "string", "pattern": "^[A-Z][a-z]{1,9}$"}},
}
TOOL = {"type": "function", "function": {"name": "save", "parameters": PERSON}}
STOP = {"type": "function", "function": {"name": "stop"}}


def json_format(schema):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def ask(served, **fields):
    body = dict(model="tiny", messages=HI, max_tokens=380, temperature=1.5, seed=1) | fields
    return served.client.chat.completions.create(**body)


@pytest.mark.thorough
def test_schemas_that_never_compile_leave_other_requests_alone(served):
    def hostile(n):
        schema = {"type": "integer", "multipleOf": 1299709 + n}
        chosen = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        with pytest.raises(openai.APIStatusError) as error:
            served.client.chat.completions.create(model="tiny", messages=HI, response_format=chosen)
        return error.value.status_code

    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        statuses = [pool.submit(hostile, n) for n in range(24)]
        wait_until(lambda: served.service.limits.grammars._n_queued == MAX_QUEUED)
        for _ in range(3):  # while all of the queue waits
            body = dict(model="tiny", messages=HI, max_tokens=8)
            assert served.client.chat.completions.create(**body).choices
            assert httpx.get(f"{served.base}/health").status_code == 200
    statuses = [status.result() for status in statuses]
    assert set(statuses) == {400, 429} and statuses.count(400) >= MAX_QUEUED
    wait_until(lambda: idle(served))


def test_a_random_model_writes_json_of_the_schema_next_to_plain_requests(served):
    plain = dict(max_tokens=40, seed=3)
    want = ask(served, **plain).choices[0].message.content
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        other = pool.submit(ask, served, **plain)
        schema = pool.submit(ask, served, n=2, max_tokens=600, response_format=json_format(PERSON))
        anything = pool.submit(
            ask, served, response_format={"type": "json_object"}, max_tokens=80, stop=["never"]
        )
        assert other.result().choices[0].message.content == want
    for choice in schema.result().choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), PERSON)
    (choice,) = anything.result().choices
    assert choice.message.content.startswith("{") and choice.finish_reason in ("stop", "length")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)


@pytest.mark.parametrize(
    ("tool_choice", "stream"),
    [
        ("required", True),
        pytest.param("required", False, marks=pytest.mark.thorough),
        pytest.param(
            {"type": "function", "function": {"name": "save"}}, False, marks=pytest.mark.thorough
        ),
    ],
)
def test_a_demanded_tool_call_has_valid_arguments(served, tool_choice, stream):
    body = dict(tools=[TOOL, STOP], parallel_tool_calls=False)  # more calls may be cut
    answer = ask(served, **body, tool_choice=tool_choice, stream=stream)
    if stream:
        deltas = [chunk.choices[0] for chunk in answer]
        calls = [call for d in deltas for call in d.delta.tool_calls or []]
        content = "".join(d.delta.content or "" for d in deltas)
        finish = deltas[-1].finish_reason
        assert [call.index for call in calls] == list(range(len(calls)))
    else:
        (choice,) = answer.choices
        calls, content = choice.message.tool_calls, choice.message.content
        finish = choice.finish_reason
    assert calls and not content
    assert finish == ("tool_calls" if tool_choice == "required" else "stop")
    for call in calls:
        arguments = json.loads(call.function.arguments)
        assert call.function.name in ("save", "stop") and len(call.id) == 9
        if call.function.name == "save":
            jsonschema.validate(arguments, PERSON)
        else:
            assert arguments == {}


@pytest.fixture
def scripted(served, model, monkeypatch):
    """Makes the model write a text: `scripted(text)`."""
    engine = served.service.engine._engine
    generate, places = engine.generate, {}

    def write(text):
        script = np.array([*model.renderer.tokenizer(text)["input_ids"], 2], np.int32)

        def scripted_generate(params):
            results = []
            for made in generate(params):
                start = places.get(made.slot, 0)
                tokens = script[start : start + len(made.tokens)]
                places[made.slot] = start + len(tokens)
                ended = places[made.slot] == len(script)
                if ended and not made.finish:
                    engine.free(made.slot)
                n, finish = len(tokens), "stop" if ended else ""
                logp = made.logp[:n]
                results.append(dataclasses.replace(made, tokens=tokens, logp=logp, finish=finish))
            return results

        monkeypatch.setattr(engine, "generate", scripted_generate)

    return write


CALLS = (
    'I call.\n<tool_call>\n{"name": "add", "arguments": {"a": [1, 2], "é": "x"}}\n</tool_call>\n'
    '<tool_call>{"name": "stop", "arguments": {}}</tool_call>'
)


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_of_the_model_are_parsed(served, scripted, stream):
    scripted(CALLS)
    body = dict(tools=[TOOL, STOP], stream=stream, extra_body={"ignore_eos": True})
    answer = ask(served, **body)
    if stream:
        chunks = [chunk.choices[0] for chunk in answer]
        content = "".join(c.delta.content or "" for c in chunks)
        calls = [call for c in chunks for call in c.delta.tool_calls or []]
        finish = chunks[-1].finish_reason
        assert [call.index for call in calls] == [0, 1]
    else:
        (choice,) = answer.choices
        content, calls, finish = (
            choice.message.content,
            choice.message.tool_calls,
            choice.finish_reason,
        )
    assert content == "I call." and finish == "tool_calls"
    assert [call.function.name for call in calls] == ["add", "stop"]
    assert json.loads(calls[0].function.arguments) == {"a": [1, 2], "é": "x"}
    assert calls[0].id != calls[1].id and calls[0].type == "function"
    if not stream:
        one = ask(served, **body, parallel_tool_calls=False).choices[0].message
        assert [call.function.name for call in one.tool_calls] == ["add"]


def test_a_malformed_call_is_content_and_tool_choice_none_parses_nothing(served, scripted):
    def n_malformed():
        lines = httpx.get(f"{served.base}/metrics").text.splitlines()
        [value] = [x.split()[1] for x in lines if x.startswith("jaxrl_malformed_calls_total ")]
        return float(value)

    scripted("<tool_call>{not json}</tool_call>")
    before = n_malformed()
    malformed = ask(served, tools=[STOP], extra_body={"ignore_eos": True}).choices[0]
    assert malformed.message.content == "<tool_call>{not json}</tool_call>"
    assert malformed.message.tool_calls is None and malformed.finish_reason == "stop"
    assert n_malformed() == before + 1
    none = ask(served, tools=[STOP], tool_choice="none", extra_body={"ignore_eos": True})
    assert none.choices[0].message.content == "<tool_call>{not json}</tool_call>"


def test_tools_calls_and_results_are_in_the_prompt(served, model):
    call = {"name": "stop", "arguments": "{}"}
    messages = [
        *HI,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c0", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "c0", "content": "stopped"},
    ]
    answer = ask(served, messages=messages, tools=[STOP], max_tokens=1, extra_body=IDS)
    text = model.renderer.decode(answer.choices[0].prompt_token_ids, skip_special=False)
    assert '{"type": "function", "function": {"name": "stop"}}' in text
    assert '<tool_call>{"name": "stop", "arguments": {}}</tool_call>' in text
    assert "<|im_start|>tool\nstopped" in text


def test_template_arguments_of_a_request_change_its_prompt(served, model):
    def prompt(**fields):
        answer = ask(served, max_tokens=1, extra_body=IDS | fields)
        return model.renderer.decode(answer.choices[0].prompt_token_ids, skip_special=False)

    thinking = {"chat_template_kwargs": {"thinking": True}}
    assert prompt(**thinking) == prompt() + "<think>\n"
    body = {"messages": HI} | thinking
    tokens = served.client.post(f"{served.base}/tokenize", body=body, cast_to=dict)["tokens"]
    assert model.renderer.decode(tokens, skip_special=False) == prompt(**thinking)


INVALID_CHAT = {
    "chat_template_kwargs": {"chat_template_kwargs": {"thinkin": True}},
    "tools[1]": {"tools": [STOP, {"type": "function", "function": {"name": "f", "parameters": 5}}]},
    "tools[0]": {"tools": [{"function": {"name": "f", "parameters": {"properties": {"a": 1}}}}]},
    "tools": {
        "tools": [{"function": {"name": "f", "parameters": {"not": {}}}}],
        "tool_choice": "required",
    },
    "tool_choice": {"tools": [STOP], "tool_choice": {"function": {"name": "other"}}},
    "messages": {"messages": [{"role": "assistant", "tool_calls": [{"function": 1}]}]},
    "min_tokens": {"response_format": {"type": "json_object"}, "min_tokens": 1},
    "ignore_eos": {"response_format": {"type": "json_object"}, "ignore_eos": True},
    "response_format": {"response_format": json_format({"type": "object", "properties": 3})},
}
UNSUPPORTED_FORMATS = [
    json_format({"type": "array", "uniqueItems": True}),
    json_format({"type": "string", "not": {}, "x-guidance": {"lenient": True}}),
    json_format({"$ref": "http://localhost/schema"}),
    json_format({"$ref": "#"}),
    json_format({"type": "string", "description": "x" * (64 << 10)}),
    {"type": "json_schema"},
    {"type": "grammar"},
    "json",
]


def rejected_chat(served, body):
    with pytest.raises(openai.BadRequestError) as rejected:
        served.client.post("/chat/completions", body={"messages": HI} | body, cast_to=object)
    return rejected.value


@pytest.mark.parametrize("param", INVALID_CHAT)
def test_an_invalid_tool_or_format_is_rejected_with_the_name_of_the_field(served, param):
    assert rejected_chat(served, INVALID_CHAT[param]).param == param


def test_schemas_that_a_grammar_cannot_express_are_rejected(served):
    for response_format in UNSUPPORTED_FORMATS:
        error = rejected_chat(served, {"response_format": response_format})
        assert error.param == "response_format" and len(error.message) < 1200
    both = {"tools": [STOP], "tool_choice": "required", "response_format": {"type": "json_object"}}
    assert rejected_chat(served, both).param == "response_format"


def test_prompt_logprobs_have_vllms_form(served, model):
    (tokens, logps, _) = direct(model, ["The sum"], max_tokens=10, sampling=GREEDY)[0]
    prompt = [*model.renderer.tokenizer("The sum")["input_ids"], *tokens]
    keys = dict(model="tiny", prompt=prompt, max_tokens=1, temperature=1)
    answer = served.client.completions.create(**keys, extra_body={"prompt_logprobs": 3})
    rows = answer.choices[0].prompt_logprobs
    assert rows[0] is None and len(rows) == len(prompt)
    for token, logp, row in zip(tokens, logps, rows[-len(tokens) :], strict=True):
        assert len(row) == 3 and row[str(token)]["rank"] == 1  # a greedy token is the most likely
        assert abs(row[str(token)]["logprob"] - logp) < 1e-5
    (row,) = (
        served.client.completions.create(**keys, extra_body={"prompt_logprobs": 0})
        .choices[0]
        .prompt_logprobs[-1:]
    )
    assert list(row) == [str(tokens[-1])]
    with pytest.raises(openai.BadRequestError, match="a stream has no prompt logprobs"):
        served.client.completions.create(**keys, stream=True, extra_body={"prompt_logprobs": 1})


def test_the_server_is_a_teacher(served, model, monkeypatch):
    monkeypatch.setenv("TEACHER_KEY", KEY)
    teacher, _ = read_teacher("algorithm.teacher", f"{served.base}/v1")
    cfg = TeacherEndpointConfig(api_key_env="TEACHER_KEY")
    endpoint = TeacherEndpoint(teacher, cfg, k=3, n_vocab=1000)
    endpoint.open(model.renderer.tokenizer, max_len=64)
    (tokens, logps, _) = direct(model, ["The sum"], max_tokens=10, sampling=GREEDY)[0]
    prompt = np.array(model.renderer.tokenizer("The sum")["input_ids"], np.int32)
    sample = TrainingSample(prompt, np.array(tokens, np.int32), np.ones(len(tokens), bool))
    [found], counts = endpoint.read([sample])
    assert (counts.requests, counts.failed) == (1, 0) and found is not None
    np.testing.assert_allclose(found.logp, logps, atol=1e-5)
    np.testing.assert_array_equal(found.ids[:, 0], tokens)  # greedy ones are the most likely
    np.testing.assert_allclose(found.top_logp[:, 0], logps, atol=1e-5)


def test_several_prompts_as_text_or_ids_and_echo(served, model):
    prompts = ["The sum", "What is"]
    ids = [model.renderer.tokenizer(p)["input_ids"] for p in prompts]
    want = direct(model, prompts, max_tokens=5, sampling=GREEDY)
    for prompt in (prompts, ids):
        answer = served.client.completions.create(
            model="tiny", prompt=prompt, max_tokens=5, temperature=0, echo=True, extra_body=IDS
        )
        assert [c.token_ids for c in answer.choices] == [tokens for tokens, _, _ in want]
        for choice, text, (tokens, _, _) in zip(answer.choices, prompts, want, strict=True):
            assert choice.text == text + model.renderer.decode(tokens)
        assert answer.usage.prompt_tokens == sum(map(len, ids))


def test_results_do_not_depend_on_concurrent_requests(served, model):
    prompts = ["What is the sum?" * (i + 1) for i in range(MAX_TASKS)]
    want = direct(model, prompts, max_tokens=25, sampling=GREEDY)

    def generate(prompt):
        client = openai.OpenAI(base_url=f"{served.base}/v1", api_key=KEY, max_retries=0)
        answer = client.completions.create(
            model="tiny", prompt=prompt, max_tokens=25, temperature=0, extra_body=IDS
        )
        return answer.choices[0].token_ids

    with concurrent.futures.ThreadPoolExecutor(MAX_TASKS) as pool:
        assert list(pool.map(generate, prompts)) == [tokens for tokens, _, _ in want]


def test_a_stop_string_ends_the_response_and_is_not_returned(served):
    body = dict(model="tiny", prompt="The", max_tokens=200, seed=1, extra_body={"ignore_eos": True})
    text = served.client.completions.create(**body).choices[0].text
    stop = text[30:33]
    for stream in (False, True):
        answer = served.client.completions.create(**body, stop=["never there", stop], stream=stream)
        chunks = list(answer) if stream else [answer]
        assert "".join(c.choices[0].text for c in chunks) == text[: text.index(stop)]
        assert chunks[-1].choices[0].finish_reason == "stop"
    assert answer is not None
    full = served.client.completions.create(**body, stop=stop)
    assert full.usage.completion_tokens < 200
    wait_until(lambda: idle(served))


@pytest.fixture
def held(served, monkeypatch):
    """Blocks all dispatches of the engine until `held.set()`."""
    engine, gate = served.service.engine._engine, threading.Event()
    generate = engine.generate

    def wait_then_generate(params):
        assert gate.wait(30)
        return generate(params)

    monkeypatch.setattr(engine, "generate", wait_then_generate)
    yield gate
    gate.set()
    wait_until(lambda: idle(served))


def test_a_stream_continues_during_a_long_prefill(served, model, monkeypatch):
    """Every dispatch prefills at most 128 prompt tokens and decodes a token of the stream."""
    engine, log = served.service.engine._engine, []
    generate = engine.generate

    def logged(params):
        before = engine._stats.n_prefill_tokens
        made = generate(params)
        log.append((engine._stats.n_prefill_tokens - before, {one.slot for one in made}))
        return made

    monkeypatch.setattr(engine, "generate", logged)
    ids = np.random.default_rng(5).integers(3, 272, 900).tolist()
    with served.client.chat.completions.create(
        model="tiny", messages=HI, stream=True, **LONG
    ) as stream:
        next(iter(stream))
        answer = served.client.completions.create(
            model="tiny", prompt=ids, max_tokens=3, temperature=0.0, extra_body=IDS
        )
    wait_until(lambda: idle(served))
    [(want, _, _)] = direct(model, [ids], max_tokens=3, sampling=GREEDY)
    assert answer.choices[0].token_ids == want
    streamed = log[0][1]
    parts = [made for n, made in log[1:] if n > 0]
    assert max(n for n, _ in log) <= 128 and len(parts) == 8  # of 899 keys
    assert all(streamed <= made for made in parts)


SAMPLED = "jaxrl_sampled_tokens_total"
CANCELLED = 'jaxrl_requests_total{endpoint="chat",outcome="cancelled"}'


def test_closing_a_stream_frees_its_pages(served):
    before, n_cancelled = metric(served, SAMPLED), metric(served, CANCELLED)
    stream = served.client.chat.completions.create(model="tiny", messages=HI, stream=True, **LONG)
    for _ in zip(range(3), stream, strict=False):
        pass
    assert metric(served, "jaxrl_pages_used") > 0
    stream.close()
    wait_until(lambda: idle(served) and metric(served, CANCELLED) == n_cancelled + 1)
    assert 0 < metric(served, SAMPLED) - before < 900  # generation stopped early


def test_a_client_timeout_frees_its_pages(served, held):
    before, n_cancelled = metric(served, SAMPLED), metric(served, CANCELLED)
    with pytest.raises(openai.APITimeoutError):
        served.client.chat.completions.create(model="tiny", messages=HI, timeout=1, n=4, **LONG)
    wait_until(lambda: metric(served, CANCELLED) == n_cancelled + 1)
    held.set()
    wait_until(lambda: idle(served))
    # Only the blocked dispatch, and the one after it.
    assert metric(served, SAMPLED) - before <= 2 * 4 * 8


def test_overload_is_rejected_at_once_and_affects_no_other_request(served, held):
    def generate(_):
        return served.client.completions.create(model="tiny", prompt="The", max_tokens=5, seed=1)

    with concurrent.futures.ThreadPoolExecutor(MAX_TASKS) as pool:
        answers = pool.map(generate, range(MAX_TASKS))
        wait_until(lambda: len(served.service.engine._accepted) == MAX_TASKS)
        with pytest.raises(openai.RateLimitError, match="6 responses are in progress") as refused:
            generate(None)
        assert refused.value.response.headers["retry-after"] == "1"
        held.set()
        assert len({a.choices[0].text for a in answers}) == 1
    assert generate(None).choices[0].text  # accepted again


def test_a_request_ends_at_its_timeout(served, held):
    service = dataclasses.replace(served.service, timeout_s=0.2)
    web = server(service, served.options)
    web.config.lifespan = "off"  # the engine is already running
    with listener("127.0.0.1", 0) as listening, running(web, listening):
        client = openai.OpenAI(base_url=f"{url(listening)}/v1", api_key=KEY, max_retries=0)
        with pytest.raises(openai.InternalServerError, match=r"longer than 0\.2 s") as late:
            client.completions.create(model="tiny", prompt="The")
        assert late.value.status_code == 504
        with pytest.raises(openai.APIError, match=r"longer than 0\.2 s"):
            list(client.completions.create(model="tiny", prompt="The", stream=True))
        held.set()


def test_a_failed_dispatch_is_reported_and_the_next_request_succeeds(served, monkeypatch, caplog):
    engine = served.service.engine._engine

    def fail(params):
        monkeypatch.undo()
        raise RuntimeError("no memory")

    monkeypatch.setattr(engine, "generate", fail)
    with pytest.raises(openai.InternalServerError, match="the engine failed"):
        served.client.completions.create(model="tiny", prompt="The")
    assert "no memory" in caplog.text
    assert metric(served, "jaxrl_engine_failures_total") == 1
    assert served.client.completions.create(model="tiny", prompt="The", max_tokens=5).choices
    wait_until(lambda: idle(served))


def test_the_model_endpoints_require_the_api_key(served):
    wrong = openai.OpenAI(base_url=f"{served.base}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError, match="API key is missing or wrong"):
        wrong.chat.completions.create(model="tiny", messages=HI)
    with pytest.raises(openai.AuthenticationError):
        wrong.models.list()
    assert httpx.post(f"{served.base}/v1/completions", json={"prompt": "x"}).status_code == 401
    assert httpx.get(f"{served.base}/health").json() == {"status": "ok"}
    assert httpx.get(f"{served.base}/metrics").status_code == 200


def test_an_api_key_is_sent_as_bearer_and_may_have_any_characters(served):
    service = dataclasses.replace(served.service, api_key="schlüssel ключ")
    key = service.api_key.encode()
    statuses = {b"Bearer " + key: 200, b"bearer  " + key: 200}
    statuses |= {key: 401, b"Basic " + key: 401, b"Bearer": 401, b"Bearer \xff": 401, b"": 401}
    statuses |= {b"Bearer " + service.api_key.encode("utf-16"): 400}  # null bytes are not HTTP
    web = server(service, served.options)
    web.config.lifespan = "off"  # the engine is already running
    with listener("127.0.0.1", 0) as listening, running(web, listening):
        for header, status in statuses.items():
            with socket.create_connection(listening.getsockname()) as client:
                lines = b"GET /v1/models HTTP/1.1", b"Host: x", b"Authorization: " + header
                client.sendall(b"\r\n".join([*lines, b"", b""]))
                assert int(client.recv(4096).split()[1]) == status, header


def test_the_server_answers_while_a_request_is_parsed(served, monkeypatch):
    parsing, gate = threading.Event(), threading.Event()

    def wait_then_parse(*args):
        parsing.set()
        assert gate.wait(30)
        return parse_completion(*args)

    monkeypatch.setattr("jaxrl.serve.app.parse_completion", wait_then_parse)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        body = dict(model="tiny", prompt="The", max_tokens=1)
        answer = pool.submit(served.client.completions.create, **body)
        assert parsing.wait(30)
        assert httpx.get(f"{served.base}/health").json() == {"status": "ok"}
        assert not answer.done()
        gate.set()
        assert answer.result().choices


def test_the_model_has_its_name_and_context_length(served):
    (listed,) = served.client.models.list().data
    assert listed.id == "tiny" and listed.max_model_len == 1024
    assert served.client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="not served here; use 'tiny'"):
        served.client.models.retrieve("another")
    with pytest.raises(openai.NotFoundError, match="'another' is not served here; use 'tiny'"):
        served.client.completions.create(model="another", prompt="x")


INVALID = {
    "context length is 1024 tokens; the request has 2000 in the prompt": {"prompt": [5] * 2000},
    "has 1000 in the prompt and 100 for the response": {"prompt": [5] * 1000, "max_tokens": 100},
    "temperature=-1.0 is out of range": {"temperature": -1},
    "top_p='a' is of type str; set a float": {"top_p": "a"},
    "unknown field temprature; did you mean temperature": {"temprature": 1},
    "unknown field stream_options.usage": {"stream_options": {"usage": True}},
    "best_of is not supported": {"best_of": 2},
    "frequency_penalty=2.5 is out of range": {"frequency_penalty": 2.5},
    "logit_bias has the token id '272'": {"logit_bias": {"272": 1}},
    "min_tokens is 9 and the response may have 5": {"min_tokens": 9, "max_tokens": 5},
    "with n = 7 are 7 choices": {"n": 7},
    "stop must be a non-empty string": {"stop": [""]},
    "token ids of a prompt must be 0 to 271": {"prompt": [272]},
    "prompt must be a string": {"prompt": [[1], "a"]},
    "the prompt is empty": {"prompt": ""},
    "max_tokens is 0": {"max_tokens": 0},
    "each below 272": {"stop_token_ids": [1 << 40]},
    "logprobs=21 is out of range": {"logprobs": 21},
    "a stream has no prompt logprobs": {"logprobs": 1, "echo": True, "stream": True},
}


@pytest.mark.parametrize("message", INVALID)
def test_an_invalid_request_gets_a_specific_error(served, message):
    body = {"model": "tiny", "prompt": "x"} | INVALID[message]
    with pytest.raises(openai.BadRequestError, match=re.escape(message)):
        served.client.post("/completions", body=body, cast_to=object)


@pytest.mark.parametrize(
    "messages",
    [[], "hi", ["hi"], [{"role": "user"}], [{"role": "user", "content": [{"type": "image_url"}]}]],
)
def test_messages_must_be_text(served, messages):
    with pytest.raises(openai.BadRequestError, match="message") as rejected:
        served.client.post("/chat/completions", body={"messages": messages}, cast_to=object)
    assert rejected.value.param == "messages"


def test_content_parts_are_joined(served):
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "the sum?"}]
    body = dict(model="tiny", max_tokens=5, temperature=0)
    answers = [
        served.client.chat.completions.create(
            messages=[{"role": "user", "content": content}], **body
        )
        for content in (parts, "What is the sum?")
    ]
    assert answers[0].usage == answers[1].usage
    assert answers[0].choices[0].message == answers[1].choices[0].message


def test_unsupported_fields_without_effect_are_accepted(served):
    served.client.completions.create(
        model="tiny",
        prompt="x",
        max_tokens=2,
        presence_penalty=0,
        logit_bias={},
        user="me",
        best_of=1,
    )


LARGE = b"[" * (9 << 20)
HALF = r'{"prompt": "half a pair: \ud800"}'


def test_all_errors_have_the_openai_format(served):
    headers = {"Authorization": f"Bearer {KEY}"}
    for response, status in (
        (httpx.get(f"{served.base}/v2"), 404),
        (httpx.get(f"{served.base}/v1/completions"), 405),
        (httpx.post(f"{served.base}/v1/completions", content="{", headers=headers), 400),
        (httpx.post(f"{served.base}/v1/completions", content=HALF, headers=headers), 400),
        (httpx.post(f"{served.base}/v1/completions", json=[], headers=headers), 400),
        (httpx.post(f"{served.base}/v1/completions", content=LARGE, headers=headers), 413),
        (httpx.post(f"{served.base}/v1/completions", content=iter([LARGE]), headers=headers), 413),
    ):
        assert response.status_code == status
        assert response.json()["error"]["message"]


def test_shutdown_finishes_running_requests(served, model):
    thread = ServingThread(model.engine, model.params, model.mesh, ServerMetrics(), max_tasks=4)
    compiler = BackgroundCompiler(model.engine, model.params, model.mesh)
    service = dataclasses.replace(served.service, engine=thread, compiler=compiler)
    web = server(service, served.options)
    with listener("127.0.0.1", 0) as listening, running(web, listening):
        client = openai.OpenAI(base_url=f"{url(listening)}/v1", api_key=KEY, max_retries=0)
        stream = client.completions.create(model="tiny", prompt="x", stream=True, seed=1, **LONG)
        first = next(iter(stream))
        web.should_exit = True
        chunks = [first, *stream]
        assert chunks[-1].choices[0].finish_reason == "length"
        wait_until(lambda: not thread.alive)
        with pytest.raises(openai.APIConnectionError):
            client.completions.create(model="tiny", prompt="x")


def test_the_command_line_reports_errors(model_folder, tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert serve(*read([f"--model={model_folder}", f"--port={port}"])) == 1
    assert (
        f"cannot listen on 127.0.0.1, port {port} (Address already in use)"
        in capsys.readouterr().err
    )
    assert serve(*read([f"--model={tmp_path / 'nowhere'}", "--port=0"])) == 1
    assert "there is no model folder" in capsys.readouterr().err
    with pytest.raises(SystemExit, match=r"did you mean rollout\.max_num_seqs"):
        serve(*read(["--model=x", "--config.rollout.max_num_seq=3"]))
    with pytest.raises(SystemExit, match="page_len=0 is out of range"):
        serve(*read(["--model=x", "--config.rollout.page_len=0"]))
    for argv, message in (["--mode=x"], "--model"), (["--model=x", "--speed=1"], "--speed"):
        with pytest.raises(SystemExit):
            read(argv)
        assert message in capsys.readouterr().err


def test_a_server_that_other_machines_reach_requires_a_key(monkeypatch, capsys):
    monkeypatch.setattr("jaxrl.serve.__main__.open_model", lambda *_, **__: 1 / 0)
    monkeypatch.delenv("JAXRL_API_KEY", raising=False)
    for host in "0.0.0.0", "", "::":
        assert serve(*read(["--model=x", "--port=0", f"--host={host}"])) == 1
        assert "other machines can reach" in capsys.readouterr().err
    for options in ["--host=0.0.0.0", "--api-key=k"], ["--host=0.0.0.0", "--no-api-key"], []:
        with pytest.raises(ZeroDivisionError):  # allowed to load the model
            serve(*read(["--model=x", "--port=0", *options]))
    for host in "127.0.0.1", "localhost", "::1":
        with listener(host, 0) as listening:
            require_key(read(["--model=x"])[0], listening)


def test_limits_that_are_too_small_are_errors(capsys):
    for option, message in {
        "--max-body-mib=0": "--max-body-mib=0 is too small; set 1 or more",
        "--read-timeout-s=0": "--read-timeout-s=0.0 is too small",
        "--max-bodies-mib=7": "--max-bodies-mib must be at least --max-body-mib",
        "--no-api-key": "--no-api-key contradicts",
    }.items():
        with pytest.raises(SystemExit):
            read(["--model=x", "--api-key=k", option])
        assert message in capsys.readouterr().err


def respond(served, **fields):
    body = dict(
        model="tiny", input="What is the sum?", max_output_tokens=40, extra_body={"seed": 4}
    )
    return served.client.responses.create(**body | fields)


def test_a_response_is_the_chat_completion_of_its_input(served):
    chat = ask(served, max_tokens=40, seed=4, temperature=1.0)
    found = respond(served)
    assert found.output_text == chat.choices[0].message.content
    assert found.usage.input_tokens == chat.usage.prompt_tokens
    assert found.usage.total_tokens == chat.usage.total_tokens
    cut = chat.choices[0].finish_reason == "length"
    assert found.status == ("incomplete" if cut else "completed")
    parts = [{"type": "input_text", "text": "What is "}, {"type": "input_text", "text": "the sum?"}]
    same = respond(served, input=[{"role": "user", "content": parts}])
    assert same.output_text == found.output_text
    system = [{"role": "system", "content": "Be kind."}, *HI]
    kind = ask(served, messages=system, max_tokens=40, seed=4, temperature=1.0)
    assert respond(served, instructions="Be kind.").output_text == kind.choices[0].message.content


def test_the_events_of_a_response_give_the_full_response(served):
    include = ["message.output_text.logprobs"]
    full = respond(served, top_logprobs=2, include=include)
    events = list(respond(served, top_logprobs=2, include=include, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:-1] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
    ]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 3 and "".join(event.delta for event in deltas) == full.output_text
    final = events[-1].response
    assert final.output_text == full.output_text and final.usage == full.usage
    logprobs = final.output[0].content[0].logprobs
    assert logprobs == full.output[0].content[0].logprobs and len(logprobs[0].top_logprobs) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_has_the_models_calls_and_follows_a_schema(served, scripted, stream):
    def final(**fields):
        no_end = {"seed": 1, "logit_bias": {"2": -100}}  # the script has the end
        body = dict(stream=stream, max_output_tokens=600, extra_body=no_end)
        answer = respond(served, **body | fields)
        return list(answer)[-1].response if stream else answer

    text = {"format": {"type": "json_schema", "name": "person", "schema": PERSON}}
    jsonschema.validate(json.loads(final(text=text, extra_body={}).output_text), PERSON)
    scripted(CALLS)
    tool = {"type": "function", "name": "stop", "parameters": {"type": "object", "properties": {}}}
    done = final(tools=[tool])
    message, *calls = done.output
    assert message.content[0].text == "I call."
    assert [call.name for call in calls] == ["add", "stop"] and done.status == "completed"
    assert json.loads(calls[0].arguments) == {"a": [1, 2], "é": "x"}
    turns = [
        {"role": "user", "content": "Go."},
        *(call.model_dump(exclude_none=True) for call in calls),
        *({"type": "function_call_output", "call_id": c.call_id, "output": "ok"} for c in calls),
    ]
    assert final(input=turns, tools=[tool]).output


def test_invalid_fields_of_a_response_are_named(served):
    for param, body in {
        "input": {"input": []},
        "previous_response_id": {"previous_response_id": "resp_1"},
        "text": {"text": {"format": {"type": "json_schema", "schema": {"not": {}}}}},
        "max_output_token": {"max_output_token": 3},
        "include": {"include": ["file_search_call.results"]},
        "tools[0]": {"tools": [{"type": "web_search"}]},
        "instructions": {"instructions": 5},
    }.items():
        with pytest.raises(openai.BadRequestError) as rejected:
            served.client.post("/responses", body={"input": "x"} | body, cast_to=object)
        assert rejected.value.param == param, rejected.value


@pytest.fixture
def claude(served):
    """Anthropic's client of the server."""
    anthropic = pytest.importorskip("anthropic")
    return anthropic.Anthropic(base_url=served.base, api_key=KEY, max_retries=0)


COLD = {"temperature": 0.0}
GO = dict(model="tiny", max_tokens=40, messages=HI, extra_body=COLD)


@pytest.mark.thorough
def test_a_message_is_the_chat_completion_of_its_input(served, claude):
    system = [{"role": "system", "content": "Be kind."}, *HI]
    chat = ask(served, messages=system, max_tokens=40, temperature=0.0)
    found = claude.messages.create(**GO, system="Be kind.")
    text = chat.choices[0].message.content
    assert "".join(block.text for block in found.content) == text
    assert found.usage.input_tokens == chat.usage.prompt_tokens
    assert found.usage.output_tokens == chat.usage.completion_tokens
    cut = chat.choices[0].finish_reason == "length"
    assert found.stop_reason == ("max_tokens" if cut else "end_turn")
    counted = claude.messages.count_tokens(model="tiny", messages=HI, system="Be kind.")
    assert counted.input_tokens == chat.usage.prompt_tokens
    with claude.messages.stream(**GO, system="Be kind.") as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert len(pieces) > 3 and "".join(pieces) == text
    assert [b.text for b in final.content] == [b.text for b in found.content]
    assert final.stop_reason == found.stop_reason
    assert final.usage.output_tokens == found.usage.output_tokens
    stop = text[5:8]
    stopped = claude.messages.create(**GO, system="Be kind.", stop_sequences=[stop])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)


@pytest.mark.parametrize("stream", [False, True])
def test_a_message_has_thinking_and_calls_that_come_back_as_blocks(
    served, claude, scripted, stream
):
    """The blocks of a reply and the results of its calls are the next prompt's messages."""
    scripted(f"<think>\nWhy?\n</think>\n\n{CALLS}")
    schema = {"type": "object", "properties": {}}
    tools = [{"name": name, "input_schema": schema} for name in ("add", "stop")]
    body = dict(GO, max_tokens=600, tools=tools, extra_body={"logit_bias": {"2": -100}})
    if stream:
        with claude.messages.stream(**body) as events:
            done = events.get_final_message()
    else:
        done = claude.messages.create(**body)
    thought, text, *calls = done.content
    assert (thought.thinking, text.text, done.stop_reason) == ("Why?", "I call.", "tool_use")
    assert [call.name for call in calls] == ["add", "stop"]
    assert calls[0].input == {"a": [1, 2], "é": "x"}
    results = [{"type": "tool_result", "tool_use_id": c.id, "content": "ok"} for c in calls]
    turns = [{"role": "assistant", "content": done.content}, {"role": "user", "content": results}]
    again = claude.messages.count_tokens(model="tiny", messages=[*HI, *turns], tools=tools)
    functions = [
        {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.input}}
        for c in calls
    ]
    messages = [
        *HI,
        {"role": "assistant", "content": "I call.", "tool_calls": functions},
        *({"role": "tool", "content": "ok"} for _ in calls),
    ]
    shown = [
        {"type": "function", "function": {"name": tool["name"], "parameters": schema}}
        for tool in tools
    ]
    body = {"messages": messages, "tools": shown}
    headers = {"Authorization": f"Bearer {KEY}"}
    same = httpx.post(f"{served.base}/tokenize", json=body, headers=headers).json()
    assert again.input_tokens == same["count"]


def test_errors_of_messages_have_anthropics_format(served, claude):
    import anthropic

    for kind, status, more in (
        (anthropic.BadRequestError, "invalid_request_error", {"extra_body": {"max_token": 3}}),
        (anthropic.BadRequestError, "invalid_request_error", {"max_tokens": 2000}),
        (anthropic.NotFoundError, "not_found_error", {"model": "other"}),
    ):
        with pytest.raises(kind) as refused:
            claude.messages.create(**GO | more)
        assert refused.value.body["error"]["type"] == status
        assert refused.value.body["type"] == "error" and refused.value.body["error"]["message"]
    with pytest.raises(anthropic.AuthenticationError):
        claude.with_options(api_key="wrong").messages.create(**GO)
    bearer = claude.with_options(api_key=None, auth_token=KEY)
    assert bearer.messages.count_tokens(model="tiny", messages=HI).input_tokens > 0
