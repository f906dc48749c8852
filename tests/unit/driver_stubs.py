"""NVIDIA's two driver libraries as shared objects that say what the environment tells them, and cannot make a context.

STUB_GPUS: number of GPUs.  STUB_CUDA: version that the driver serves, 1000 * major + 10 * minor.  STUB_INIT: status of
nvmlInit.  STUB_LOG: file to which every call is written that a probe must not make.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

DRIVER = r"""
#include <stdio.h>
#include <stdlib.h>
static int forbidden(const char *name) {
    FILE *log = fopen(getenv("STUB_LOG"), "a");
    fprintf(log, "%s\n", name);
    fclose(log);
    return 100;
}
int cuDriverGetVersion(int *version) { *version = atoi(getenv("STUB_CUDA")); return 0; }
int cuInit(unsigned flags) { return forbidden("cuInit"); }
int cuCtxCreate_v2(void) { return forbidden("cuCtxCreate"); }
int cuDevicePrimaryCtxRetain(void) { return forbidden("cuDevicePrimaryCtxRetain"); }
"""
NVML = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
const char *nvmlErrorString(int status) { return status == 9 ? "Driver Not Loaded" : "Not Supported"; }
int nvmlInit_v2(void) { return atoi(getenv("STUB_INIT")); }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = atoi(getenv("STUB_GPUS")); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **gpu) { *gpu = (void *)(size_t)(index + 1); return 0; }
int nvmlDeviceGetName(void *gpu, char *name, unsigned size) { strncpy(name, "Stub 9000", size); return 0; }
int nvmlDeviceGetUUID(void *gpu, char *uuid, unsigned size) {
    snprintf(uuid, size, "GPU-%zu0000000", (size_t)gpu);
    return 0;
}
int nvmlDeviceGetMaxMigDeviceCount(void *gpu, unsigned *count) { return 3; }
int nvmlSystemGetDriverVersion(char *version, unsigned size) { strncpy(version, "570.12", size); return 0; }
"""


def build(folder: Path) -> Path:
    """Compile both libraries into `folder` with the C compiler `cc`, and return it."""
    folder.mkdir(parents=True)
    for name, source in (("libcuda.so.1", DRIVER), ("libnvidia-ml.so.1", NVML)):
        command = ["cc", "-shared", "-fPIC", "-o", str(folder / name), "-xc", "-"]
        subprocess.run(command, input=source, text=True, check=True)
    return folder


def torch_of(folder: Path, cuda: str) -> Path:
    """What a torch built for CUDA says of itself, without its code: who imports it gets nothing."""
    (folder / "torch").mkdir(parents=True)
    (folder / "torch/version.py").write_text(f"cuda: str | None = {cuda!r}\nhip: str | None = None\n")
    (folder / "torch-2.13.0.dist-info").mkdir()
    (folder / "torch-2.13.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n")
    return folder
