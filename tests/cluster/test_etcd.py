"""The rendezvous backend ``etcd`` on a real etcd, without the v2 API."""

from __future__ import annotations

import base64
import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from etcd_server import Etcd, needs_etcd
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError
from util import start_command

from shared_core.errors import ConfigError, DamagedRecord
from shared_core.launcher.etcd import PREFIX, EtcdBackend
from shared_core.launcher.lease import FENCE
from shared_core.launcher.rendezvous import HOLD_S
from shared_core.launcher.rendezvous_store import Register, parse_endpoints


def backend(endpoints: str, timeout_s: float = 1.0, **options: str) -> EtcdBackend:
    return EtcdBackend(parse_endpoints(endpoints, "etcd"), "a job", options, timeout_s)


def admin(one: Etcd, path: str, **message: str) -> None:
    """A request of an administrator."""
    data = json.dumps(message).encode()
    with urllib.request.urlopen(f"http://{one.endpoints}/v3/{path}", data=data, timeout=5) as reply:
        reply.read()


@needs_etcd
def test_who_knows_the_newest_value_replaces_it(tmp_path: Path) -> None:
    with Etcd(tmp_path) as one:
        first, second = backend(one.endpoints), backend(one.endpoints)
        assert first.get_state() is None
        raw = bytes(range(256))
        stored = first.set_state(raw)
        assert stored is not None and stored[0] == raw and stored[2]
        assert second.get_state() == stored[:2]
        assert second.set_state(b"late") == (*stored[:2], False)
        newer = second.set_state(b"newer", stored[1])
        assert newer is not None and newer[2]
        assert first.set_state(b"late", stored[1]) == (*newer[:2], False)
        assert backend(one.endpoints).set_state(b"", newer[1]) is not None

        def count() -> None:
            register = Register("etcd", parse_endpoints(one.endpoints, "etcd"), "other", {}, 5.0)
            register.open()
            for _ in range(20):
                register.change(lambda old: {"phase": "ended", "beat": (old or {"beat": 0})["beat"] + 1})

        threads = [threading.Thread(target=count) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        other = EtcdBackend(parse_endpoints(one.endpoints, "etcd"), "other", {}, 5.0)
        state = other.get_state()
        assert state is not None and json.loads(state[0])["beat"] == 80
        other.set_state(b"no document", state[1])
        register = Register("etcd", parse_endpoints(one.endpoints, "etcd"), "other", {}, 5.0)
        register.open()
        with pytest.raises(DamagedRecord, match="choose another --rdzv-id"):
            register.change(lambda old: old)


@contextmanager
def deaf(target: str) -> Iterator[str]:
    """A proxy that passes one request on and loses the answer; then it answers nobody."""
    host, port = target.split(":")

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path.endswith("/txn"):
                urllib.request.urlopen(f"http://{host}:{port}{self.path}", data=body, timeout=5).close()
                self.close_connection = True
                return
            with urllib.request.urlopen(f"http://{host}:{port}{self.path}", data=body, timeout=5) as reply:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(reply.read())

        def log_message(self, *words: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@needs_etcd
def test_another_member_is_asked(tmp_path: Path) -> None:
    """Where one refuses, hangs, or loses the answer to a request that took effect."""
    with Etcd(tmp_path) as one, socket.create_server(("127.0.0.1", 0)) as hangs:
        nobody = f"127.0.0.1:1,127.0.0.1:{hangs.getsockname()[1]}"
        store = backend(f"{nobody},{one.endpoints}", timeout_s=1.0)
        stored = store.set_state(b"one")
        assert stored is not None and stored[2]
        assert store.endpoint == parse_endpoints(one.endpoints, "etcd")[0]
        begun = time.monotonic()
        assert store.get_state() == stored[:2]
        assert time.monotonic() - begun < 1.0, "the member that answered last is asked first"
        with pytest.raises(
            RendezvousConnectionError, match=r"127.0.0.1:1: .*refused.*; http://127.0.0.1:\d+: timed out"
        ):
            backend(nobody, timeout_s=0.2).get_state()
        with deaf(one.endpoints) as proxy:
            newer = backend(f"{proxy},{one.endpoints}").set_state(b"two", stored[1])
        assert newer is not None and newer[0] == b"two" and newer[2]


@needs_etcd
def test_users_and_passwords(tmp_path: Path) -> None:
    """A token that etcd has forgotten is replaced."""
    secret = tmp_path / "secret"
    secret.write_text("pass word\n")
    with Etcd(tmp_path) as one:
        for name in ("root", "job"):
            admin(one, "auth/user/add", name=name, password="pass word")
            admin(one, "auth/role/add", name=name)
            admin(one, "auth/user/grant", user=name, role=name)
        admin(one, "auth/user/add", name="other", password="pass word")
        admin(one, "auth/user/grant", user="root", role="root")
        key = base64.b64encode
        end = PREFIX[:-1] + chr(ord(PREFIX[-1]) + 1)
        perm = {"permType": "READWRITE", "key": key(PREFIX.encode()).decode(), "range_end": key(end.encode()).decode()}
        admin(one, "auth/role/grant", name="job", perm=perm)  # type: ignore[arg-type]
        admin(one, "auth/enable")
        store = backend(one.endpoints, user="job", password_file=str(secret))
        stored = store.set_state(b"one")
        assert stored is not None and stored[2]
        one.restart()
        assert store.get_state() == stored[:2]
        with pytest.raises((ConfigError, RendezvousConnectionError), match="user=NAME,password_file=PATH"):
            backend(one.endpoints).get_state()
        with pytest.raises(ConfigError, match="permission denied"):
            backend(one.endpoints, user="other", password_file=str(secret)).get_state()
        secret.write_text("wrong")
        with pytest.raises(ConfigError, match="authentication failed"):
            backend(one.endpoints, user="job", password_file=str(secret)).get_state()


def certificates(folder: Path) -> dict[str, str]:
    """An authority, a server and a client that it knows."""

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    new = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    for name in ("ca", "stranger"):
        openssl(*new, "-x509", "-days", "2", "-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}")
    for name in ("server", "client"):
        extension = folder / f"{name}.ext"
        extension.write_text("subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n")
        openssl(*new, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        openssl(
            *("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial"),
            *("-days", "2", "-extfile", str(extension), "-out", f"{name}.pem"),
        )
    return {path.name: str(path) for path in folder.iterdir()}


@needs_etcd
@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl")
def test_tls(tmp_path: Path) -> None:
    of = certificates(tmp_path)
    options = ["--cert-file", of["server.pem"], "--key-file", of["server.key"]]
    with Etcd(tmp_path, *options, "--client-cert-auth", "--trusted-ca-file", of["ca.pem"]) as one:
        mine = {"cert": of["client.pem"], "key": of["client.key"]}
        stored = backend(one.endpoints, cacert=of["ca.pem"], **mine).set_state(b"one")
        assert stored is not None and stored[2]
        with pytest.raises(RendezvousConnectionError, match="certificate verify failed"):
            backend(one.endpoints, cacert=of["stranger.pem"], **mine).get_state()
        with pytest.raises(RendezvousConnectionError, match=f"https://{one.endpoints}: "):
            backend(one.endpoints, cacert=of["ca.pem"]).get_state()
        with pytest.raises(RendezvousConnectionError):
            backend(one.endpoints).get_state()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"protocol": "ftp"}, "http or https"),
        ({"protocol": "http", "cacert": "x"}, "for protocol=https only"),
        ({"cacert": "/missing"}, "cacert=/missing"),
        ({"user": "me", "password": "x"}, "give password_file"),
        ({"user": "me"}, "go together"),
        ({"user": "me", "password_file": "/missing"}, "password_file=/missing"),
    ],
)
def test_options_that_cannot_be_honoured(options: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        backend("h", **options)


@pytest.mark.nightly
def test_a_wrong_endpoint_is_said_in_one_line(tmp_path: Path) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_error(404)

        def log_message(self, *words: Any) -> None:
            pass

    (tmp_path / "x.py").write_text("")
    base = [sys.executable, "-m", "shared_core.cli.swiftrun", "--standbys=0", "--nnodes=2", "--rdzv-id=x"]
    base += ["--rdzv-backend=etcd", "--rdzv-conf=join_timeout=0.5", "--events="]
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        where = f"127.0.0.1:1,127.0.0.1:{server.server_address[1]}"
        job = start_command(tmp_path, [*base, f"--rdzv-endpoint={where}", "x.py"]).finish()
        server.shutdown()
        thread.join()
    assert job.code == 1
    first, second = where.split(",")
    assert job.stderr.splitlines()[-1].startswith(f"swiftrun: no rendezvous at {first}, {second} (etcd) in 0 s:"), (
        job.stderr
    )
    assert "refused" in job.stderr and "not etcd 3.4 or later" in job.stderr


@pytest.mark.nightly
@needs_etcd
@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_the_failure_of_etcd_s_leader_is_shorter_than_the_lease(how: str, tmp_path: Path) -> None:
    with Etcd(tmp_path, on=(None, None, None)) as three:
        for place in range(3):
            store = backend(three.endpoints)
            state = store.get_state() or store.set_state(b"0")
            assert state is not None
            begun = last = time.monotonic()
            longest = 0.0
            three.members[place].signal(signal.SIGSTOP if how == "frozen" else signal.SIGKILL)
            while last - begun < HOLD_S / 2 and time.monotonic() - begun < 3 * HOLD_S:
                try:
                    state = store.set_state(b"%d" % int(time.monotonic() * 1000), state[1])
                    assert state is not None
                except RendezvousConnectionError:
                    continue
                longest, last = max(longest, time.monotonic() - last), time.monotonic()
                time.sleep(HOLD_S / 10)
            print(f"{how} member {place}: no answer for {longest:.2f} s")
            assert longest < FENCE * HOLD_S and last - begun < 2 * HOLD_S
            if how == "killed":
                three.restart(place)
            else:
                three.members[place].signal(signal.SIGCONT)
