"""Facts of nodes: what differs is named with the node, before a session runs."""

import pytest

from rolltap.addons.errors import EngineError, InputError, RolltapError, UnreadableModelError
from rolltap.trainer.nodes.facts import (
    Examined,
    Installation,
    installation_reader,
    require_alike,
    require_alike_installations,
)
from rolltap.trainer.nodes.messages import Failure
from rolltap.trainer.tasks.task import Task

OWN = Installation("0.1.0", "3.11", 1000.0)
TASK = Task(id="t", instruction="go", evaluate=["true"])


def examined(digest="d", **key):
    return Examined([TASK], {"t": digest}, {"t": {"program": "p", "weights": "w", **key}}, [])


@pytest.mark.parametrize(
    ("machine", "message"),
    [
        (
            OWN._replace(rolltap="0.2.0"),
            "node b has rolltap 0.2.0, and this machine 0.1.0: install the same on both",
        ),
        (OWN._replace(rolltap="none"), "node b has rolltap none, and"),
        (OWN._replace(python="3.12"), "node b has Python 3.12, and this machine 3.11"),
        (OWN._replace(clock=1030.0), "the clock of node b is 30 s off"),
        (OWN._replace(clock=980.0), "the clock of node b is 20 s off"),
    ],
)
def test_machines_that_differ_are_named(machine, message):
    with pytest.raises(InputError, match=message):
        require_alike_installations(OWN, 1000.0, {"a": OWN, "b": machine})


def test_an_answer_that_took_a_while_is_no_difference_of_clocks():
    require_alike_installations(
        OWN._replace(clock=1060.0), 1000.0, {"a": OWN._replace(clock=1030.0)}
    )


def test_the_reader_of_a_machine_needs_nothing_of_rolltap():
    assert "<locals>" in installation_reader().__qualname__  # such a function is sent by value
    read = Installation(*installation_reader()())
    require_alike_installations(read, read.clock, {"this": read})


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            examined("e"),
            (
                "node b has not the task 't' as node a has it: lay the tasks into a folder that all"
                " have"
            ),
        ),
        (examined(program="q"), "nodes a and b would run other sessions: they differ in program:"),
        (examined(weights="v", program="q"), "they differ in program, weights"),
    ],
)
def test_nodes_that_would_run_other_sessions_are_named(other, message):
    with pytest.raises(InputError, match=message):
        require_alike({"a": examined(), "b": other})


def test_a_failure_keeps_its_kind_and_names_its_node():
    for error in (
        InputError("no model"),
        EngineError("no answer", status=504),
        UnreadableModelError("odd"),
        OSError("full"),
    ):
        with pytest.raises(type(error), match=f"node b: {error}"):
            require_alike({"a": examined(), "b": Failure.of(error, "b")})
    odd = Failure.of(ZeroDivisionError("by zero"), "b").error()
    assert type(odd) is RolltapError
    assert str(odd) == "node b: ZeroDivisionError: by zero"
