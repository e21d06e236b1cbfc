"""The rendezvous backend ``etcd``: the v3 API of etcd 3.4 and later, through its JSON gateway.

The gateway is part of every etcd, and only one small value is kept there, so the standard library is enough. Every
request is a connection of its own: none can go stale when a member fails or restarts.
"""

from __future__ import annotations

import base64
import http.client
import json
import ssl
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token

from shared_core.errors import ConfigError
from shared_core.kinds import open_regular

ETCD = "etcd"
#: Keys of all jobs begin with this.
PREFIX = "/swift-recovery/"
#: Life of the key's lease, in seconds: etcd then removes what an abandoned job has left.
_TTL_S = 7 * 86400
_MOST_BYTES = 1 << 22


class _Refused(RendezvousConnectionError):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{message or 'no reason given'} (HTTP {status})")
        self.status, self.message = status, message


class EtcdBackend(RendezvousBackend):
    """A value in etcd, replaced only by who knows its newest revision. Several threads may use it.

    Args:
        endpoints: host and port of each member; they are tried in turn.
        options: ``protocol`` (http or https), ``cacert``, ``cert``, ``key``, ``user``, ``password_file``.

    Raises:
        ConfigError: for wrong options, or files that cannot be read.
    """

    def __init__(
        self, endpoints: Sequence[tuple[str, int]], run_id: str, options: Mapping[str, Any], timeout_s: float
    ) -> None:
        self._endpoints, self._timeout_s = tuple(endpoints), timeout_s
        self._key = _encode(f"{PREFIX}{run_id}".encode())
        self._tls = _tls(options)
        self._user = _user(options)
        self._good = 0
        self._token = ""
        self._lease = ("", 0.0)

    @property
    def name(self) -> str:
        return ETCD

    @property
    def endpoint(self) -> tuple[str, int]:
        return self._endpoints[self._good]

    def get_state(self) -> tuple[bytes, Token] | None:
        found = self._decode(self._call("kv/range", {"key": self._key}))
        return found[1:] if found else None

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        # The answer to a successful request may get lost, so each value carries a mark of its writer.
        mark = uuid.uuid4().hex.encode()
        try:
            answer = self._replace(mark + b"\n" + state, token)
        except _Refused:
            self._lease = ("", 0.0)  # for instance, etcd was set up again
            answer = self._replace(mark + b"\n" + state, token)
        if answer.get("succeeded"):
            return state, int(answer["header"]["revision"]), True
        found = self._decode(answer["responses"][0]["response_range"])
        return (*found[1:], found[0] == mark) if found else None

    def _replace(self, value: bytes, token: Token | None) -> dict[str, Any]:
        lease, until = self._lease
        if time.monotonic() > until:
            lease = str(self._call("lease/grant", {"TTL": str(_TTL_S)})["ID"])
            self._lease = (lease, time.monotonic() + _TTL_S / 2)
        newest = {"key": self._key, "target": "MOD", "result": "EQUAL", "mod_revision": str(token or 0)}
        put = {"key": self._key, "value": _encode(value), "lease": lease}
        look = {"request_range": {"key": self._key}}
        return self._call("kv/txn", {"compare": [newest], "success": [{"request_put": put}], "failure": [look]})

    @staticmethod
    def _decode(answer: dict[str, Any]) -> tuple[bytes, bytes, Token] | None:
        found = answer.get("kvs")
        if not found:
            return None
        mark, _, state = base64.b64decode(found[0].get("value", "")).partition(b"\n")
        return mark, state, int(found[0]["mod_revision"])

    # -- requests -------------------------------------------------------------------------------------------------

    def _call(self, path: str, message: dict[str, Any]) -> dict[str, Any]:
        """Ask the member that answered last, then the others, each once. Raises RendezvousConnectionError if none gave
        an answer, ConfigError if this user may not do that, _Refused if the lease does not exist any more.
        """
        said = []
        first = self._good
        for turn in range(max(2, len(self._endpoints))):  # at least two: a token that has expired fails once
            place = (first + turn) % len(self._endpoints)
            try:
                answer = self._ask(place, path, message)
                self._good = place
                return answer
            except _Refused as error:
                if "lease not found" in error.message:
                    raise
                if _is_final(error):
                    raise ConfigError(
                        f"etcd at {self._where(place)}: {error}. --rdzv-conf user=NAME,password_file=PATH must name a "
                        f"user who may read and write keys that begin with {PREFIX}"
                    ) from error
                said.append(f"{self._where(place)}: {error}")
            except http.client.RemoteDisconnected:  # what etcd 3.4.23 does with a wrong token, too
                said.append(
                    f"{self._where(place)}: closed the connection without an answer; if it wants TLS or a user, give "
                    "--rdzv-conf protocol=https or user=NAME,password_file=PATH"
                )
            except (OSError, http.client.HTTPException, ValueError) as error:
                said.append(f"{self._where(place)}: {error or type(error).__name__}")
            self._token = ""
            self._good = (place + 1) % len(self._endpoints)  # the next call does not begin with this one
        raise RendezvousConnectionError("; ".join(dict.fromkeys(said)))

    def _ask(self, place: int, path: str, message: dict[str, Any]) -> dict[str, Any]:
        token = self._token
        if self._user and not token:
            token = self._token = str(self._post(place, "auth/authenticate", self._user, "")["token"])
        return self._post(place, path, message, token)

    def _post(self, place: int, path: str, message: Mapping[str, Any], token: str) -> dict[str, Any]:
        host, port = self._endpoints[place]
        to: http.client.HTTPConnection
        if self._tls is not None:
            to = http.client.HTTPSConnection(host, port, timeout=self._timeout_s, context=self._tls)
        else:
            to = http.client.HTTPConnection(host, port, timeout=self._timeout_s)
        with closing(to):
            headers = {"Content-Type": "application/json"} | ({"Authorization": token} if token else {})
            to.request("POST", f"/v3/{path}", json.dumps(message), headers)
            reply = to.getresponse()
            body = reply.read(_MOST_BYTES)
        if reply.status == 404 and not body.startswith(b"{"):
            raise _Refused(404, "this is not etcd 3.4 or later with its JSON gateway (--enable-grpc-gateway)")
        if reply.status != 200 and not body.startswith(b"{"):
            raise _Refused(reply.status, body.decode(errors="replace").strip()[:200])
        answer = json.loads(body)
        if not isinstance(answer, dict):
            raise ValueError(f"unexpected answer {body[:80]!r}")
        if reply.status != 200:
            raise _Refused(reply.status, str(answer.get("message") or answer.get("error")))
        return answer

    def _where(self, place: int) -> str:
        host, port = self._endpoints[place]
        return f"{'http' if self._tls is None else 'https'}://{f'[{host}]' if ':' in host else host}:{port}"


def _is_final(error: _Refused) -> bool:
    return any(words in error.message for words in ("permission denied", "authentication failed", "user name is empty"))


def _encode(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _tls(options: Mapping[str, Any]) -> ssl.SSLContext | None:
    files = {name: str(options[name]) for name in ("cacert", "cert", "key") if options.get(name)}
    protocol = str(options.get("protocol", "https" if files else "http"))
    if protocol not in ("http", "https"):
        raise ConfigError(f"--rdzv-conf protocol={protocol}: must be http or https")
    if protocol == "http":
        if files:
            raise ConfigError(f"--rdzv-conf {', '.join(files)}: for protocol=https only; set it, or leave these out")
        return None
    try:
        context = ssl.create_default_context(cafile=files.get("cacert"))
        if "cert" in files:
            context.load_cert_chain(files["cert"], files.get("key"))
    except OSError as error:  # ssl's errors are OSErrors
        raise ConfigError(
            f"--rdzv-conf {', '.join(f'{key}={path}' for key, path in files.items())}: {error}"
        ) from error
    return context


def _user(options: Mapping[str, Any]) -> dict[str, str]:
    name, path = options.get("user"), options.get("password_file")
    if options.get("password"):
        raise ConfigError("--rdzv-conf password=...: all users of the machine can read it; give password_file=PATH")
    if bool(name) != bool(path):
        raise ConfigError("--rdzv-conf: user=NAME and password_file=PATH go together")
    if not name:
        return {}
    try:
        with open_regular(str(path)) as file:
            return {"name": str(name), "password": file.read().decode().strip("\n")}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--rdzv-conf password_file={path}: {error}") from error
