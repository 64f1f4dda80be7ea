"""OpenAI's client with JSON schemas and tools against a served tiny model with random weights."""

import concurrent.futures
import json

import jsonschema
import pytest

from tests.serve.serve_cases import arguments, serving

HI = [{"role": "user", "content": "What is the sum?"}]
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"type": "number"}},
    "required": ["x", "y"],
    "additionalProperties": False,
}
SCHEMAS = [
    {"type": "boolean"},
    {"enum": ["red", "green", 7, None]},
    {"type": "integer", "minimum": -50, "maximum": 1000},
    {"type": "string", "minLength": 2, "maxLength": 9},
    {"type": "string", "pattern": "^[a-f0-9]{4}-[a-f0-9]{4}$"},
    {"type": "string", "format": "date"},
    {"type": "array", "items": POINT, "minItems": 1, "maxItems": 3},
    {"anyOf": [POINT, {"type": "null"}]},
    {"const": {"a": [1, 2]}},
    {
        "type": "object",
        "properties": {"left": {"$ref": "#/$defs/leaf"}, "right": {"$ref": "#/$defs/leaf"}},
        "required": ["left"],
        "additionalProperties": False,
        "$defs": {"leaf": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
    },
]
TOOLS = [
    {"type": "function", "function": {"name": "move", "parameters": POINT}},
    {"type": "function", "function": {"name": "stop"}},
]


@pytest.fixture(scope="module", params=[0, 3], ids=["plain", "speculative"])
def served(request, model_folder):
    more = [f"--config.rollout.spec_tokens={request.param}", "--max-waiting=64"]
    with serving(arguments(model_folder, *more)) as served:
        yield served


def ask(served, **fields):
    body = dict(model="tiny", messages=HI, max_tokens=400, temperature=1.5) | fields
    return served.client.chat.completions.create(**body)


@pytest.mark.slow
def test_every_response_is_valid_next_to_others(served):
    def check(case):
        schema, seed = case
        chosen = {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": schema, "strict": True},
        }
        [choice] = ask(served, seed=seed, response_format=chosen, stop=["\0"]).choices
        if choice.finish_reason == "stop":
            jsonschema.validate(json.loads(choice.message.content), schema)
        return choice.finish_reason

    plain = dict(max_tokens=60, seed=1)
    want = ask(served, **plain).choices[0].message.content
    cases = [(schema, seed) for schema in SCHEMAS for seed in range(4)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        plain_answers = [pool.submit(ask, served, **plain) for _ in range(4)]
        reasons = list(pool.map(check, cases))
        for answer in plain_answers:
            assert answer.result().choices[0].message.content == want
    assert reasons.count("stop") > 0.9 * len(reasons)  # numbers of a random model may be long


@pytest.mark.slow
def test_a_tool_loop_of_the_client(served):
    messages, names = [*HI], set()
    for seed in range(6):
        [choice] = ask(
            served, messages=messages, tools=TOOLS, tool_choice="required", seed=seed
        ).choices
        if choice.finish_reason == "length":
            continue
        assert choice.finish_reason == "tool_calls"
        messages = [*HI, choice.message.model_dump(exclude_none=True)]
        for call in choice.message.tool_calls:
            names.add(call.function.name)
            arguments = json.loads(call.function.arguments)
            if call.function.name == "move":
                jsonschema.validate(arguments, POINT)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "done"})
    assert names == {"move", "stop"}
