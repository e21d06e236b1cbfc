"""Where a job on several machines listens, and what is said when it cannot."""

from __future__ import annotations

import socket

import pytest

from shared_core.errors import ConfigError
from shared_core.launcher.ports import Ports, bound_to, listen


@pytest.mark.parametrize(
    ("name", "addresses", "at"),
    [
        ("10.1.2.3", [], "10.1.2.3"),
        ("fd00::2", [], "fd00::2"),
        ("node1", ["10.1.2.3"], "10.1.2.3"),
        ("node1", ["127.0.1.1"], ""),
        ("node1", ["10.1.2.3", "fd00::2"], ""),
        ("localhost", ["::1", "127.0.0.1"], "127.0.0.1"),
        ("localhost", ["127.0.0.1"], "127.0.0.1"),
    ],
)
def test_the_address_of_a_name(name: str, addresses: list[str], at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All interfaces only where it is not known by which address the others come."""

    def resolve(host: str, port: object, type: int) -> list[tuple[object, ...]]:
        return [(0, type, 6, "", (address, 0)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert bound_to(name) == at


def test_a_port_that_is_taken_is_named() -> None:
    with listen("127.0.0.1", 0) as taken:
        assert taken.getsockname()[0] == "127.0.0.1"
        port = taken.getsockname()[1]
        for ports in (Ports(port), Ports(port - 1)):
            with pytest.raises(ConfigError, match="Address already in use") as error:
                ports.take("127.0.0.1", port)
            assert f"--port {ports.first} needs ports {ports.store} and {ports.copies}" in str(error.value)
    with pytest.raises(ConfigError, match="--local-addr"):
        Ports().take("198.51.100.7", 0)
    assert (Ports().store, Ports().copies) == (0, 0)
