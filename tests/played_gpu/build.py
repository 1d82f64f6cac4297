# SPDX-License-Identifier: Apache-2.0
"""Build the played libraries into a venv that has PyTorch's CUDA build, and nothing of NVIDIA's.

    python -m tests.played_gpu.build VENV

What PyTorch imports from NVIDIA's libraries and no file in `native` plays becomes a stub that
answers "not supported". A build takes seconds; it lies in a directory named by what it was built
of, so it is built once, and of two builds at once the second waits for the first.
"""

import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.played_gpu import nvml_library

HERE = Path(__file__).parent
ARCHITECTURES = ("x86_64", "aarch64")
PACKAGE = "played_gpus"
# Where torch looks for NVIDIA's libraries (its RPATH), by major version of CUDA.
_SEARCHED = {13: "cu13", 12: "cuda_runtime", 11: "cuda_runtime"}
_TORCH = (
    *("c10_cuda", "torch_cuda", "torch_cpu", "torch_python", "torch_global_deps", "caffe2_nvrtc"),
    *("torch_nvshmem", "torch_cuda_linalg"),
)
_NVIDIAS = re.compile(r"^lib(cud|cu[a-z]|nccl|nvrtc|nvshmem|cupti|nvjit|nvToolsExt|nvtx)")
# Symbols without a version are known by their names, the longest first.
_PREFIXES = (
    ("cusparseLt", "libcusparseLt.so.0"),
    ("nvshmem", "libnvshmem_host.so.3"),
    ("cuFile", "libcufile.so.0"),
    ("nccl", "libnccl.so.2"),
)
# Functions of the driver that torch looks up by name as it runs, so that the linker knows of none.
_LOOKED_UP = re.compile(rb"\0(cu[A-Z][A-Za-z0-9_]+)(?=\0)")
_CORE = ("description", "device", "errors", "usage", "memory", "stream", "operators", "crash")
_RUNTIME = ("runtime_device", "runtime_memory", "runtime_stream", "runtime_kernel")
_NCCL = (
    *("nccl_socket", "nccl_place", "nccl_log", "nccl_number", "nccl_exchange", "nccl_collective"),
    "nccl_comm",
)
_FLAGS = ("-std=c++17", "-O1", "-fPIC", "-pthread", "-Wall", "-Wextra", "-Werror")
_CUDA_BUILD = "lib/python3.*/site-packages/torch/lib/libtorch_cuda.so"
_KEPT_BUILDS = 2
# By the numbers of each library: CUDA, cuBLAS, and NCCL, which calls it misuse.
_NOT_SUPPORTED, _CUBLAS_NOT_SUPPORTED, _NCCL_INVALID_USAGE = 801, 15, 5
_BUILD_S = 300


class CannotPlay(Exception):
    """Why there can be no played GPUs here."""


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """The PyTorch of a venv: what its libraries need of NVIDIA's."""

    version: str
    site: Path
    needed: frozenset[str]  # libraries
    wanted: Mapping[str, Mapping[str, str]]  # library -> symbol -> version, which may be empty

    def library(self, name: str) -> str:
        """Return a library as this wheel names it, with its version."""
        return next(each for each in self.needed if each.startswith(name))

    @property
    def cuda(self) -> int:
        """Return the major version of its CUDA runtime."""
        return int(next(re.findall(r"\d+", name)[0] for name in self.needed if "cudart" in name))


def why_not(venv: Path) -> str:
    """Return why there are no played GPUs here, in one line; empty where there are."""
    if platform.machine() not in ARCHITECTURES:
        return f"played GPUs: {platform.machine()} is none of {', '.join(ARCHITECTURES)}"
    for program in ("g++", "nm", "readelf"):
        if shutil.which(program) is None:
            return f"played GPUs need {program} (Debian: apt-get install g++ binutils)"
    if not any(venv.glob(_CUDA_BUILD)):
        return f"no PyTorch built for CUDA in {venv.name} (make played-gpu)"
    return ""


def ready(venv: Path) -> Path:
    """Build what is missing in a venv, and return the directory of the played libraries."""
    if reason := why_not(venv):
        raise CannotPlay(reason)
    site = next(venv.glob(_CUDA_BUILD)).parents[2]
    if any(lib.is_dir() and not lib.is_symlink() for lib in site.glob("nvidia/*/lib")):
        raise CannotPlay(f"{site / 'nvidia'} holds NVIDIA's own libraries: play in another venv")
    made = site / f"{PACKAGE}-{_name(site)}"
    with (site / f"{PACKAGE}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # who comes second finds what the first has built
        if not made.exists():
            _publish(_wheel(site), made)
        _point(site / PACKAGE, made)
        _connect(site, _cuda_of(made))
        _remove_older(site, made)
    return made


def _remove_older(site: Path, made: Path) -> None:
    """Keep a few builds: processes may be running on one that was replaced a moment ago."""
    others = [path for path in site.glob(f"{PACKAGE}-*") if path != made]
    for path in sorted(others, key=lambda path: path.stat().st_mtime)[:-_KEPT_BUILDS]:
        shutil.rmtree(path, ignore_errors=True)


def _name(site: Path) -> str:
    """Return what the build is made of, as a few letters."""
    digest = hashlib.sha256(_torch_version(site).encode())
    for path in sorted(_sources()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _sources() -> Iterator[Path]:
    yield Path(__file__)
    yield from (HERE / "native").iterdir()
    yield from (HERE / "inside").glob("*.py")
    yield from HERE.glob("nvml.c")


def _torch_version(site: Path) -> str:
    found = re.search(r"__version__ = '(.*?)'", (site / "torch/version.py").read_text())
    return found[1] if found else ""


def _run(*argv: str | Path) -> str:
    try:
        result = subprocess.run(argv, check=False, text=True, capture_output=True, timeout=_BUILD_S)
    except subprocess.TimeoutExpired as error:
        raise CannotPlay(f"played GPUs: {argv[0]} took more than {_BUILD_S} s") from error
    if result.returncode:
        raise CannotPlay(f"played GPUs: {argv[0]} failed: {result.stderr.strip()[-2000:]}")
    return result.stdout


def _wheel(site: Path) -> Wheel:
    needed: set[str] = set()
    wanted: dict[str, dict[str, str]] = {}
    for name in _TORCH:
        library = site / f"torch/lib/lib{name}.so"
        if not library.exists():
            continue
        dynamic = _run("readelf", "-d", library)
        needed |= set(filter(_NVIDIAS.match, re.findall(r"Shared library: \[(.*?)\]", dynamic)))
        for source, symbol, version in _undefined(library):
            wanted.setdefault(source, {})[symbol] = version
    # A few releases bring a library of their own, under a name of its own.
    needed = {name for name in needed if not (site / "torch/lib" / name).exists()}
    for name in _LOOKED_UP.findall((site / "torch/lib/libc10_cuda.so").read_bytes()):
        wanted.setdefault("libcuda.so.1", {})[name.decode()] = ""
    return Wheel(version=_torch_version(site), site=site, needed=frozenset(needed), wanted=wanted)


def _undefined(library: Path) -> Iterator[tuple[str, str, str]]:
    """Yield library, name and version of each symbol that it needs of NVIDIA's libraries."""
    source, source_of = "", {}
    for line in _run("readelf", "-W", "-V", library).splitlines():
        if found := re.search(r"File: (\S+)", line):
            source = found[1]
        elif found := re.search(r"Name: (\S+)", line):
            source_of[found[1]] = source
    for line in _run("nm", "-D", "--undefined-only", library).splitlines():
        symbol, _, version = line.split()[-1].partition("@")
        version = version.lstrip("@")
        if version and _NVIDIAS.match(source_of.get(version, "")):
            yield source_of[version], symbol, version
        elif not version:
            if re.match(r"cu[A-Z]", symbol) and not symbol.startswith("cuFile"):
                yield "libcuda.so.1", symbol, ""
            for prefix, named in _PREFIXES:
                if symbol.startswith(prefix):
                    yield named, symbol, ""
                    break


def _publish(wheel: Wheel, made: Path) -> None:
    """Build beside the place and take it by rename: what is there is whole."""
    building = Path(tempfile.mkdtemp(prefix="building-", dir=wheel.site))
    try:
        _build_all(wheel, building)
        for path in (HERE / "inside").glob("*.py"):
            shutil.copy(path, building)
        building.chmod(0o755)  # for jobs of other users
        building.rename(made)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _build_all(wheel: Wheel, out: Path) -> None:
    cuda = wheel.cuda
    runtime = wheel.library("libcudart.so")
    define = (f"-DCUDA_MAJOR={cuda}", f"-DCUDA_VERSION_NUMBER={cuda}000")
    sources = [*_CORE, *_RUNTIME, *_NCCL, "driver", "blas", "dnn"]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        compiled = pool.map(lambda name: _compile(name, define, out), sources)
        objects = dict(zip(sources, compiled, strict=True))
        core = [f"-L{out}", "-lplayed"]
        played = {
            "libplayed.so": (_CORE, ["-ldl"]),
            runtime: (_RUNTIME, [*core, "-ldl"]),
            "libnccl.so.2": (_NCCL, core),
            "libcuda.so.1": (("driver",), [*core, f"-l:{runtime}"]),
            wheel.library("libcublas.so"): (("blas",), core),
            wheel.library("libcudnn.so"): (("dnn",), core),
        }
        for library, (names, extra) in played.items():
            _link(library, [objects[name] for name in names], wheel, out, extra)
        stubs = sorted(wheel.needed - played.keys())
        list(pool.map(lambda library: _link(library, [], wheel, out, []), stubs))
    nvml_library.build(out)
    for path in [*out.glob("*.o"), *out.glob("*.c"), *out.glob("*.map")]:
        path.unlink()


def _compile(name: str, define: Sequence[str], out: Path) -> Path:
    made = out / f"{name}.o"
    _run("g++", *_FLAGS, *define, "-c", HERE / "native" / f"{name}.cc", "-o", made)
    return made


def _link(
    library: str, objects: Sequence[Path], wheel: Wheel, out: Path, extra: Sequence[str]
) -> None:
    """Link what is played, and a stub for every symbol of this library that is not."""
    wanted = wheel.wanted.get(library, {})
    played: set[str] = set()
    for path in objects:
        played |= {line.split()[-1] for line in _run("nm", "--defined-only", path).splitlines()}
    stubs = _stubs(library, sorted(set(wanted) - played), out)
    script: list[str] = []
    if versions := {version for version in wanted.values() if version}:
        listed = out / f"{library}.map"
        listed.write_text("".join(f"{version} {{ global: *; }};\n" for version in versions))
        script = [f"-Wl,--version-script={listed}"]
    own = ["-Wl,-rpath,$ORIGIN", f"-Wl,-soname,{library}", *script]
    _run("g++", "-shared", "-pthread", *objects, stubs, "-o", out / library, *own, *extra)


def _stubs(library: str, symbols: Sequence[str], out: Path) -> Path:
    """Compile functions that answer that nothing of the kind is supported."""
    answer = _NCCL_INVALID_USAGE if "nccl" in library else _NOT_SUPPORTED
    answer = _CUBLAS_NOT_SUPPORTED if "cublas" in library else answer
    text = "#include <stdio.h>\n#include <stdlib.h>\n" + "".join(
        f'int {symbol}(void) {{ if (getenv("PLAYED_GPUS_VERBOSE"))'
        f' fprintf(stderr, "played CUDA: a stub is called: {symbol}\\n"); return {answer}; }}\n'
        for symbol in symbols
    )
    source = out / f"{library}.stubs.c"
    source.write_text(text)
    made = source.with_suffix(".o")
    _run("gcc", "-c", "-O0", "-fPIC", "-w", "-fno-builtin", source, "-o", made)
    return made


def _cuda_of(made: Path) -> int:
    runtime = next(made.glob("libcudart.so.*"))
    return int(runtime.name.removeprefix("libcudart.so.").partition(".")[0])


def _point(link: Path, target: Path) -> None:
    """Have a link lead there; who looks finds the one before or this one."""
    if link.is_symlink() and link.resolve() == target.resolve():
        return
    new = link.with_name(f"{link.name}.{os.getpid()}.new")
    new.symlink_to(os.path.relpath(target, link.parent))
    new.replace(link)


def _connect(site: Path, cuda: int) -> None:
    """Have torch, and every interpreter of the venv, find what was built."""
    lib = site / "nvidia" / _SEARCHED[cuda] / "lib"
    lib.parent.mkdir(parents=True, exist_ok=True)
    _point(lib, site / PACKAGE)
    begins = site / f"{PACKAGE}.pth"
    line = f"import {PACKAGE}; {PACKAGE}.start()\n"
    if not begins.exists() or begins.read_text() != line:
        begins.write_text(line)


def main() -> int:
    try:
        print(ready(Path(sys.argv[1])))
    except CannotPlay as reason:
        print(reason, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
