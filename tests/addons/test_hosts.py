import pytest

from rolltap.addons.hosts import is_permitted_address, read_all_patterns, read_patterns
from tests.addons.harness import rows

NO_HOSTS = ("https://a.org", "http://a.org:80", "a.org/b", "10.0.0.0/8", "me@a.org", "a.org b.org")


PATTERNS = """
PyPI.org.            pypi.org:80,443
pypi.org:8443        pypi.org:8443
*.example.org:*      *.example.org:*
::1                  ::1:80,443
[::1]                ::1:80,443
[::1]:80             ::1:80
[ab].example.org     [ab].example.org:80,443
[ab].example.org:1   [ab].example.org:1
"""
"""Options, and the host with its ports."""


@pytest.mark.parametrize(("text", "meaning"), rows(PATTERNS))
def test_an_option_is_a_host_and_a_port_or_those_of_the_web(text, meaning):
    host, _, ports = meaning.rpartition(":")
    assert read_patterns(text) == [(host, port) for port in ports.split(",")]


@pytest.mark.parametrize("text", ["", ":80", "a:0", "a:65536", "a:https", "a:", "a:٣", *NO_HOSTS])
def test_a_pattern_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match="give"):
        read_patterns(text)


def test_the_patterns_of_several_texts_are_one_set():
    patterns = read_all_patterns(("a.org:80", "b.org:80", "A.org:80"))
    assert patterns == {("a.org", "80"), ("b.org", "80")}
    assert read_all_patterns(()) == frozenset()


ADDRESSES = """
*             a.example  used    93.184.216.34 2606:2800:220:1::1
*             127.0.0.1  refused 127.0.0.1
127.0.0.*     127.0.0.1  refused 127.0.0.1
127.0.0.1     127.0.0.1  used    127.0.0.1
127.0.0.1:81  127.0.0.1  refused 127.0.0.1
a.example     a.example  refused 127.0.0.1 10.0.0.1 169.254.169.254
a.example     a.example  refused ::ffff:10.0.0.1 fe80::1%eth0 ::1
10.0.0.1      a.example  used    10.0.0.1
localhost     localhost  used    127.0.0.1 ::1
localhost     localhost  refused 10.0.0.1
localhost     a.example  refused 127.0.0.1
*:*           a.org      refused 64:ff9b::a9fe:a9fe 64:ff9b::7f00:1 2002:7f00:1::1
*:*           a.org      refused 64:ff9b:1::7f00:1 ::7f00:1 ::ffff:0:7f00:1
*:*           a.org      used    64:ff9b::101:101 2002:101:101::1 2606:4700::1
10.0.0.1:80   10.0.0.1   used    64:ff9b::a00:1
"""
"""Patterns, hosts, decisions and addresses. IPv6 addresses may lead to IPv4 ones: NAT64, 6to4, and
two forms that nobody should have."""


@pytest.mark.parametrize("row", rows(ADDRESSES), ids=" ".join)
def test_an_address_that_is_not_public_needs_a_pattern_of_its_own(row):
    pattern, host, decision, *addresses = row
    for address in addresses:
        used = is_permitted_address(read_patterns(pattern), host, address, 80)
        assert used == (decision == "used")
