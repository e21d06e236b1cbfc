"""Requests to the job's store, from somebody who has proved to know the secret."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from shared_core.system.wire import Link
from shared_core.transport import remote_store
from shared_core.transport.store import MemoryStore

from ..harness import Target, only_errors
from ..machines import answered, frames

keys = st.sampled_from([b"a", b"gen/1", b"\xff"])
requests = st.lists(
    st.one_of(
        st.tuples(st.sampled_from([b"S", b"X", b"Q", b"A"]), st.tuples(keys, st.sampled_from([b"1", b"x", b"-3"]))),
        st.tuples(st.sampled_from([b"C", b"D", b"L"]), st.tuples(keys)),
        st.tuples(st.sampled_from([b"G", b"P"]), st.tuples(st.sampled_from([b"0", b"0.001", b"nan", b"-1"]), keys)),
    ),
    max_size=6,
)


def _asked(value: Any, _folder: Path) -> bytes:
    return b"".join(frames([(kind, 0, 0, "", [remote_store._pack(fields)]) for kind, fields in value]))


def _serve(data: bytes, _folder: Path) -> int:
    store = MemoryStore()

    def serve(sock: Any) -> None:
        with suppress(ConnectionError):
            remote_store.serve(store, Link(sock, None, serves=True))

    answer = answered(data, serve)
    assert not store._bells, "whoever has gone waits for nothing"
    return len(answer)


TARGETS = [Target("store.requests", requests, _asked, _serve, only_errors)]
