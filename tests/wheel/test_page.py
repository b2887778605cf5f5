import inspect
import pydoc
from importlib.util import find_spec

import pytest

import rolltap
from rolltap.errors import MissingPackageError
from tests.wheel.program import python, run, script

NEEDS_TRAIN = {"AdapterPublisher", "TraceGRPOConfig", "TraceGRPOTrainer"}
AT_HAND = sorted(rolltap.__all__ if find_spec("trl") else set(rolltap.__all__) - NEEDS_TRAIN)
HEAVY = ("torch", "transformers", "trl", "datasets", "mitmproxy")


@pytest.mark.parametrize("name", AT_HAND)
def test_a_public_name_is_there_and_has_a_docstring(name):
    assert inspect.getdoc(getattr(rolltap, name))
    assert name in dir(rolltap)


@pytest.mark.parametrize("module", ["errors", "types"])
def test_the_public_names_of_a_module_are_there_without_importing_it(module):
    python(
        "-c",
        f"import rolltap; [getattr(rolltap.{module}, name) for name in rolltap.{module}.__all__]",
    )


@pytest.mark.skipif(find_spec("trl") is not None, reason="the extra train is installed")
@pytest.mark.parametrize("name", sorted(NEEDS_TRAIN))
def test_a_name_whose_extra_is_not_installed_says_so_and_is_not_listed(name):
    with pytest.raises(
        MissingPackageError, match=rf"rolltap\.{name} needs .*pip install '?\S+\.whl\[train\]'?"
    ):
        getattr(rolltap, name)
    assert name not in dir(rolltap)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'open_rum'"):
        rolltap.open_rum  # noqa: B018


def test_the_version_is_that_of_the_installed_distribution():
    version = python(
        "-c", "from importlib.metadata import version; print(version('rolltap'))"
    ).split()
    assert python("-c", "import rolltap; print(rolltap.__version__)").split() == version
    assert python("-m", "rolltap", "--version").split()[-1:] == version
    assert run(script("rolltap"), "--version").split()[-1:] == version


@pytest.mark.parametrize("module", ["rolltap", "rolltap.errors", "rolltap.addons.store.records"])
def test_importing_it_imports_no_heavy_library(module):
    loaded = python("-c", f"import sys, {module}; print(*sys.modules)").split()
    assert module in loaded
    assert not set(HEAVY) & set(loaded)


def test_help_names_every_public_object_with_the_first_line_of_its_docstring():
    text = pydoc.plain(pydoc.render_doc(rolltap))
    assert inspect.getdoc(rolltap).splitlines()[0] in text
    for name in AT_HAND:
        assert name in text
        assert inspect.getdoc(getattr(rolltap, name)).splitlines()[0] in text
