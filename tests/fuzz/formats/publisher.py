"""A rank's publications: step boundaries and what goes with them."""

from __future__ import annotations

from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

from shared_core.encoding.plain import dumps
from shared_core.protocol.frontier import StepBoundary
from shared_core.worker.state.publication_file import packed
from shared_core.worker.state.publications import UNOPTIMIZED, RecordKey, SharedMemoryPublisher

from ..harness import Target, exact, exact_parts, only_errors
from ..plain_values import values

boundaries = st.builds(
    lambda version, seq, saved: StepBoundary(1, version, 0, "batch", {"default": seq}, replicas=[0, 1], saved=saved),
    st.integers(0, 99),
    st.integers(0, 99),
    st.booleans(),
)
parts = st.dictionaries(st.sampled_from(["loop", "random", "loader"]), values, max_size=2)
records = st.lists(
    st.tuples(
        st.builds(
            RecordKey,
            st.integers(0, 1),
            st.sampled_from(["w", "default"]),
            st.just("broadcast"),
            st.integers(0, 9),
            st.sampled_from([(), (1,), (1, 3, 0)]),
        ),
        st.lists(st.builds(lambda n: torch.full((n,), float(n)), st.integers(0, 3)), max_size=2),
    ),
    max_size=5,
)
orders = st.lists(st.integers(0, 999), max_size=20) | st.lists(st.lists(st.integers(0, 99), max_size=4), max_size=5)


@lru_cache(1)
def _publisher(folder: Path) -> SharedMemoryPublisher:
    return SharedMemoryPublisher(folder / "rank0")


def _write_boundary(value: Any, folder: Path) -> bytes:
    boundary, local = value
    _publisher(folder).publish_boundary(boundary, local)
    return (_publisher(folder).folder / "boundary.1").read_bytes()


def _read_boundary(data: bytes, folder: Path) -> Any:
    publisher = _publisher(folder)
    (publisher.folder / "boundary.1").write_bytes(data)
    return publisher.boundaries(), publisher.read_boundary(1)


def _of_head(head: bytes) -> bytes:
    """A file with this head and no mistake in its checksum."""
    return b"".join(packed(head, [dumps({"a": 1})]))


def _of_payload(payload: bytes) -> bytes:
    return b"".join(packed(b"", [payload]))


def _head(value: Any, folder: Path) -> bytes:
    return dumps(asdict(value))


def _refers(value: Any, folder: Path) -> bytes:
    """A boundary that refers to a file of unoptimized parameters."""
    publisher = _publisher(folder)
    publisher.write_unoptimized(1, {3: torch.ones(2)})
    return dumps({"a": value, UNOPTIMIZED: {3: 1}})


def _read_end(data: bytes, folder: Path) -> Any:
    publisher = _publisher(folder)
    (publisher.folder / "end.0").write_bytes(data)
    return publisher.read_end(0)


def _write_end(value: Any, folder: Path) -> bytes:
    _publisher(folder).publish_end(0, value, {"x": 1})
    return (_publisher(folder).folder / "end.0").read_bytes()


def _write_mid(value: Any, folder: Path) -> bytes:
    _publisher(folder).publish_mid(1, 0, value)
    return (_publisher(folder).folder / "mid.1.0").read_bytes()


def _read_mid(data: bytes, folder: Path) -> Any:
    (_publisher(folder).folder / "mid.1.0").write_bytes(data)
    return _publisher(folder).read_mid(1, 0)


def _write_order(value: Any, folder: Path) -> bytes:
    publisher = _publisher(folder)
    name = publisher.orders.write(value)
    data = (publisher.folder / name).read_bytes()
    publisher.orders.drop(name)
    return data


def _read_order(data: bytes, folder: Path) -> Any:
    publisher = _publisher(folder)
    (publisher.folder / "order.x").write_bytes(data)
    try:
        return publisher.orders.read("order.x")
    finally:
        publisher.orders.drop("order.x")


def _inner_order(value: Any, folder: Path) -> bytes:
    from shared_core.loaders.reshard import pack_indices

    return dumps(pack_indices(value))


def _write_records(value: Any, folder: Path) -> bytes:
    publisher = _publisher(folder)
    path = publisher.folder / "records"
    path.write_bytes(b"")
    for key, results in value:
        publisher.records.add(key, results)
    return path.read_bytes()


def _read_records(data: bytes, folder: Path) -> Any:
    (_publisher(folder).folder / "records").write_bytes(data)
    return _publisher(folder).records.read()


TARGETS = [
    Target("publisher.boundary", st.tuples(boundaries, parts), _write_boundary, _read_boundary, exact),
    Target("publisher.boundary_head_sealed", boundaries, _head, _read_boundary, only_errors, seal=_of_head),
    Target("publisher.boundary_parts_sealed", values, _refers, _read_boundary, only_errors, seal=_of_payload),
    Target("publisher.end", values, _write_end, _read_end, exact),
    Target("publisher.end_sealed", values, lambda value, _: dumps(value), _read_end, only_errors, seal=_of_payload),
    Target("publisher.mid", parts, _write_mid, _read_mid, exact, count=10),
    Target("publisher.order", orders, _write_order, _read_order, exact),
    Target("publisher.order_sealed", orders, _inner_order, _read_order, only_errors, seal=_of_payload),
    Target("publisher.records", records, _write_records, _read_records, exact_parts),
]
