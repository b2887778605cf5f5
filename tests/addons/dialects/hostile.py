"""Malformed and unusual request bodies: tables of them, and strategies."""

import copy
import json

from hypothesis import strategies as st


def cases(table):
    """Return the rows of a table: a value of JSON, and the words above it.

    Values are indented, words are not.
    """
    rows = []
    for words, changes in _cases(table):
        rows.append((changes, words))
    return rows


def means(table):
    """Return the rows of a table: changes of a request, and a field of the call with its value."""
    rows = []
    for meaning, changes in _cases(table):
        field, value = meaning.split(" = ", 1)
        rows.append((changes, field, json.loads(value)))
    return rows


def _cases(table):
    head = ""
    body = ""
    for line in table.strip().splitlines():
        if not line.startswith(" "):
            head = line
            continue
        body += line.strip() + " "
        try:
            changes = json.loads(body)
        except ValueError:
            continue  # it goes on in the next line
        yield head, changes
        body = ""


def values(words, names):
    """Return a strategy for JSON values: often `words` and objects with keys `names`. Texts may
    hold surrogates."""
    leaves = st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.integers(min_value=10**400, max_value=10**401),
        st.floats(),
        st.text(st.characters(categories=None), max_size=8),
        st.sampled_from([*words, "\ud83d", '{"a": "\\ud83d"}', "<|im_end|>", "none", 1]),
    )

    def containers(inner):
        objects = st.dictionaries(st.sampled_from(names), inner, max_size=4)
        return st.lists(inner, max_size=3) | objects

    return st.recursive(leaves, containers, max_leaves=6)


@st.composite
def mutated(draw, request, anything):
    """Return `request` with other values in up to three places."""
    body = copy.deepcopy(request)
    _, *places = _places(request)
    for path in draw(st.lists(st.sampled_from(places), min_size=1, max_size=3)):
        parent = body
        try:
            for key in path[:-1]:
                parent = parent[key]
            parent[path[-1]] = draw(anything)
        except (KeyError, IndexError, TypeError):
            pass  # an earlier mutation removed the place
    return body


def bodies(requests, anything):
    """Return a strategy for mutated requests, any JSON and any bytes."""
    json_values = anything
    for request in requests:
        json_values |= mutated(request, anything)
    return json_values.map(json.dumps).map(str.encode) | st.binary(max_size=40)


def _places(value, path=()):
    """Yield the path of each value within `value`."""
    yield path
    inner = ()
    if isinstance(value, dict):
        inner = value.items()
    if isinstance(value, list):
        inner = enumerate(value)
    for key, each in inner:
        yield from _places(each, (*path, key))
