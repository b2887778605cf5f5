from pathlib import Path

from rolltap.addons.credentials import token
from rolltap.trainer.rollouts.environment import clean_environment, proxy_environment, proxy_url, write_bundle


def test_the_credentials_name_the_session_in_any_spelling():
    assert proxy_url("h:1", "s/1 @x", "hidden") == f"http://s%2F1%20%40x:{token('hidden', 's/1 @x')}@h:1"


def test_every_program_is_pointed_at_the_proxy_and_its_certificate():
    env = proxy_environment("http://s:t@127.0.0.1:1", Path("/ca.pem"), Path("/bundle.pem"))
    assert env["HTTPS_PROXY"] == env["https_proxy"] == "http://s:t@127.0.0.1:1"
    assert env["NO_PROXY"] == env["no_proxy"] == ""
    assert env["NODE_EXTRA_CA_CERTS"] == "/ca.pem"
    assert env["SSL_CERT_FILE"] == env["REQUESTS_CA_BUNDLE"] == "/bundle.pem"


def test_the_bundle_holds_the_usual_roots_and_the_recorders_ca(tmp_path):
    (tmp_path / "ca.pem").write_text("-----BEGIN CERTIFICATE-----\nours\n-----END CERTIFICATE-----\n")
    write_bundle(tmp_path / "ca.pem", tmp_path / "bundle.pem")
    bundle = (tmp_path / "bundle.pem").read_text()
    assert "\nours\n" in bundle
    assert bundle.count("BEGIN CERTIFICATE") > 50


def test_a_session_starts_without_the_callers_keys(monkeypatch, tmp_path):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-real")
    env = clean_environment(tmp_path)
    assert "OPENAI_API_KEY" not in env
    assert env["HOME"] == str(tmp_path)
    assert "PATH" in env
