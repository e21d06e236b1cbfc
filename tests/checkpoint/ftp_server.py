"""A small FTP server for tests, of a folder, that can be down and up again at one port."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path


class FtpServer:
    """Refuses connections until it is up.

    Args:
        folder: what it serves.

    Attributes:
        url: of the folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: list[socket.socket] = []
        self._up, self._listens = threading.Event(), False
        self._listener = socket.socket()
        self._listener.bind(("127.0.0.1", 0))  # who connects is refused until it listens
        self.url = f"ftp://127.0.0.1:{self._listener.getsockname()[1]}/storage"

    def up(self) -> None:
        """Serve, on a thread."""
        if not self._listens:
            self._listens = True
            self._listener.listen()
            threading.Thread(target=self._accept, daemon=True).start()
        self._up.set()

    def down(self) -> None:
        """Cut all connections, and each new one at once."""
        self._up.clear()
        for each in self._open:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._open.clear()

    def close(self) -> None:
        """For good."""
        self.down()
        with contextlib.suppress(OSError):  # wakes who accepts
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                link, _ = self._listener.accept()
                if not self._up.is_set():
                    link.close()
                    continue
                self._open.append(link)
                threading.Thread(target=self._serve, args=(link,), daemon=True).start()

    def _serve(self, link: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError), link, link.makefile("rwb", buffering=0) as file:
            session = _Session(self._folder)
            file.write(b"220 ready\r\n")
            while line := file.readline():
                verb, _, word = line.decode().strip().partition(" ")
                for answer in session.answer(verb.upper(), word):
                    file.write(answer.encode() + b"\r\n")


class _Session:
    def __init__(self, folder: Path) -> None:
        self._folder, self._rest, self._data = folder, 0, socket.socket()

    def answer(self, verb: str, word: str) -> Iterable[str]:
        path = self._folder / word.lstrip("/")
        if verb in ("USER", "PASS", "TYPE", "NOOP", "CWD"):
            return ["230 good"]
        if verb in ("EPSV", "PASV"):
            self._data = socket.create_server(("127.0.0.1", 0))
            port = self._data.getsockname()[1]
            if verb == "EPSV":
                return [f"229 here (|||{port}|)"]
            return [f"227 here (127,0,0,1,{port >> 8},{port & 255})"]
        if verb == "REST":
            self._rest = int(word)
            return ["350 good"]
        try:
            if verb in ("MLSD", "RETR", "STOR"):
                return self._transfer(verb, path, self._read(verb, path))
            if verb == "SIZE":
                return [f"213 {path.stat().st_size}"]
            work = {"MKD": path.mkdir, "DELE": path.unlink, "RMD": path.rmdir}.get(verb)
            if work is None:
                return ["502 unknown"]
            work()
        except OSError as error:
            return [f"550 {error.strerror}"]
        return ['257 "done"' if verb == "MKD" else "250 done"]

    def _transfer(self, verb: str, path: Path, given: bytes) -> Iterator[str]:
        target = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600) if verb == "STOR" else -1
        yield "150 begins"
        link, _ = self._data.accept()
        with link, self._data:
            if verb == "STOR":
                os.ftruncate(target, self._rest)
                os.lseek(target, self._rest, os.SEEK_SET)
                while more := link.recv(1 << 16):
                    os.write(target, more)
                os.close(target)
            else:
                link.sendall(given)
        self._rest = 0
        yield "226 done"

    def _read(self, verb: str, path: Path) -> bytes:
        if verb == "RETR":
            return path.read_bytes()[self._rest :]
        lines = [
            f"type={'dir' if each.is_dir() else 'file'};size={each.stat().st_size}; {each.name}\r\n"
            for each in (sorted(path.iterdir()) if verb == "MLSD" else ())
        ]
        return "".join(lines).encode()
