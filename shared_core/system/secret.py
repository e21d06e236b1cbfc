"""The secret of a job's machines, and how two processes prove to each other that they know it.

A user who names no secret has one in a file of the home folder, made by the first job on several machines. It serves
where all machines have the same, as with a home that they share.

The proof is mutual and comes before anything else on a connection: each side sends a random number and the HMAC-SHA256
of both numbers and its own role. The user's secret itself is never a key: each job derives one from it and its name.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
import stat
import time
from contextlib import suppress
from pathlib import Path

from shared_core.errors import ConfigError, NotAFile
from shared_core.kinds import open_regular

#: Variable of ``swiftrun`` with the path of the user's secret.
VARIABLE = "SWIFT_RECOVERY_SECRET_FILE"
#: The secret of a user who has named none.
OWN = "~/.config/swift-recovery/secret"
#: File of the job's key in its private folder, where its workers find it.
FILE = "secret"
#: Longest time to prove the secret, and to say what is wanted then, in seconds.
PROOF_S = 5.0
_LEAST, _MOST = 16, 4096
_MAGIC = b"swift-3"
_NONCE = _MAC = hashlib.sha256().digest_size
_SERVER, _CLIENT, _CONNECTION = b"server", b"client", b"connection"


class NotAuthenticated(ConnectionError):
    """Somebody answers who does not know the job's secret."""


def find(path: str | None) -> bytes:
    """The secret that the user has named, else the one of the home folder; ConfigError where none can be used."""
    path = path or os.environ.get(VARIABLE)
    if path:
        return read(path, "--secret-file ")
    own = os.path.expanduser(OWN)
    try:
        return _own(Path(own))
    except ConfigError as error:
        why = str(error)
    except OSError as error:
        why = f"{own} cannot be made: {error.strerror}"
    raise ConfigError(
        f"a job on several machines needs a secret that all of them have, and {why}. Give all the same --secret-file "
        "(docs/machines.md#security)"
    )


def _own(path: Path) -> bytes:
    """The secret of the home folder, which is made if there is none. Of several machines one makes it."""
    if not path.is_absolute():
        raise ConfigError("the user has no home folder")
    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        whole = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
        fd = os.open(whole, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with open(fd, "w") as file:
                file.write(secrets.token_hex(_NONCE) + "\n")
            with suppress(FileExistsError):  # another machine was first
                os.link(whole, path)
        finally:
            os.unlink(whole)
    folder = path.parent.stat()
    if folder.st_uid != os.geteuid() or folder.st_mode & 0o022:
        raise ConfigError(f"others can write to {path.parent}: chmod 700 {path.parent}")
    return read(str(path))


def read(path: str, option: str = "") -> bytes:
    """The secret in a file; ConfigError if it is missing, short, or others may read it. ``option`` named the file."""
    how = f"make one with: (umask 077; head -c 32 /dev/urandom | base64 > {path})"
    try:
        with open_regular(path) as file:
            found = os.fstat(file.fileno())
            raw = file.read(_MOST + 1).strip()
    except NotAFile as error:
        raise ConfigError(f"{option}{path} is not a file ({error.strerror}): {how}") from error
    except OSError as error:
        raise ConfigError(f"{option}{path} cannot be read ({error.strerror}): {how}") from error
    if found.st_uid not in (os.geteuid(), 0) or found.st_mode & 0o077:
        raise ConfigError(
            f"{option}{path} belongs to another user or can be read by others (mode "
            f"{stat.S_IMODE(found.st_mode):04o}): chmod 600 {path}, and if others have read it, {how}"
        )
    if not _LEAST <= len(raw) <= _MOST:
        raise ConfigError(f"{option}{path} must hold {_LEAST} to {_MOST} bytes: {how}")
    return raw


def derive(secret: bytes, job: str) -> bytes:
    return hmac.digest(secret, b"swift-recovery job " + job.encode(), "sha256")


def leave(job_dir: Path, key: bytes) -> None:
    """Put the job's key where its workers find it. Raises OSError where there is one already."""
    fd = os.open(job_dir / FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(fd, "wb") as file:
        file.write(key)


def of_job(job_dir: Path) -> bytes:
    """The key of a job on several machines. Raises OSError where there is none."""
    return (job_dir / FILE).read_bytes()


def ask(sock: socket.socket, key: bytes) -> bytes:
    """The server's side of a proof: returns a key for this connection alone, else OSError. Changes the time-out."""
    deadline = time.monotonic() + PROOF_S
    sock.settimeout(PROOF_S)
    mine = secrets.token_bytes(_NONCE)
    sock.sendall(_MAGIC + mine)
    answer = _receive(sock, _NONCE + _MAC, deadline)
    theirs, proof = answer[:_NONCE], answer[_NONCE:]
    if not hmac.compare_digest(proof, _proof(key, _CLIENT, mine, theirs)):
        raise ConnectionError("the other side does not know the secret of this job")
    sock.sendall(_proof(key, _SERVER, mine, theirs))
    return _proof(key, _CONNECTION, mine, theirs)


def prove(sock: socket.socket, key: bytes) -> bytes:
    """The client's side of :func:`ask`: NotAuthenticated where the other side has another key. Changes the time-out."""
    deadline = time.monotonic() + PROOF_S
    hello = _receive(sock, len(_MAGIC) + _NONCE, deadline)
    magic, theirs = hello[: len(_MAGIC)], hello[len(_MAGIC) :]
    if magic != _MAGIC:
        raise ConnectionError("no machine of a job answers there")
    mine = secrets.token_bytes(_NONCE)
    sock.sendall(mine + _proof(key, _CLIENT, theirs, mine))
    try:
        proof = _receive(sock, _MAC, deadline)
    except ConnectionError as error:
        raise NotAuthenticated("the other machine has another secret or another --rdzv-id") from error
    if not hmac.compare_digest(proof, _proof(key, _SERVER, theirs, mine)):
        raise NotAuthenticated("the other machine does not know the secret of this job")
    return _proof(key, _CONNECTION, theirs, mine)


def _proof(key: bytes, role: bytes, of_server: bytes, of_client: bytes) -> bytes:
    return hmac.digest(key, role + of_server + of_client, "sha256")


def _receive(sock: socket.socket, count: int, deadline: float) -> bytes:
    got = b""
    while len(got) < count:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        piece = sock.recv(count - len(got))
        if not piece:
            raise ConnectionError("the other side has gone")
        got += piece
    return got
