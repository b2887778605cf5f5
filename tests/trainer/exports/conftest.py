from tests.addons.conftest import harness, tiny_rendering  # noqa: F401 - a real recorder behind the scripted engine
