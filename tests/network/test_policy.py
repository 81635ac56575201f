from __future__ import annotations

import ipaddress
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import InvalidRequest, Unsupported
from shoal.network.policy import Policy, compile_policy, normalize, parse_address, reserved_block
from shoal.types import NetworkPolicy


def policy(*allow: str, deny: tuple[str, ...] = ()) -> Policy:
    return compile_policy(NetworkPolicy(allow=allow, deny=deny))


@pytest.mark.parametrize(
    ("entry", "name", "port", "allowed"),
    [
        ("index.example", "index.example", 443, True),
        ("index.example", "INDEX.Example.", 80, True),
        ("index.example", "index.example", 22, False),
        ("index.example:22", "index.example", 22, True),
        ("index.example:22", "index.example", 443, False),
        ("index.example", "sub.index.example", 443, False),
        ("index.example", "evilindex.example", 443, False),
        ("index.example", "index.example.evil", 443, False),
        ("*.index.example", "a.index.example", 443, True),
        ("*.index.example", "a.b.index.example", 443, True),
        ("*.index.example", "index.example", 443, False),
        ("*.index.example", "evilindex.example", 443, False),
        ("*.index.example:8443", "a.index.example", 8443, True),
        ("bücher.example", "xn--bcher-kva.example", 443, True),
        ("xn--bcher-kva.example", "Bücher.example", 443, True),
        (" Index.Example. ", "index.example", 443, True),
        ("localhost:5000", "localhost", 5000, True),
    ],
)
def test_names(entry: str, name: str, port: int, allowed: bool) -> None:
    decision = policy(entry).decide(name, None, port)
    assert decision.allowed is allowed
    assert decision.rule == (entry if allowed else None)


@pytest.mark.parametrize(
    ("entry", "address", "port", "allowed"),
    [
        ("10.0.0.0/8:5432", "10.1.2.3", 5432, True),
        ("10.0.0.0/8:5432", "10.1.2.3", 443, False),
        ("10.0.0.0/8", "10.1.2.3", 443, True),
        ("10.0.0.0/8", "11.1.2.3", 443, False),
        ("192.0.2.7", "192.0.2.7", 80, True),
        ("192.0.2.7", "::ffff:192.0.2.7", 80, True),
        ("2001:db8::/32", "2001:db8::7", 443, True),
        ("[2001:db8::]:8443", "2001:db8::", 8443, True),
        ("[2001:db8::/32]:8443", "2001:db8::9", 8443, True),
        ("[2001:db8::/32]:8443", "2001:db8::9", 443, False),
    ],
)
def test_addresses(entry: str, address: str, port: int, allowed: bool) -> None:
    assert policy(entry).decide(None, address, port).allowed is allowed


def test_deny_wins_and_means_every_port() -> None:
    rules = policy("*.example", "10.0.0.0/8", deny=("bad.example", "10.9.0.0/16", "half.example:80"))
    assert rules.decide("good.example", None, 443).rule == "*.example"
    assert rules.decide("bad.example", None, 443) == rules.decide("bad.example", None, 80)
    assert rules.decide("bad.example", None, 443).rule == "bad.example"
    assert not rules.decide(None, "10.9.1.1", 443).allowed
    assert not rules.decide("good.example", "10.9.1.1", 443).allowed
    assert not rules.decide_name("bad.example").allowed
    assert rules.decide_name("half.example").allowed
    assert not rules.decide("half.example", None, 80).allowed


@pytest.mark.parametrize(
    "entry",
    [
        "",
        "*",
        "*.",
        "**.example",
        "a.*.example",
        "https://index.example",
        "index.example/simple",
        "index.example:",
        "index.example:0",
        "index.example:65536",
        "index.example:http",
        "a b.example",
        "-a.example",
        "a..example",
        "10.0.0.1/8",
        "10.0.0",
        "10.0.0.0/33",
        "1::2::3",
        "[::1",
        "[index.example]:80",
        "x" * 64 + ".example",
        "a" + ".a" * 130,
    ],
)
def test_a_malformed_entry_names_the_field(entry: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        policy(entry)
    assert caught.value.field == "network"
    with pytest.raises(InvalidRequest):
        policy(deny=(entry,))


def test_presets() -> None:
    assert not compile_policy(None).decide("pypi.org", None, 443).allowed
    pypi = compile_policy("pypi", ["pypi.org:443", "10.1.2.3:3141"])
    assert pypi.decide("pypi.org", None, 443).allowed
    assert not pypi.decide("pypi.org", None, 80).allowed
    assert pypi.internal == {"pypi.org"}
    assert [str(network) for network in pypi.ranges] == ["10.1.2.3/32"]
    for later in ("npm", "debian", "open"):
        with pytest.raises(Unsupported, match=r"0\.2"):
            compile_policy(later)
    with pytest.raises(InvalidRequest):
        compile_policy("conda")


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "169.254.169.254",
        "10.0.0.1",
        "172.31.0.1",
        "192.168.1.1",
        "100.100.100.200",
        "168.63.129.16",
        "0.0.0.0",
        "224.0.0.1",
        "255.255.255.255",
        "::1",
        "::",
        "fe80::1",
        "fd00:ec2::254",
        "::ffff:127.0.0.1",
        "64:ff9b::7f00:1",
        "2002:7f00:1::",
    ],
)
def test_reserved_addresses(address: str) -> None:
    parsed = parse_address(address)
    assert parsed is not None
    assert reserved_block(parsed) is not None


@pytest.mark.parametrize("address", ["1.1.1.1", "203.0.113.80", "2606:4700::1111", "172.32.0.1"])
def test_public_addresses(address: str) -> None:
    assert reserved_block(ipaddress.ip_address(address)) is None


def test_only_a_narrow_range_opens_a_reserved_one() -> None:
    address = ipaddress.ip_address("10.1.2.3")
    block = reserved_block(address)
    assert block is not None
    assert policy("10.0.0.0/8").opens(block, address, 443)
    assert policy("10.1.2.3:5432").opens(block, address, 5432)
    assert not policy("10.1.2.3:5432").opens(block, address, 443)
    assert not policy("0.0.0.0/0").opens(block, address, 443)


labels = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,6}[a-z0-9])?", fullmatch=True).filter(
    lambda label: not label.startswith("xn--")
)
names = st.lists(labels, min_size=1, max_size=5).map(".".join).filter(lambda name: not name.isdigit())
names = names.map(lambda name: name + ".example")


@given(names, names)
def test_a_name_allows_itself_and_a_wildcard_what_is_below(name: str, other: str) -> None:
    assert policy(name).decide(other.upper() + ".", None, 443).allowed == (name == other)
    assert policy("*." + name).decide(other, None, 443).allowed == other.endswith("." + name)


@given(st.text(max_size=80))
def test_any_text_is_an_entry_or_a_typed_error(text: str) -> None:
    with suppress(InvalidRequest):
        policy(text)


@given(st.text(max_size=300))
def test_a_normal_name_is_its_own_normal_form(text: str) -> None:
    normal = normalize(text)
    assert normal is None or normalize(normal) == normal
