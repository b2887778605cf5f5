import socket
import threading

import httpx
import pytest

from rolltap.addons.errors import InputError, RecorderError
from rolltap.addons.secret import password
from rolltap.trainer.boxes.environment import Proxy, clean_environment


@pytest.fixture
def ca(tmp_path):
    path = tmp_path / "ca.pem"
    path.write_text("-----BEGIN CERTIFICATE-----\nours\n-----END CERTIFICATE-----\n")
    return path


@pytest.fixture
def proxy(ca, tmp_path):
    return Proxy("http://127.0.0.1:1", ca=ca, bundle=tmp_path / "all.pem", secret="hidden")


def test_every_program_is_pointed_at_the_proxy_and_its_certificate(proxy, ca, tmp_path):
    env = proxy.environment("s")
    for name in ("HTTPS_PROXY", "ALL_PROXY"):
        assert env[name] == env[name.lower()] == proxy.url("s")
    assert env["NO_PROXY"] == env["no_proxy"] == "localhost,127.0.0.1,::1"
    assert env["NODE_USE_ENV_PROXY"] == "1"
    assert env["NODE_EXTRA_CA_CERTS"] == str(ca)
    for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "AWS_CA_BUNDLE"):
        assert env[name] == str(tmp_path / "all.pem")


def test_in_a_box_the_proxy_and_the_certificates_are_where_the_box_has_them(proxy, ca, tmp_path):
    env = proxy.environment("s", address="127.0.0.1:3128", certificates="/etc/rolltap")
    assert env["HTTPS_PROXY"] == proxy.url("s", "127.0.0.1:3128")
    assert env["HTTPS_PROXY"].endswith("@127.0.0.1:3128")
    authority, bundle = proxy.mounts()
    assert (authority.target, authority.source) == (env["NODE_EXTRA_CA_CERTS"], ca)
    assert (bundle.target, bundle.source) == (env["SSL_CERT_FILE"], tmp_path / "all.pem")
    assert not authority.writable
    assert not bundle.writable


def test_a_recorder_behind_tls_is_reached_by_tls_from_a_box(proxy):
    env = proxy.environment("s", address="https://h:443")
    assert env["HTTPS_PROXY"] == f"https://s:{password('hidden', 's')}@h:443"


def test_the_credentials_name_any_session_and_the_bundle_holds_the_usual_roots_and_the_recorders_ca(
    ca,
):
    proxy = Proxy("http://h:1", ca=ca, secret="hidden")
    assert proxy.url("s/1 @x") == f"http://s%2F1%20%40x:{password('hidden', 's/1 @x')}@h:1"
    assert proxy.bundle == ca.with_name("rolltap-ca-bundle.pem")
    bundle = proxy.bundle.read_text()
    assert "\nours\n" in bundle
    assert bundle.count("BEGIN CERTIFICATE") > 50


@pytest.mark.parametrize(
    "url", ["https://h:1", "http://", "h:1", "http://u@h:1", "http://h:1/path"]
)
def test_a_url_that_is_not_a_proxys_is_named(ca, url):
    with pytest.raises(InputError, match=f"the proxy '{url}' is not written as http://HOST:PORT"):
        Proxy(url, ca=ca)


def test_certificates_that_cannot_be_read_or_written_are_named(ca, tmp_path):
    with pytest.raises(InputError, match=r"there is no CA certificate .*none\.pem"):
        Proxy("http://h:1", ca=tmp_path / "none.pem")
    with pytest.raises(InputError, match=r"cannot write .*/none/all\.pem: No such file"):
        Proxy("http://h:1", ca=ca, bundle=tmp_path / "none" / "all.pem")


def test_a_session_starts_without_the_callers_keys_and_in_a_box_without_what_is_this_machines(
    monkeypatch, tmp_path
):
    for name in ("OPENAI_API_KEY", "TMPDIR", "USER"):
        monkeypatch.setenv(name, "x")
    env = clean_environment(tmp_path)
    isolated = clean_environment(tmp_path, isolated=True)
    assert env["HOME"] == isolated["HOME"] == str(tmp_path)
    assert env.keys() >= {"PATH", "TMPDIR", "USER"}
    assert not isolated.keys() & {"TMPDIR", "USER", "OPENAI_API_KEY"}
    assert "OPENAI_API_KEY" not in env


@pytest.mark.parametrize("name", ["ALL_PROXY", "all_proxy", "HTTPS_PROXY", "https_proxy"])
def test_a_proxy_of_the_user_s_shell_breaks_no_http_client_of_a_program(proxy, name, monkeypatch):
    monkeypatch.setenv(name, "socks5://127.0.0.1:9")
    with pytest.raises((ImportError, ValueError)):
        httpx.Client(trust_env=True)
    for variable, value in proxy.environment("s").items():
        if variable.lower().endswith("_proxy"):
            monkeypatch.setenv(variable, value)
    httpx.Client(trust_env=True).close()


def test_no_root_certificates_are_read_to_end_a_session(proxy, monkeypatch):
    monkeypatch.delattr("ssl.create_default_context")
    with pytest.raises(RecorderError, match="does not end session s"):
        proxy.end_session("s")


def test_a_session_is_ended_though_its_connection_was_closed_to_make_room_for_others(ca):
    def serve():
        server.accept()[0].close()
        connection, _ = server.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as server:
        answering = threading.Thread(target=serve)
        answering.start()
        Proxy(f"http://127.0.0.1:{server.getsockname()[1]}", ca=ca).end_session("s")
        answering.join()
