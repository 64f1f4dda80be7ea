"""Tests of jaxrl/tool_calls: schema.py and functions.py."""

import time

import pytest

from jaxrl.tool_calls.functions import function_schema
from jaxrl.tool_calls.schema import arguments_error, check_tool

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer", "minimum": 1},
                "unit": {"enum": ["C", "F"]},
            },
            "required": ["city"],
        },
    },
}


def changed(**function):
    return {"type": "function", "function": WEATHER["function"] | function}


def test_a_valid_tool_is_returned_and_a_bare_function_completed():
    assert check_tool(WEATHER) == WEATHER
    assert check_tool(WEATHER["function"]) == WEATHER
    assert check_tool({"name": "now"}) == {"type": "function", "function": {"name": "now"}}


@pytest.mark.parametrize(
    ("tool", "reason"),
    [
        ("search", "has not the form"),
        ({"type": "function", "function": {"description": "x"}}, "has not the form"),
        ({"type": "web_search", "function": {"name": "f"}}, "has the type 'web_search'"),
        (changed(name="get weather"), "is not made of"),
        (changed(name="x" * 200), "is not made of"),
        (changed(description=5), "the description of the tool 'get_weather' is 5"),
        (changed(parameters=[]), "are [], not a JSON schema"),
        (changed(parameters={"type": "array"}), 'have the type "array"'),
        (
            changed(parameters={"type": "object", "properties": {"a": {"type": "text"}}}),
            "properties.a.type: 'text' is not valid",
        ),
        (changed(parameters={"type": "object", "required": "a"}), "required: 'a' is not of type"),
    ],
)
def test_an_invalid_tool_is_refused_with_the_reason(tool, reason):
    with pytest.raises(ValueError) as caught:
        check_tool(tool)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"city": "Rome"}, ""),
        ({"city": "Rome", "days": 2, "unit": "C"}, ""),
        ({}, "'city' is a required property"),
        ({"city": 5}, "city: 5 is not of type 'string'"),
        ({"city": "Rome", "days": "2"}, "days: '2' is not of type 'integer'"),
        ({"city": "Rome", "days": 0}, "days: 0 is less than the minimum of 1"),
        ({"city": "Rome", "town": "x"}, "unknown arguments town; it has city, days, unit"),
    ],
)
def test_arguments_are_compared_with_the_schema(arguments, error):
    assert arguments_error(WEATHER, arguments) == error


def test_tools_without_parameters_and_with_free_ones():
    assert arguments_error({"function": {"name": "now"}}, {}) == ""
    assert "it has none" in arguments_error({"function": {"name": "now"}}, {"a": 1})
    free = changed(parameters={"type": "object", "additionalProperties": True})
    assert arguments_error(free, {"a": 1}) == ""


def test_a_reference_to_another_document_is_not_followed(tmp_path):
    other = tmp_path / "other.json"
    other.write_text("{}")
    tool = changed(parameters={"type": "object", "properties": {"a": {"$ref": other.as_uri()}}})
    assert "cannot be followed" in arguments_error(tool, {"a": 1})


OBJECTS = [{"a": i} for i in range(8000)]
HOSTILE = {  # each took seconds to hours, or raised another error than ValueError
    "old draft": (
        {"$schema": "http://json-schema.org/draft-04/schema#", "enum": OBJECTS},
        "2020-12",
    ),
    "old draft inside": (
        {"not": {"$schema": "http://json-schema.org/draft-03/schema"}},
        "draft-03",
    ),
    "no draft": ({"$schema": 5}, r"the \$schema 5"),
    "many types": ({"type": OBJECTS}, "8000 types in one place"),
    "many types inside": ({"anyOf": [{"items": {"type": OBJECTS}}]}, "8000 types in one place"),
    "many types of a content": ({"contentSchema": {"type": OBJECTS}}, "8000 types in one place"),
    "many requirements": ({"required": OBJECTS}, "is not of type 'string'"),
    "dependencies": ({"dependencies": {"b": OBJECTS}}, "use dependentRequired"),
    "repetitions": ({"pattern": "a{99999999999}"}, "no regular expression"),
    "name of repetitions": (
        {"patternProperties": {"a{99999999999}": True}},
        "no regular expression",
    ),
    "brackets": ({"pattern": "(" * 5000}, "nested too deeply"),
    "no pattern": ({"pattern": "("}, "is not a 'regex'"),
    "size": ({"enum": ["x" * 200_000]}, "larger than 131072 characters"),
    "number of values": ({"enum": [0] * 200_000}, "larger than 131072 characters"),
    "number": ({"maximum": float("inf")}, "inf is no number"),
    "no JSON": ({"const": {1, 2}}, "are no JSON"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_schema_is_refused_at_once(case):
    schema, reason = HOSTILE[case]
    start = time.process_time()
    tool = changed(parameters={"type": "object", "properties": {"a": schema}})
    with pytest.raises(ValueError, match=reason):
        check_tool(tool)
    assert time.process_time() - start < 2.0


def test_a_deep_schema_is_refused():
    schema = {}
    for _ in range(3000):
        schema = {"not": schema}
    with pytest.raises(ValueError, match="nested more than 64 deep"):
        check_tool(changed(parameters=schema))


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": OBJECTS},
        {"const": OBJECTS},
        {"allOf": [{"$ref": "#/$defs/a"}] * 100},
        {"enum": ["a", None, 1.5], "default": {"type": [{}] * 100, "dependencies": {}}},
        {"properties": {"dependencies": {"type": ["string", "null"]}, "type": {"enum": ["x"]}}},
    ],
    ids=["enum", "const", "references", "values like schemas", "names like keywords"],
)
def test_a_large_or_unusual_schema_is_accepted(schema):
    check_tool(changed(parameters={"type": "object", "properties": {"a": schema}}))


@pytest.mark.parametrize("draft", ["draft-07/schema#", "draft-07/schema", "draft/2020-12/schema"])
def test_schemas_of_drafts_that_servers_write_are_read(draft):
    tool = changed(
        parameters={
            "$schema": f"http://json-schema.org/{draft}",
            "type": "object",
            "properties": {"a": {"$ref": "#/definitions/b"}},
            "definitions": {"b": {"type": "integer"}},
        }
    )
    assert check_tool(tool) == tool
    assert arguments_error(tool, {"a": 1}) == ""
    assert "not of type 'integer'" in arguments_error(tool, {"a": "1"})


@pytest.mark.parametrize("reference", ["#/$defs/a", "#/x/y", "http://[", "http://example.com/a"])
def test_a_reference_that_leads_nowhere_is_an_error_of_the_call(reference):
    loop = {"$ref": reference, "$defs": {"a": {"$ref": "#/$defs/a"}}}
    assert "cannot be followed" in arguments_error(changed(parameters=loop), {"a": 1})


def test_a_function_is_described_by_its_signature_and_docstring():
    class Shop:
        def price(self, item: str, count: int = 1) -> float:
            """Price of an item.

            Args:
                item: Name of the item.
                count: How many.
            """
            return 1.0 * count

    assert function_schema(Shop().price) == {
        "type": "function",
        "function": {
            "name": "price",
            "description": "Price of an item.",
            "parameters": {
                "type": "object",
                "properties": {
                    "item": {"type": "string", "description": "Name of the item."},
                    "count": {"type": "integer", "description": "How many."},
                },
                "required": ["item"],
            },
        },
    }


def test_a_function_without_types_or_descriptions_is_refused():
    def untyped(a):
        """Adds.

        Args:
            a: A number.
        """

    def undescribed(a: int):
        """Adds."""

    for function in (untyped, undescribed):
        with pytest.raises(ValueError, match=r"tool '\w+' cannot be described .*under 'Args:'"):
            function_schema(function)
