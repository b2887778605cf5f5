import json

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltap.trainer.doctor.example import example

TEXT = {"type": "string"}


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "object", "properties": {"a": TEXT, "b": TEXT}, "required": ["b"]}, {"b": "hello"}),
        ({"required": ["a"], "properties": {"a": TEXT}}, {"a": "hello"}),
        ({"type": "object", "required": ["a"]}, {"a": "hello"}),
        ({"enum": ["LOW", "HIGH"]}, "LOW"),
        ({"const": 3}, 3),
        ({"type": "integer", "default": 5}, 5),
        ({"type": "string", "default": None}, "hello"),
        ({"type": "integer", "minimum": 10, "maximum": 20}, 10),
        ({"type": "integer", "exclusiveMinimum": 1}, 2),
        ({"type": "number", "maximum": 0.5}, 0.5),
        ({"type": "boolean"}, False),
        ({"type": "null"}, None),
        ({"type": ["null", "boolean"]}, False),
        ({"type": "STRING"}, "hello"),  # Google's spelling
        ({"type": "string", "format": "date"}, "2026-01-01"),
        ({"type": "string", "minLength": 7}, "hellooo"),
        ({"type": "string", "maxLength": 2}, "he"),
        ({"type": "string", "maxLength": 0}, ""),
        ({"type": "array", "items": TEXT}, []),
        ({"items": TEXT, "minItems": 2}, ["hello", "hello"]),
        ({"anyOf": [{"type": "null"}, {"type": "integer"}]}, 1),
        ({"anyOf": [{"type": "null"}]}, None),
        ({"oneOf": [{"type": "boolean"}, TEXT]}, False),
        (
            {"allOf": [{"required": ["a"], "properties": {"a": TEXT}}, {"required": ["b"]}], "type": "object"},
            {"a": "hello", "b": "hello"},
        ),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"type": "array", "items": {}, "minItems": 1}}}, ["hello"]),
        ({"anyOf": [True]}, "hello"),
        ({"oneOf": [True, {"type": "integer"}]}, 1),
        ({"anyOf": True, "type": "integer"}, 1),
        ({"type": "object", "required": True}, {}),
        ({"type": "object", "required": [3, "a"], "properties": [1]}, {"a": "hello"}),
        ({"type": "string", "maxLength": "x", "minLength": -1}, "hello"),
        ({"type": "array", "minItems": "x"}, []),
        ({"enum": 3, "type": "boolean"}, False),
        ({"type": "integer", "minimum": float("inf")}, 1),
        ({}, "hello"),
        (None, "hello"),
        (True, "hello"),
    ],
)
def test_a_value_has_what_its_schema_requires(schema, value):
    assert example(schema) == value


def test_a_property_that_is_a_place_is_the_workspace():
    schema = {"required": ["file_path", "query"], "properties": {"file_path": TEXT, "query": TEXT}}
    assert example(schema) == {"file_path": ".", "query": "hello"}


def test_a_schema_without_a_finite_value_ends():
    schema = {"$defs": {"x": {"required": ["x"], "properties": {"x": {"$ref": "#/$defs/x"}}}}, "$ref": "#/$defs/x"}
    assert "x" in example(schema)


_LEAVES = st.one_of(
    st.builds(lambda low: {"type": "integer", "minimum": low}, st.integers(-9, 9)),
    st.builds(lambda high: {"type": "number", "maximum": high}, st.integers(-9, 9)),
    st.builds(lambda length: {"type": "string", "minLength": length}, st.integers(0, 9)),
    st.builds(lambda choices: {"enum": choices}, st.lists(st.integers(), min_size=1)),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["null", "string"]}]),
)
SCHEMAS = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.builds(lambda item, least: {"type": "array", "items": item, "minItems": least}, inner, st.integers(0, 2)),
        st.builds(lambda choices: {"anyOf": choices}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(
            lambda properties, some: {"type": "object", "properties": properties, "required": [*properties][:some]},
            st.dictionaries(st.sampled_from(["a", "b", "path"]), inner),
            st.integers(0, 3),
        ),
    ),
    max_leaves=8,
)


@given(SCHEMAS)
def test_every_value_is_valid(schema):
    jsonschema.validate(example(schema), schema)


KEYWORDS = """
type enum anyOf oneOf allOf $ref required properties items minItems minLength maxLength minimum maximum exclusiveMinimum
exclusiveMaximum format const default $defs
"""
VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.sampled_from(["object", "array", "string", "integer", "number", "#", "#/$defs/a", "a"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from([*KEYWORDS.split(), "a"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(VALUES)
def test_a_schema_that_is_none_has_a_value_too(value):
    json.dumps(example(value))


def test_a_value_stays_small():
    schema = {"type": "array", "minItems": 10**12, "items": {"type": "string", "minLength": 10**12}}
    assert len(json.dumps(example(schema))) < 10**7
