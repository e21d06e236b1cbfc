"""What the machines of a job know and nobody else does, and how two processes prove to each other that they know it.

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

from shared_core.errors import ConfigError

#: In the environment of ``swiftrun``: path of the user's secret.
VARIABLE = "SWIFT_RECOVERY_SECRET_FILE"
#: File of the job's key in its private folder, where its workers find it.
FILE = "secret"
#: Longest time to prove it, and to say what is wanted then, in seconds.
PROOF_S = 5.0
_LEAST, _MOST = 16, 4096
_MAGIC, _SECRET, _OPEN = b"swift-1", b"s", b"o"
_NONCE = _MAC = hashlib.sha256().digest_size
_SERVER, _CLIENT = b"server", b"client"


def read(path: str) -> bytes:
    """The user's secret.

    Raises:
        ConfigError: if there is none, it is short, or others may read it.
    """
    how = f"make one with: (umask 077; head -c 32 /dev/urandom | base64 > {path})"
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise ConfigError(f"--secret-file {path} is not a file: {how}")
            raw = file.read(_MOST + 1).strip()
    except OSError as error:
        raise ConfigError(f"--secret-file {path} cannot be read ({error.strerror}): {how}") from error
    if found.st_uid not in (os.geteuid(), 0) or found.st_mode & 0o077:
        raise ConfigError(
            f"--secret-file {path} belongs to another user or can be read by others (mode "
            f"{stat.S_IMODE(found.st_mode):04o}): chmod 600 {path}, and if others have read it, {how}"
        )
    if not _LEAST <= len(raw) <= _MOST:
        raise ConfigError(f"--secret-file {path} must hold {_LEAST} to {_MOST} bytes: {how}")
    return raw


def of_user(path: str | None) -> bytes | None:
    """The secret that the user has named on the command line or in the environment; None for none.

    Raises:
        ConfigError: as :func:`read`.
    """
    path = path or os.environ.get(VARIABLE)
    return read(path) if path else None


def derive(secret: bytes | None, job: str) -> bytes | None:
    """The key of one job."""
    return hmac.digest(secret, b"swift-recovery job " + job.encode(), "sha256") if secret is not None else None


def leave(job_dir: Path, key: bytes | None) -> None:
    """Put the job's key where its workers find it."""
    if key is not None:
        fd = os.open(job_dir / FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(fd, "wb") as file:
            file.write(key)


def of_job(job_dir: Path) -> bytes | None:
    """The job's key; None for none."""
    with suppress(FileNotFoundError):
        return (job_dir / FILE).read_bytes()
    return None


def ask(sock: socket.socket, key: bytes | None) -> None:
    """The server's side: let the other one prove that it knows the key, and prove it.

    Raises:
        OSError: it does not, or not in time.
    """
    deadline = time.monotonic() + PROOF_S
    sock.settimeout(PROOF_S)
    mine = secrets.token_bytes(_NONCE)
    sock.sendall(_MAGIC + (_OPEN if key is None else _SECRET) + mine)
    if key is not None:
        answer = _receive(sock, _NONCE + _MAC, deadline)
        theirs, proof = answer[:_NONCE], answer[_NONCE:]
        if not hmac.compare_digest(proof, _proof(key, _CLIENT, mine, theirs)):
            raise ConnectionError("the other side does not know the secret of this job")
        sock.sendall(_proof(key, _SERVER, mine, theirs))


def prove(sock: socket.socket, key: bytes | None) -> None:
    """The client's side of :func:`ask`. The socket's time-out is changed.

    Raises:
        OSError: the other side does not know the key, or has another one, or has none.
    """
    deadline = time.monotonic() + PROOF_S
    hello = _receive(sock, len(_MAGIC) + 1 + _NONCE, deadline)
    magic, kind, theirs = hello[: len(_MAGIC)], hello[len(_MAGIC) : len(_MAGIC) + 1], hello[len(_MAGIC) + 1 :]
    if magic != _MAGIC:
        raise ConnectionError("no machine of a job answers there")
    if kind != (_OPEN if key is None else _SECRET):
        who = "this machine" if key is None else "the other machine"
        raise ConnectionError(f"{who} was started without --secret-file, the other one of the two with it")
    if key is not None:
        mine = secrets.token_bytes(_NONCE)
        sock.sendall(mine + _proof(key, _CLIENT, theirs, mine))
        try:
            proof = _receive(sock, _MAC, deadline)
        except ConnectionError as error:
            raise ConnectionError("the other machine has another --secret-file or --rdzv-id") from error
        if not hmac.compare_digest(proof, _proof(key, _SERVER, theirs, mine)):
            raise ConnectionError("the other machine does not know the secret of this job")


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
