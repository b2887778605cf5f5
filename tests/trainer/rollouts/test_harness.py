from pathlib import Path

import pytest

from rolltap.trainer.errors import UserError
from rolltap.trainer.rollouts.harness import (
    clean_environment,
    load_harness,
    proxy_environment,
    require_program,
    write_bundle,
)

PRESETS = sorted((Path(__file__).resolve().parents[3] / "recipes" / "harnesses").glob("*.toml"))


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_every_preset_loads_and_takes_the_instruction(preset):
    harness = load_harness(preset)
    assert harness.name == preset.stem
    assert "do {this}" in harness.command_for("do {this}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = ", "is not TOML"),
        ('name = "x"\nversion = "1"\ncommand = ["x"]\ncomand = []', "unknown key 'comand'"),
        ('name = "x"\nversion = "1"', "'command' is missing"),
    ],
)
def test_a_bad_preset_is_named(tmp_path, text, message):
    (tmp_path / "x.toml").write_text(text)
    with pytest.raises(UserError, match=message):
        load_harness(tmp_path / "x.toml")


def test_a_program_that_is_not_installed_is_named():
    with pytest.raises(UserError, match="'no-such-harness' is not on the PATH"):
        require_program("no-such-harness")


def test_every_program_is_pointed_at_the_proxy_and_its_certificate():
    env = proxy_environment("http://s:t@127.0.0.1:1", Path("/ca.pem"), Path("/bundle.pem"))
    assert env["HTTPS_PROXY"] == env["https_proxy"] == "http://s:t@127.0.0.1:1"
    assert env["NO_PROXY"] == env["no_proxy"] == ""
    assert env["NODE_EXTRA_CA_CERTS"] == "/ca.pem"
    assert env["SSL_CERT_FILE"] == env["REQUESTS_CA_BUNDLE"] == "/bundle.pem"


def test_the_bundle_holds_the_usual_roots_and_the_recorders_ca(tmp_path):
    (tmp_path / "ca.pem").write_text("-----BEGIN CERTIFICATE-----\nours\n-----END CERTIFICATE-----\n")
    bundle = write_bundle(tmp_path / "ca.pem", tmp_path).read_text()
    assert "\nours\n" in bundle
    assert bundle.count("BEGIN CERTIFICATE") > 50


def test_a_session_starts_without_the_callers_keys(monkeypatch, tmp_path):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-real")
    env = clean_environment(tmp_path)
    assert "OPENAI_API_KEY" not in env
    assert env["HOME"] == str(tmp_path)
    assert "PATH" in env
