"""Empty stand-ins for the NVIDIA libraries that a CUDA build of torch loads.

The releases on PyPI are CUDA builds, which load several GB of libraries that nothing here calls: no GPU is looked for
without a driver. A library that defines the names that are asked for is enough for the loader. The CUDA runtime is
called, and must be real.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path

#: Names that these libraries define.
_THEIRS = re.compile(r"(cu[A-Z_a-z]|nccl|pnccl|nvrtc|nvshmem|__cuda|nvJit|cupti|cufile|cudnn)")
#: Which library defines a name without a version, by how it begins; the first that fits.
_BY_PREFIX = (
    ("cudnn", "libcudnn"),
    ("nccl", "libnccl"),
    ("pnccl", "libnccl"),
    ("nvshmem", "libnvshmem"),
    ("cusparseLt", "libcusparseLt"),
    ("cuFile", "libcufile"),
    ("cufft", "libcufft"),
    ("cublasLt", "libcublasLt"),
    ("cublas", "libcublas"),
    ("cusparse", "libcusparse"),
    ("cusolver", "libcusolver"),
    ("nvrtc", "libnvrtc"),
    ("cupti", "libcupti"),
    ("cuda", "libcudart"),
    ("__cuda", "libcudart"),
    ("", "libcuda"),
)


def make(site_packages: Path) -> int:
    """Make those that torch asks for and that are not installed; needs gcc, nm and readelf. Returns how many.

    Raises:
        subprocess.CalledProcessError: one of the tools failed.
    """
    lib = site_packages / "torch" / "lib"
    files = [path for path in lib.iterdir() if re.match(r"lib(torch|c10|shm|caffe2).*\.so$", path.name)]
    asked = {name for path in files for name in _needed(path)}
    real = {path.name for path in site_packages.glob("nvidia/*/lib/*")}
    versioned, plain = _undefined(files)
    folder = site_packages / "nvidia" / "cu13" / "lib"
    folder.mkdir(parents=True, exist_ok=True)
    missing = sorted(asked - real)
    for library in missing:
        stem = library.partition(".so")[0]
        ours = {
            v: names for v, names in versioned.items() if v == library or (v, stem) == ("NVSHMEM", "libnvshmem_host")
        }
        names = {name for name in plain if _library_of(name) == stem}
        _build(folder / library, names, ours)
    return len(missing)


def _needed(path: Path) -> list[str]:
    return re.findall(r"NEEDED.*\[(lib(?:cu|nv|nccl)[^\]]*)\]", _tool("readelf", "-dW", path))


def _undefined(files: list[Path]) -> tuple[dict[str, set[str]], set[str]]:
    """Names that torch's libraries ask for: those of each version of a library, and those without one."""
    versioned, plain, defined = defaultdict[str, set[str]](set), set[str](), set[str]()
    for path in files:
        for line in _tool("nm", "-D", path).splitlines():
            *_, kind, full = line.split()
            name, _, version = full.partition("@")
            if kind == "U" and _THEIRS.match(name):
                (versioned[version.lstrip("@")] if version else plain).add(name)
            elif kind not in "Uvw":
                defined.add(name)
    return versioned, plain - defined


def _library_of(name: str) -> str:
    return next(library for prefix, library in _BY_PREFIX if name.startswith(prefix))


def _build(path: Path, names: set[str], versioned: dict[str, set[str]]) -> None:
    """A library whose functions all return 100, which CUDA reads as "there is no device"."""
    with tempfile.TemporaryDirectory() as work:
        source, script = Path(work, "standin.c"), Path(work, "standin.map")
        every = sorted(names.union(*versioned.values()))
        source.write_text("".join(f"long {name}(void) {{ return 100; }}\n" for name in every) or "int nothing;\n")
        script.write_text(
            "".join(f"{version} {{ global: {'; '.join(sorted(some))}; }};\n" for version, some in versioned.items())
        )
        flags = [f"-Wl,--version-script={script}"] if versioned else []
        _tool("gcc", *flags, "-shared", "-fPIC", f"-Wl,-soname,{path.name}", "-o", path, source)


def _tool(*command: str | Path) -> str:
    return subprocess.run([str(word) for word in command], check=True, capture_output=True, text=True).stdout
