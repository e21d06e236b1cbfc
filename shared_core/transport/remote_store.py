"""The job's store from another process: requests and answers as frames of an authenticated link.

One request at a time on a link, and one answer to each. A request's kind is its operation; fields are bytes with their
lengths. Whoever waits for a key holds a thread of the agent, and is given up the moment its process has gone.
"""

from __future__ import annotations

import copy
import os
import select
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from shared_core.system.wire import Link
from shared_core.transport.store import Bell, MemoryStore, Store, StoreError

#: Kind of the frame with which a connection becomes one to the store.
OPEN = b"K"
_SET, _GET, _CHECK, _ADD, _COMPARE_SET, _DELETE = b"S", b"G", b"C", b"A", b"X", b"D"
_PUSH, _POP, _LENGTH = b"Q", b"P", b"L"
_DONE, _FAILED = b".", b"!"
#: Longest request and longest answer, in bytes: records of a job on thousands of workers have less.
_MOST = 64 << 20
_COUNT = struct.Struct("<I")
#: Seconds within which an answer comes, beyond what the store may take for it; else the agent is gone.
_ANSWER_S = 60.0
#: Longer waits have no time-out of the socket, which cannot be as long.
_LONG_S = 1e6


def _pack(fields: Sequence[bytes]) -> bytes:
    return b"".join(part for field in fields for part in (_COUNT.pack(len(field)), field))


def _unpack(data: bytes) -> list[bytes]:
    """The fields of a frame. Raises ConnectionError where it holds no fields."""
    fields, at = [], 0
    while at < len(data):
        if at + _COUNT.size > len(data):
            raise ConnectionError("a request to the job's store is cut off")
        (length,) = _COUNT.unpack_from(data, at)
        at += _COUNT.size
        if at + length > len(data):
            raise ConnectionError("a request to the job's store is cut off")
        fields.append(data[at : at + length])
        at += length
    return fields


class _LinkBell:
    """A bell for a request that waits: it also hears that the other side of the link has gone."""

    def __init__(self, link: Link) -> None:
        self._link, self._fd = link, os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def close(self) -> None:
        os.close(self._fd)

    def ring(self) -> None:
        with suppress(OSError):
            os.eventfd_write(self._fd, 1)

    def wait(self, seconds: float) -> bool:
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        poll.register(self._link.fileno(), select.POLLIN)
        heard = dict(poll.poll(min(seconds, _LONG_S) * 1000.0))
        if self._link.fileno() in heard:  # it asks for nothing more before it has its answer
            raise ConnectionError("the other side has gone")
        if self._fd in heard:
            os.eventfd_read(self._fd)
        return bool(heard) or seconds > _LONG_S


def serve(store: MemoryStore, link: Link) -> None:
    """Answer the requests of one connection until it ends, with OSError; on a thread of its own."""
    link.settimeout(None)
    bells: list[_LinkBell] = []

    def bell() -> _LinkBell:
        if not bells:
            bells.append(_LinkBell(link))
        return bells[0]

    try:
        for kind, _, _, _, data in link.frames(lambda _: _MOST):
            try:
                found = _do(store, kind, _unpack(data), bell)
            except StoreError as error:
                link.send(_FAILED, data=[str(error).encode()])
            else:
                link.send(_DONE, data=[_pack(found)])
    finally:
        for each in bells:
            each.close()


def _do(store: MemoryStore, kind: bytes, fields: list[bytes], bell: Callable[[], Bell]) -> list[bytes]:
    try:
        if kind in (_GET, _POP):
            wait_s, *keys = fields
            if kind == _GET:
                return store.multi_get([key.decode() for key in keys], float(wait_s), bell)
            (key,) = keys
            return [store.queue_pop(key.decode(), float(wait_s), bell)]
        if kind == _CHECK:
            return [b"1" if store.check([each.decode() for each in fields]) else b""]
        key, *rest = fields
        if kind == _ADD:
            return [b"%d" % store.add(key.decode(), int(*rest))]
        if kind == _COMPARE_SET:
            return [store.compare_set(key.decode(), *rest)]
        if kind == _SET:
            store.set(key.decode(), *rest)
        elif kind == _PUSH:
            store.queue_push(key.decode(), *rest)
        elif kind == _DELETE:
            return [b"1" if store.delete_key(key.decode()) else b""]
        elif kind == _LENGTH:
            return [b"%d" % store.queue_len(key.decode())]
        else:
            raise ConnectionError(f"{kind!r} is no request to the job's store")
        return []
    except (TypeError, ValueError) as error:
        raise ConnectionError(f"no request to the job's store: {error}") from error


class RemoteStore(Store):
    """The job's store over a link.

    Threads take turns, also while one waits for a key: a thread that may block needs a store of its own. ``link`` is
    closed with this object.
    """

    def __init__(self, link: Link, timeout_s: float) -> None:
        self._link, self._timeout_s, self._prefix = link, timeout_s, ""
        self._lock = threading.Lock()
        link.settimeout(_ANSWER_S)
        with self._translated():
            link.send(OPEN)

    def close(self) -> None:
        with suppress(OSError):
            self._link.close()

    def below(self, prefix: str) -> RemoteStore:
        """The keys that begin with ``prefix``, without it, over the same link."""
        store = copy.copy(self)
        store._prefix += prefix
        return store

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(_SET, self._key(key), value)

    def multi_get(self, keys: Sequence[str], timeout_s: float | None = None) -> list[bytes]:
        wait_s = self._timeout_s if timeout_s is None else timeout_s
        return self._ask(_GET, str(wait_s), *map(self._key, keys), wait_s=wait_s)

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask(_CHECK, *map(self._key, keys))[0])

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(_ADD, self._key(key), str(amount))[0])

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self._ask(_COMPARE_SET, self._key(key), expected, desired)[0]

    def delete_key(self, key: str) -> bool:
        return bool(self._ask(_DELETE, self._key(key))[0])

    def queue_push(self, key: str, value: str | bytes) -> None:
        self._ask(_PUSH, self._key(key), value)

    def queue_pop(self, key: str) -> bytes:
        return self._ask(_POP, str(self._timeout_s), self._key(key), wait_s=self._timeout_s)[0]

    def queue_len(self, key: str) -> int:
        return int(self._ask(_LENGTH, self._key(key))[0])

    def _key(self, key: str) -> str:
        return self._prefix + key

    def _ask(self, kind: bytes, *fields: str | bytes, wait_s: float = 0.0) -> list[bytes]:
        raw = [field.encode() if isinstance(field, str) else bytes(field) for field in fields]
        with self._lock, self._translated():
            self._link.settimeout(None if wait_s > _LONG_S else wait_s + _ANSWER_S)
            self._link.send(kind, data=[_pack(raw)])
            answer = self._link.receive(lambda _: _MOST)
            if answer.kind == _FAILED:
                raise StoreError(answer.data.decode(errors="replace"))
            return _unpack(answer.data)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """What goes wrong on the link, as StoreError; the link is closed, as a late answer would be the next one's."""
        try:
            yield
        except StoreError:
            raise
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise StoreError(f"the job's store is gone: {error}") from error
            raise
