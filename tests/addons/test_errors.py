"""The command that a message names for a missing package."""

import json
import shlex
from importlib.metadata import Distribution
from unittest import mock

import pytest

from rolltap.addons import errors


class Installed(Distribution):
    """A distribution whose installer noted where it is from."""

    def __init__(self, origin):
        self.origin = origin

    def read_text(self, filename):
        return None if self.origin is None else json.dumps(self.origin)

    def locate_file(self, path):
        raise NotImplementedError


def command(origin):
    found = [Installed(None), Installed(origin)]
    with mock.patch.object(errors, "distributions", return_value=found):
        return errors.install_command("record")


@pytest.mark.parametrize(
    ("details", "options"), [({"archive_info": {}}, []), ({"dir_info": {"editable": True}}, ["-e"])]
)
def test_an_extra_is_installed_from_the_checkout_or_the_wheel(details, options, tmp_path):
    place = tmp_path / "my clone"
    place.mkdir()
    found = command({"url": place.as_uri(), **details})
    assert shlex.split(found) == ["pip", "install", *options, f"{place}[record]"]


@pytest.mark.parametrize(
    "origin", [None, {"url": "file:///gone.whl"}, {"url": "https://host/rolltap.git"}]
)
def test_where_neither_is_there_a_clone_is_named(origin):
    assert command(origin) == "pip install '.[record]' in a clone of rolltap"
