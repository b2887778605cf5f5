import json

import pytest

from rolltap.addons.dialects.json_values import nests_deeper
from rolltap.addons.dialects.protobuf import camel_case_fields, json_schema

SCHEMAS = """
{"type": "STRING"}
    {"type": "string"}
{"type": "string"}
    {"type": "string"}
{"type": "TYPE_UNSPECIFIED", "description": "Any."}
    {"description": "Any."}
{"type": ["STRING", "NULL"]}
    {"type": ["string", "null"]}
{"type": "ARRAY", "items": {"type": "INTEGER"}}
    {"type": "array", "items": {"type": "integer"}}
{"anyOf": [{"type": "NUMBER"}]}
    {"anyOf": [{"type": "number"}]}
{"any_of": [{"type": "NUMBER"}], "nullable": true}
    {"anyOf": [{"type": "number"}, {"type": "null"}]}
{"type": "STRING", "nullable": true}
    {"type": ["string", "null"]}
{"type": "STRING", "nullable": false}
    {"type": "string"}
{"type": "STRING", "format": "enum", "enum": ["a"], "nullable": true}
    {"type": ["string", "null"], "enum": ["a", null]}
{"type": "STRING", "format": "date"}
    {"type": "string", "format": "date"}
{"minItems": "1", "max_items": 2}
    {"minItems": 1, "maxItems": 2}
{"additionalProperties": {"type": "STRING"}}
    {"additionalProperties": {"type": "string"}}
{"additionalProperties": false}
    {"additionalProperties": false}
{"default": {"type": "STRING", "a_b": 1}}
    {"default": {"type": "STRING", "a_b": 1}}
null
    null
"x"
    "x"
"""
"""Schemas, each with the JSON schema that it becomes below it."""


def test_a_schema_becomes_a_json_schema():
    values = [json.loads(line) for line in SCHEMAS.strip().splitlines()]
    for schema, converted in zip(values[::2], values[1::2], strict=True):
        assert json_schema(schema) == converted


def test_properties_keep_their_names_and_follow_the_property_ordering():
    schema = {
        "type": "OBJECT",
        "properties": {
            "type": {"type": "STRING"},
            "max_items": {"type": "NUMBER"},
            "nullable": {"type": "BOOLEAN"},
        },
        "propertyOrdering": ["max_items", "unknown", "type"],
    }
    converted = json_schema(schema)
    assert list(converted) == ["type", "properties"]
    properties = {
        "max_items": {"type": "number"},
        "type": {"type": "string"},
        "nullable": {"type": "boolean"},
    }
    assert list(converted["properties"].items()) == list(properties.items())


def test_the_fields_of_a_message_are_in_camel_case_without_nulls():
    fields = camel_case_fields({"top_k": 1, "topP": 2, "seed": None, "_x": 3, "p_95_b": {"a_b": 4}})
    assert fields == {"topK": 1, "topP": 2, "_x": 3, "p95B": {"a_b": 4}}


@pytest.mark.parametrize(
    ("value", "depth"), [(1, 0), ({}, 1), ([1], 1), ({"a": [1, {"b": 1}], "c": 1}, 3)]
)
def test_depth_counts_objects_and_lists(value, depth):
    assert not nests_deeper(value, depth)
    assert depth == 0 or nests_deeper(value, depth - 1)
