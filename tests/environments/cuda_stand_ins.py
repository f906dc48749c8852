"""Libraries that stand in for CUDA's, so that a CUDA build of torch loads where only its CPU half is wanted.

Some packages, among them Intel's extension and torch-xla, load beside CUDA builds of torch only, which drag in 2.5 GB
of CUDA that a test on a CPU never calls. This writes shared objects of a few kilobytes that have the names, versions
and symbols that torch is linked against: every function fails with "no device". For test environments, never for users:
with them, torch's answers about CUDA mean nothing, beyond `torch.cuda.is_available()`, which is False.

`python cuda_stand_ins.py PYTHON` fills the torch of that environment. Needs cc, nm and readelf. What is there already,
real or standing in, stays.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

CUDA_LIBRARY = re.compile(r"NEEDED.*\[(lib(?:cu|nv|nccl)[^]]*)\]")
DRIVER = "libcuda.so.1"
"""Loaded when it is called for, never linked."""
UNVERSIONED: Mapping[str, str] = {
    "libnccl": "nccl",
    "libcufile": "cuFile",
    "libcusparseLt": "cusparseLt",
    "libnvshmem_host": "nvshmem",
}
"""Libraries that have symbols without a version -> what those begin with."""
VERSION_NAMES: Mapping[str, str] = {"libnvshmem_host": "NVSHMEM"}
"""Libraries whose version is not their own name."""
NO_DEVICE = 100
"""cudaErrorNoDevice, and a failure to every other library."""


@dataclass(frozen=True, slots=True)
class Symbol:
    """An undefined symbol of torch and its version, "" for none."""

    name: str
    version: str


def main(python: str) -> None:
    """Make what is missing."""
    torch = _run(python, "-c", "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])")
    lib = Path(torch.strip(), "lib")
    objects = sorted(lib.glob("lib*.so*"))
    present = {path.name for path in objects}
    missing = {name for path in objects for name in needed(_run("readelf", "-d", str(path)))} - present
    symbols = {symbol for path in objects for symbol in undefined(_run("nm", "-D", "--undefined-only", str(path)))}
    for name in sorted(missing):
        build(lib / name, symbols_of(name, symbols))
    print(f"stand-ins in {lib}: {', '.join(sorted(missing)) or 'none are missing'}")


def needed(dynamic_section: str) -> set[str]:
    """CUDA's libraries among those that an object names, from `readelf -d`."""
    return set(CUDA_LIBRARY.findall(dynamic_section)) - {DRIVER}


def undefined(symbol_table: str) -> set[Symbol]:
    """From `nm -D --undefined-only`, whose lines end in "name" or "name@version"."""
    names = (line.split()[-1].partition("@") for line in symbol_table.splitlines() if line.strip())
    return {Symbol(name, version.lstrip("@")) for name, _, version in names}


def symbols_of(library: str, symbols: Iterable[Symbol]) -> set[Symbol]:
    """Those that a library must have: versions bear its name, or, where it has none, symbols its prefix."""
    stem = library.split(".")[0]
    versions, prefix = (library, VERSION_NAMES.get(stem)), UNVERSIONED.get(stem)
    return {
        symbol
        for symbol in symbols
        if symbol.version in versions or (not symbol.version and prefix is not None and symbol.name.startswith(prefix))
    }


def build(path: Path, symbols: Collection[Symbol]) -> None:
    """Compile a library with these symbols."""
    names = sorted({symbol.name for symbol in symbols})
    versions: dict[str, list[str]] = {}
    for symbol in symbols:
        if symbol.version:
            versions.setdefault(symbol.version, []).append(f"{symbol.name};")
    script = path.with_name(f"{path.name}.map")
    script.write_text("".join(f"{version} {{ global: {' '.join(some)} }};\n" for version, some in versions.items()))
    options = [f"-Wl,--version-script={script}"] if versions else []
    source = "static void *handle[4];\n" + "\n".join(map(function, names))
    command = ["cc", "-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{path.name}", *options, "-o", str(path)]
    try:
        subprocess.run([*command, "-xc", "-"], input=source, text=True, check=True)
    finally:
        script.unlink()


def function(name: str) -> str:
    """C for one symbol. What torch calls while it loads succeeds: it registers kernels, and asks for versions."""
    if re.search(r"Error(String|Name)|StatusString|LastErrorMessage|nccl\w*LastError", name):
        return f'const char *{name}(void) {{ return "no CUDA"; }}'
    if name == "__cudaRegisterFatBinary":
        return f"void **{name}(void) {{ return handle; }}"
    if name == "cudaGetDeviceCount":
        return f"int {name}(int *count) {{ *count = 0; return {NO_DEVICE}; }}"
    if name in ("cudaRuntimeGetVersion", "cudaDriverGetVersion"):
        return f"int {name}(int *version) {{ *version = 0; return 0; }}"
    succeeds = name.startswith("__cuda") or name in ("cudaGetLastError", "cudaPeekAtLastError")
    return f"int {name}(void) {{ return {0 if succeeds else NO_DEVICE}; }}"


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main(sys.argv[1])
