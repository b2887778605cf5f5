from tests.addons.conftest import harness, rendering  # noqa: F401 - a real recorder behind the scripted engine
