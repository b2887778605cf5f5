import pytest

from rolltap.addons.egress import Pattern, is_allowed, may_be_used


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("PyPI.org.", "pypi.org", ""),
        ("pypi.org:8443", "pypi.org", "8443"),
        ("*.example.org:*", "*.example.org", "*"),
        ("::1", "::1", ""),
        ("[::1]", "::1", ""),
        ("[::1]:80", "::1", "80"),
        ("[ab].example.org", "[ab].example.org", ""),
        ("[ab].example.org:1", "[ab].example.org", "1"),
    ],
)
def test_a_pattern_is_a_host_and_a_port(text, host, port):
    assert Pattern.parse(text) == Pattern(host, port)


@pytest.mark.parametrize("text", ["", ":80", "a:0", "a:65536", "a:https", "a:", "a:٣"])
def test_a_pattern_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match="give"):
        Pattern.parse(text)


@pytest.mark.parametrize(
    ("pattern", "host", "port", "allowed"),
    [
        ("pypi.org", "pypi.org", 443, True),
        ("pypi.org", "PyPI.org.", 80, True),
        ("pypi.org", "pypi.org", 8080, False),
        ("pypi.org:8080", "pypi.org", 8080, True),
        ("pypi.org:8080", "pypi.org", 443, False),
        ("pypi.org:*", "pypi.org", 22, True),
        ("[ab].example.org", "a.example.org", 443, True),
        ("[ab].example.org", "c.example.org", 443, False),
        ("::1", "[::1]", 80, True),
        ("*", "bad name", 80, False),
    ],
)
def test_a_host_is_allowed_on_the_ports_of_its_pattern(pattern, host, port, allowed):
    assert is_allowed([Pattern.parse(pattern)], host, port) is allowed


@pytest.mark.parametrize(
    ("pattern", "host", "address", "used"),
    [
        ("*", "a.example", "93.184.216.34", True),
        ("*", "a.example", "2606:2800:220:1::1", True),
        ("*", "127.0.0.1", "127.0.0.1", False),
        ("127.0.0.*", "127.0.0.1", "127.0.0.1", False),
        ("127.0.0.1", "127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1:81", "127.0.0.1", "127.0.0.1", False),
        ("a.example", "a.example", "127.0.0.1", False),
        ("a.example", "a.example", "10.0.0.1", False),
        ("a.example", "a.example", "169.254.169.254", False),
        ("a.example", "a.example", "::ffff:10.0.0.1", False),
        ("a.example", "a.example", "fe80::1%eth0", False),
        ("a.example", "a.example", "::1", False),
        ("10.0.0.1", "a.example", "10.0.0.1", True),
        ("localhost", "localhost", "127.0.0.1", True),
        ("localhost", "localhost", "::1", True),
        ("localhost", "localhost", "10.0.0.1", False),
        ("localhost", "a.example", "127.0.0.1", False),
    ],
)
def test_an_address_that_is_not_public_needs_a_pattern_of_its_own(pattern, host, address, used):
    assert may_be_used([Pattern.parse(pattern)], host, address, 80) is used
