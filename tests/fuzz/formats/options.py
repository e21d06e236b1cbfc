"""What users write: configuration, faults, sections of DeepSpeed's configuration, failure traces, secrets."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from benchmarks.simulate.trace import read_trace
from shared_core.cli.job_options import find_section
from shared_core.config import SwiftConfig
from shared_core.config.config import full_names
from shared_core.faults import inject, spec
from shared_core.system import secret

from ..harness import Target, only_errors, stable

options = st.fixed_dictionaries(
    {},
    optional={
        "on_failure": st.sampled_from(["replace", "shrink", "restart"]),
        "seed": st.integers(0, 1 << 40),
        "checkpoint": st.fixed_dictionaries(
            {},
            optional={"dir": st.sampled_from(["/x", "s3://bucket/x"]), "keep": st.integers(2, 9)},
        ),
        "detection.wait_timeout_s": st.floats(1, 1e6),
        "log": st.fixed_dictionaries({"groups": st.sampled_from(["worker", "0-3,4-7"])}),
        "checkpoint.background": st.booleans(),
    },
)
_YAMLS = (
    "on_failure: shrink\nseed: 7\ndetection: {wait_timeout_s: 1.5e2}\n",
    "# all of it\ncheckpoint:\n  dir: &a /x\n  background: no\nlog:\n  dir: *a\n",
    "seed: 0x1F\nresize.replace_timeout_s: 1:30\nlog.groups: '0-3,4-7'\n",
    "base: &b {seed: 1}\nseed: !!int '3'\ndata: !!str refetch\n",
    "? seed\n: 3\n--- \n...\n",
    "seed: 2026-11-22\nlog: {dir: 2026-11-22T08:38:01Z}\ndata: !!binary aGVsbG8=\ncheckpoint.keep: !!float .nan\n",
    "<<: {seed: 1}\ncheckpoint: !!set {a, b}\ncheckpoint.resume_from: !!omap [a: 1]\nlog.dir: !!bool yes\ndata: ~\n",
)
struck = st.lists(
    st.builds(
        spec.Fault,
        st.integers(0, 7),
        st.integers(-1, 9),
        st.sampled_from([point for point in spec.POINTS if point != "step_boundary"]),
        st.sampled_from(["SIGKILL", "SIGTERM"]),
        st.integers(1, 3),
        st.integers(0, 2),
        st.floats(0, 9),
    ),
    max_size=3,
)
_SCRIPTS = (
    "config = {'swift_recovery': {'seed': 3}}\n",
    "ds = {'a': 1, 'swift_recovery': dict(seed=3), 'b': [1, 2]}\nprint('ds.json')\n",
    "import x\n\ndef f(a=1, *, b: int = 2):\n    return {'swift_recovery': {'seed': -1, 'data': 'refetch'}}\n",
)
_TRACES = (
    "# workers: 24\n# duration_s: 22896\n# resolution_s: 144\ntime_s,change\n120,-1\n300.5,1\n",
    "# workers: 8\n10,-2\n20,-3\n30,4\n",
)
_JSON_TRACE = json.dumps({"workers": 24, "duration_s": 900, "events": [[120, -1], [300, 1]]})


def _config(data: bytes, folder: Path, name: str) -> SwiftConfig:
    (folder / name).write_bytes(data)
    return SwiftConfig.from_file(folder / name)


def _variable(data: bytes, _folder: Path) -> SwiftConfig:
    """An option in the environment, of which the system takes anything but a NUL."""
    name, _, value = data.replace(b"\0", b"").decode(errors="surrogateescape").partition("=")
    return SwiftConfig.from_env({f"SWIFT_RECOVERY_{name.upper()}": value, "SWIFT_RECOVERY_CONFIG": '{"seed": 3}'})


def _pairs(value: Any, _folder: Path) -> bytes:
    whole = full_names(value)
    return next((f"{name.replace('.', '_')}={each}" for name, each in whole.items()), "SEED=3").encode()


def _read_faults(data: bytes, folder: Path) -> Any:
    (folder / "faults.json").write_bytes(data)
    found = inject.read_file(folder / "faults.json")
    inject.variables(found)
    return found


def _section(data: bytes, folder: Path) -> Any:
    (folder / "ds.json").write_bytes(data)
    found = find_section(None, ["--deepspeed_config", str(folder / "ds.json")])
    return SwiftConfig.from_dict(found or {})


def _script(data: bytes, folder: Path) -> Any:
    (folder / "train.py").write_bytes(data)
    return SwiftConfig.from_dict(find_section(folder / "train.py", []) or {})


def _trace(data: bytes, folder: Path, name: str) -> Any:
    (folder / name).write_bytes(data)
    found = read_trace(folder / name, workers=16)
    found.jittered(1)
    found.with_spares(2)
    return found.failures


def _secret(data: bytes, folder: Path) -> Any:
    path = folder / "secret"
    path.write_bytes(data)
    os.chmod(path, 0o600)
    return secret.derive(secret.read(str(path)), "job")


def _again(found: SwiftConfig) -> bytes:
    return found.to_json().encode()


def _decoded(data: bytes) -> SwiftConfig:
    return SwiftConfig.from_dict(json.loads(data))


def _texts(*texts: str) -> st.SearchStrategy[str]:
    return st.sampled_from(texts)


TARGETS = [
    Target(
        "options.json",
        options,
        lambda value, _: json.dumps(value).encode(),
        lambda data, folder: _config(data, folder, "options.json"),
        stable(_again, _decoded),
    ),
    Target(
        "options.yaml",
        _texts(*_YAMLS),
        lambda value, _: value.encode(),
        lambda data, folder: _config(data, folder, "options.yaml"),
        only_errors,
    ),
    Target("options.variable", options, _pairs, _variable, stable(_again, _decoded)),
    Target(
        "options.faults",
        struck,
        lambda value, _: spec.dumps(value).encode(),
        _read_faults,
        stable(lambda value: spec.dumps(value).encode(), lambda data: spec.loads(data.decode())),
    ),
    Target(
        "options.section",
        options,
        lambda value, _: json.dumps({"zero_optimization": {"stage": 1}, "swift_recovery": value}).encode(),
        _section,
        stable(_again, _decoded),
    ),
    Target("options.script", _texts(*_SCRIPTS), lambda value, _: value.encode(), _script, only_errors),
    Target(
        "options.trace_csv",
        _texts(*_TRACES),
        lambda value, _: value.encode(),
        lambda data, folder: _trace(data, folder, "trace.csv"),
        only_errors,
    ),
    Target(
        "options.trace_json",
        _texts(_JSON_TRACE),
        lambda value, _: value.encode(),
        lambda data, folder: _trace(data, folder, "trace.json"),
        only_errors,
    ),
    Target(
        "options.secret",
        st.binary(min_size=24, max_size=64).map(bytes.hex),
        lambda value, _: value.encode(),
        _secret,
        only_errors,
    ),
]
