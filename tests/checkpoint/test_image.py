"""Images: every kind of tensor, other readers, snapshots during training, and damage."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import HuggingFaceStorageReader

from shared_core.checkpoint.image import Changed, Image, Stager, load
from shared_core.checkpoint.snapshots import Snapshots
from shared_core.checkpoint.spool import Spool, Target
from shared_core.errors import Unsupported
from shared_core.faults import ANY_STEP, Fault, inject

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
]
DTYPES += [torch.uint8, torch.bool, torch.uint16, torch.uint32, torch.uint64, torch.complex64]
DTYPES += [torch.float8_e4m3fn, torch.float8_e5m2]


def bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    flat = tensor.detach().resolve_conj().contiguous().reshape(-1)
    return tensor.dtype, tuple(tensor.shape), flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def some(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    torch.manual_seed(len(shape))
    if dtype == torch.bool or not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(0, 2, shape).to(dtype)
    return torch.randn(shape, dtype=torch.complex64 if dtype.is_complex else torch.float32).to(dtype)


def tensors() -> dict[str, torch.Tensor]:
    """One of each kind."""
    found = {f"{str(dtype).removeprefix('torch.')}": some(dtype, 3, 5) for dtype in DTYPES}
    found |= {f"scalar {dtype}": some(dtype) for dtype in (torch.float32, torch.bfloat16, torch.int64)}
    base = torch.arange(60, dtype=torch.float32).reshape(6, 10)
    found |= {
        "empty": torch.empty(0, 4),
        "transposed": base.t(),
        "strided": base[::2, 1::3],
        "expanded": torch.ones(1, 3).expand(5, 3),
        "conjugated": some(torch.complex64, 4).conj(),
        "parameter": torch.nn.Parameter(torch.randn(7)),
        "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
        "large": torch.arange(5_000_000, dtype=torch.int32),  # more than one piece
        "odd": torch.ones(3, dtype=torch.uint8),
        "optimizer.0.exp_avg.ä b/c": torch.ones(2),
    }
    return found


def image(path: Path, given: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> Path:
    made = Image(path, given, metadata)
    made.seal()
    assert path.stat().st_size == made.nbytes
    return path


def test_all_kinds_of_tensors_bitwise(tmp_path: Path) -> None:
    given = tensors()
    path = image(tmp_path / "a.safetensors", given, {"param_groups": json.dumps([{"lr": 0.1}])})
    found, metadata = load(path)
    assert found.keys() == given.keys() and json.loads(metadata["param_groups"]) == [{"lr": 0.1}]
    assert {name: bits(found[name]) for name in given} == {name: bits(given[name]) for name in given}
    again, _ = load(path.read_bytes())
    assert {name: bits(again[name]) for name in given} == {name: bits(given[name]) for name in given}
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]
    assert path.stat().st_mode & 0o777 == 0o600


def test_safetensors_reads_it(tmp_path: Path) -> None:
    given = tensors()
    path = image(tmp_path / "a.safetensors", given, {"k": "v"})
    found = load_file(path)
    assert {name: bits(found[name]) for name in given} == {name: bits(given[name]) for name in given}
    with safe_open(path, "pt") as opened:
        assert opened.metadata() == {"k": "v"}


def test_we_read_what_safetensors_writes(tmp_path: Path) -> None:
    given = {"a": torch.randn(3, 2), "b": torch.randn(5).bfloat16(), "c": torch.tensor(4)}
    save_file(given, tmp_path / "a.safetensors")
    found, _ = load(tmp_path / "a.safetensors")
    assert {name: bits(found[name]) for name in given} == {name: bits(given[name]) for name in given}


def test_distributed_checkpoint_reads_it(tmp_path: Path) -> None:
    given = {"w": torch.randn(4, 6), "b": torch.randn(3).bfloat16(), "step": torch.tensor(7.0)}
    image(tmp_path / "replicated0.safetensors", given)
    image(tmp_path / "replicated1.safetensors", {"second.w": torch.randn(2, 2)})
    (tmp_path / "rank0").write_bytes(b"no image")
    (tmp_path / "manifest.json").write_text("{}")
    into = {name: torch.zeros_like(tensor) for name, tensor in given.items()} | {"second.w": torch.zeros(2, 2)}
    dcp.load(into, storage_reader=HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    assert {name: bits(into[name]) for name in given} == {name: bits(given[name]) for name in given}
    assert bits(into["second.w"]) == bits(load(tmp_path / "replicated1.safetensors")[0]["second.w"])


def test_shared_parameters_are_stored_once(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.randn(1000, 10))
    given = {"embedding": weight, "head": weight, "view": weight.detach()[:], "part": weight[:5]}
    path = image(tmp_path / "a.safetensors", given)
    assert path.stat().st_size < 1.1 * weight.nbytes
    found, _ = load(path)
    assert {name: bits(found[name]) for name in given} == {name: bits(given[name]) for name in given}
    assert found["head"].data_ptr() == found["embedding"].data_ptr()
    assert set(load_file(path)) == {"embedding", "part"}


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(2, dtype=torch.complex128), torch.eye(3).to_sparse(), torch.empty(3, device="meta")],
    ids=["complex128", "sparse", "meta"],
)
def test_tensors_without_a_place_are_refused(tensor: torch.Tensor, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="tensor 'x' .* has no place"):
        Image(tmp_path / "a.safetensors", {"x": tensor})
    assert list(tmp_path.iterdir()) == []


def cut(data: bytearray) -> bytes:
    return bytes(data[:-1])


def nothing(data: bytearray) -> bytes:
    return b""


def test_a_change_before_the_copy_is_noticed(tmp_path: Path) -> None:
    weight = torch.zeros(1000)
    made = Image(tmp_path / "a", {"weight": weight})
    weight += 1
    with pytest.raises(Changed, match="'weight' was changed before it was copied"):
        made.seal()
    made.discard()
    assert list(tmp_path.iterdir()) == []


def test_a_snapshot_whose_tensors_changed_is_dropped_with_one_line(tmp_path: Path) -> None:
    said: list[str] = []
    snapshots, weight = Snapshots(Spool(tmp_path), 0, 1, [0], None, said.append), torch.zeros(10)
    for step in (1, 2):
        begin = snapshots._stager.begin
        gate = threading.Event()
        snapshots._stager.begin = lambda work, begin=begin, gate=gate: begin(lambda: (gate.wait(), work()))  # type: ignore[method-assign,misc,func-returns-value]
        assert snapshots.take(step, {}, {"a.safetensors": ({"weight": weight}, {})}, {})
        weight += 1
        gate.set()
        snapshots.fence()
        snapshots._stager.begin = begin  # type: ignore[method-assign]
    assert len(said) == 1 and "'weight' was changed" in said[0]
    assert Spool(tmp_path).newest_complete() is None


def test_every_step_of_a_training_is_a_stop_the_world_copy(tmp_path: Path) -> None:
    """A snapshot at each step boundary, copied while the step runs, with an optimizer's scalars."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.BatchNorm1d(256), torch.nn.Linear(256, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    spool = Spool(tmp_path)
    snapshots = Snapshots(spool, 0, 1, [0], None, pytest.fail)
    optimizer.register_step_pre_hook(lambda *_: snapshots.fence())
    for step in range(1, 8):
        state: dict[str, torch.Tensor] = dict(model.named_parameters())
        for number, moments in enumerate(optimizer.state.values()):
            state |= {f"optimizer.0.{key}.{number}": value for key, value in moments.items()}
        copies = {name: bits(tensor) for name, tensor in state.items()}
        assert snapshots.take(step, {"rank0": b"rng"}, {"r.safetensors": (state, {})}, {})
        optimizer.zero_grad()
        model(torch.randn(16, 64)).square().mean().backward()
        optimizer.step()
        assert spool.newest_complete() == step
        found, _ = load(tmp_path / f"attempt0/step-{step:010d}/r.safetensors")
        assert {name: bits(tensor) for name, tensor in found.items()} == copies
        for old in spool.steps()[:-1]:
            spool.drop(old)
    assert any((tmp_path / "spare").iterdir())


def test_a_worker_killed_at_every_operation_of_a_snapshot(tmp_path: Path) -> None:
    """The snapshot before is whole in memory; a replacement takes the one under way again, whatever was left."""
    weights = {step: torch.full((300,), float(step)) for step in (10, 20)}

    def take(spool: Spool, step: int) -> None:
        snapshots = Snapshots(spool, 0, 1, [0], Target("unused"), print)
        images = {"r.safetensors": ({"w": weights[step]}, {})}
        assert snapshots.take(step, {"rank0": b"%d" % step}, images, {"run": "r"})
        snapshots.fence()

    for nth in range(1, 60):
        spool = Spool(tmp_path / str(nth))
        take(spool, 10)
        pid = os.fork()
        if not pid:
            try:
                inject.arm([Fault(0, ANY_STEP, "checkpoint.stage", "os._exit", nth)], 0)
                take(spool, 20)
            finally:
                os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        newest = spool.newest_complete()
        assert newest in (10, 20) and (code or newest == 20)
        _whole(spool, newest, weights[newest])
        if code == 0:
            break
        assert code == 17
        take(spool, 20)
        assert spool.newest_complete() == 20
        _whole(spool, 20, weights[20])
    assert 8 < nth < 59


def _whole(spool: Spool, step: int, weight: torch.Tensor) -> None:
    folder = spool.folder / f"attempt0/step-{step:010d}"
    assert (folder / "rank0").read_bytes() == b"%d" % step
    assert bits(load(folder / "r.safetensors")[0]["w"]) == bits(weight)


def test_the_stager_hands_on_errors_once() -> None:
    stager = Stager()
    stager.begin(lambda: 1 / 0)  # type: ignore[arg-type,return-value]
    with pytest.raises(ZeroDivisionError):
        stager.fence()
    stager.fence()
    done = []
    stager.begin(lambda: done.append(1))
    stager.fence()
    assert done == [1]
