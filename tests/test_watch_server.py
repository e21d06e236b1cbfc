"""The web server of a job: who is admitted by which name, and who may keep others waiting."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest

from shared_core.watch import server
from shared_core.watch.server import DashboardServer, Page, is_ours

HERE = socket.gethostname()


@pytest.fixture
def serving() -> Iterator[Callable[[str], DashboardServer]]:
    """Makes a server at an address: a small page, and one that no buffer of the system takes."""
    with ExitStack() as stack:

        def make(address: str) -> DashboardServer:
            made = DashboardServer("--metrics-port", address, 0)
            stack.callback(made.close)
            made.serve({"/": Page("text/plain", lambda: b"here"), "/large": Page("text/plain", lambda: bytes(1 << 26))})
            return made

        yield make


def _connect(address: str, port: int) -> socket.socket:
    return socket.create_connection((address, port), timeout=30)


def _status(address: str, port: int, host: str) -> int:
    with _connect(address, port) as client:
        client.sendall(f"GET / HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        return int(client.makefile("rb").readline().split()[1])


@pytest.mark.parametrize(
    ("bound", "reached"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.0.2", "127.0.0.2"),
        ("::1", "::1"),
        ("localhost", "127.0.0.1"),
        ("0.0.0.0", "127.0.0.3"),
    ],
)
def test_a_name_of_another_site_is_refused_at_every_address(
    bound: str, reached: str, serving: Callable[[str], DashboardServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    if bound == "0.0.0.0":  # tests open nothing to others: what is bound is loopback, what is checked is the rest
        monkeypatch.setattr(server, "_names", lambda _: frozenset({HERE.lower()}))
        bound = reached
    port = serving(bound).port
    own = f"[{reached}]" if ":" in reached else reached
    for good in (own, f"{own}:{port}", "localhost", f"LOCALHOST:{port}"):
        assert _status(reached, port, good) == 200, good
    for bad in ("evil.example", f"evil.example:{port}", f"{reached}.evil.example", "localhost.evil.example", ""):
        assert _status(reached, port, bad) == 421, bad
    for bad in ("localhost@evil.example", "10.1.2.3", "[::1", "localhost:1:2", "a b", HERE + ".evil.example"):
        assert _status(reached, port, bad) == 421, bad


def test_where_others_reach_it_addresses_and_the_machine_s_names_are_asked_for() -> None:
    names = server._names("0.0.0.0")
    assert names == {HERE.lower()} == server._names("10.0.0.2") and not server._names("127.0.0.1")
    assert server._names("Node1.cluster") == {"node1.cluster"}
    for good in ("10.0.0.2:9321", "192.168.1.1:80", f"{HERE}:9321", "[fe80::1]:1"):
        assert is_ours([good], "10.0.0.2", names), good
    for bad in ("evil.example", f"{HERE}.evil.example", "localhost"):
        assert not is_ours([bad], "10.0.0.2", names), bad
    assert is_ours(["127.0.0.1"], "::ffff:127.0.0.1", names) and not is_ours(["10.0.0.2"], "::ffff:127.0.0.1", names)
    assert not is_ours([], "10.0.0.2", names) and not is_ours(["10.0.0.2", "10.0.0.2"], "10.0.0.2", names)


@pytest.mark.parametrize("begin", [b"", b"GET / HTTP/1.1\r\n", b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n"])
def test_slow_clients_keep_nobody_out(begin: bytes, serving: Callable[[str], DashboardServer]) -> None:
    """Silent ones, some that send a line from time to time, and some that do not read the answer."""
    port = serving("127.0.0.1").port
    with ExitStack() as stack:
        slow = [stack.enter_context(closing(_connect("127.0.0.1", port))) for _ in range(3 * server._MOST)]
        for client in slow:
            try:
                client.sendall(begin)
            except ConnectionError:
                continue  # it was sent away already
        for _ in range(3):
            assert _status("127.0.0.1", port, "localhost") == 200
