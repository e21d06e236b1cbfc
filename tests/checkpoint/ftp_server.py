"""A small FTP server for tests, of a folder, that can be down and up again at one port."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
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
        self._listener = socket.socket()
        self._listener.bind(("127.0.0.1", 0))  # who connects is refused until it listens
        self._address = self._listener.getsockname()
        self.url = f"ftp://127.0.0.1:{self._address[1]}/storage"

    def up(self) -> None:
        """Serve, on a thread."""
        self._listener.listen()
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def down(self) -> None:
        """Cut all connections, and refuse new ones."""
        for each in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self._open.clear()
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind(self._address)

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                link, _ = listener.accept()
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

    def answer(self, verb: str, word: str) -> list[str]:
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
                return self._transfer(verb, path)
            if verb == "SIZE":
                return [f"213 {path.stat().st_size}"]
            work = {"MKD": path.mkdir, "DELE": path.unlink, "RMD": path.rmdir}.get(verb)
            if work is None:
                return ["502 unknown"]
            work()
        except OSError as error:
            return [f"550 {error.strerror}"]
        return ['257 "done"' if verb == "MKD" else "250 done"]

    def _transfer(self, verb: str, path: Path) -> list[str]:
        given = b""
        if verb == "MLSD":
            for each in sorted(path.iterdir()):
                kind = "dir" if each.is_dir() else "file"
                given += f"type={kind};size={each.stat().st_size}; {each.name}\r\n".encode()
        elif verb == "RETR":
            given = path.read_bytes()[self._rest :]
        target = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600) if verb == "STOR" else -1
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
        return ["150 begins", "226 done"]
