"""Libraries that stand in for CUDA's in test environments have the names, versions and symbols that are asked for."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest

from environments.cuda_stand_ins import Symbol, build, function, needed, symbols_of, undefined

READELF = """\
 0x0000000000000001 (NEEDED)             Shared library: [libcudart.so.12]
 0x0000000000000001 (NEEDED)             Shared library: [libnccl.so.2]
 0x0000000000000001 (NEEDED)             Shared library: [libcuda.so.1]
 0x0000000000000001 (NEEDED)             Shared library: [libc10.so]
"""
NM = """\
                 U cudaFree@libcudart.so.12
                 U ncclSend
                 w __cxa_finalize@GLIBC_2.2.5
                 U nvshmem_init@NVSHMEM
"""
SYMBOLS = {
    Symbol("cudaFree", "libcudart.so.12"),
    Symbol("ncclSend", ""),
    Symbol("__cxa_finalize", "GLIBC_2.2.5"),
    Symbol("nvshmem_init", "NVSHMEM"),
}


def test_what_torch_is_linked_against() -> None:
    assert needed(READELF) == {"libcudart.so.12", "libnccl.so.2"}
    assert undefined(NM) == SYMBOLS


@pytest.mark.parametrize(
    ("library", "name"),
    [("libcudart.so.12", "cudaFree"), ("libnccl.so.2", "ncclSend"), ("libnvshmem_host.so.3", "nvshmem_init")],
)
def test_each_library_gets_its_symbols(library: str, name: str) -> None:
    assert {symbol.name for symbol in symbols_of(library, SYMBOLS)} == {name}


def test_calls_fail_but_for_those_made_while_torch_loads() -> None:
    assert function("cudaMalloc").endswith("{ return 100; }")
    assert function("__cudaRegisterFunction").endswith("{ return 0; }")
    assert function("cudaGetLastError").endswith("{ return 0; }")


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to build stand-ins with")
def test_a_library_is_built(tmp_path: Path) -> None:
    path = tmp_path / "libcudart.so.12"
    names = ("cudaGetDeviceCount", "cudaGetErrorString", "cudaMalloc", "cudaRuntimeGetVersion")
    build(path, {Symbol(name, path.name) for name in names})
    assert [one.name for one in tmp_path.iterdir()] == [path.name]
    library, count = ctypes.CDLL(str(path)), ctypes.c_int(7)
    assert (library.cudaGetDeviceCount(ctypes.byref(count)), count.value) == (100, 0)
    assert (library.cudaRuntimeGetVersion(ctypes.byref(count)), library.cudaMalloc()) == (0, 100)
    library.cudaGetErrorString.restype = ctypes.c_char_p
    assert library.cudaGetErrorString() == b"no CUDA"
    assert b"libcudart.so.12" in path.read_bytes()
