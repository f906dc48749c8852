"""Intel GPUs as a platform, through torch.xpu."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from isthmus.errors import PlatformError
from isthmus.platforms import (
    Communicator,
    DeviceInfo,
    GroupSpec,
    SingleCommunicator,
    TorchCommunicator,
)
from isthmus.platforms.accelerator import TorchAcceleratorPlatform
from isthmus_xpu.packages import PRIORITY
from isthmus_xpu.probe import VISIBLE

if TYPE_CHECKING:
    from isthmus.config import EngineConfig

logger = logging.getLogger(__name__)

ONECCL_BINDINGS = "oneccl_bindings_for_pytorch"
"""Registers the backend "ccl" with torch.distributed when it is imported."""


class XpuPlatform(TorchAcceleratorPlatform):
    """One GPU a rank."""

    name = "xpu"
    is_asynchronous = True
    device_type = "xpu"
    dist_backend = "xccl"
    visible_devices_env = VISIBLE
    ray_resource = "GPU"
    unclaimed = MappingProxyType(
        {
            "comm": "collectives between Intel GPUs have never been run by this project",
            "determinism": "whether Intel's kernels sum in the same order every time is not known to this project",
        }
    )

    @staticmethod
    def check_available() -> None:
        """Raises PlatformError where the kernel lists GPUs and torch.xpu finds none."""
        if torch.xpu.device_count() > 0:
            return
        raise PlatformError(
            "the kernel lists an Intel GPU, but torch.xpu finds no device; install Intel's compute runtime (the "
            f"Level Zero driver libze_intel_gpu.so.1), and see that {VISIBLE} names whole devices or is not set"
        )

    def device_info(self, index: int = 0) -> DeviceInfo:
        """`arch` is the driver's device id, or the compiler's number of the architecture where torch has no id."""
        device = torch.xpu.get_device_properties(index)
        device_id = getattr(device, "device_id", None)
        arch = f"0x{device_id:04x}" if device_id is not None else f"xe_{device.architecture:x}"
        return DeviceInfo(device.name, arch, device.total_memory, supported_dtypes(device))

    def init_device(self, local_rank: int) -> torch.device:
        device = super().init_device(local_rank)
        for dtype, reason in declined_dtypes(torch.xpu.get_device_properties(local_rank)).items():
            logger.info("%s: not offered on %s: %s", dtype, device, reason)
        return device

    def _free_and_total(self, device: torch.device) -> tuple[int, int]:
        """Some drivers keep the free memory to themselves: then all that this process does not hold counts."""
        try:
            return super()._free_and_total(device)
        except RuntimeError as error:
            total = torch.xpu.get_device_properties(device).total_memory
            logger.warning("%s does not tell its free memory (%s): other programs' is taken for free", device, error)
            return max(total - torch.xpu.memory_reserved(device), 0), total

    def config_defaults(self, config: EngineConfig) -> Mapping[str, object]:
        """64 tokens a block: what every attention provider is tested with by its authors."""
        return {
            "cache.block_size": 64,
            "scheduler.max_num_batched_tokens": 8192,
            "scheduler.max_num_seqs": 256,
        }

    def kernel_priority(self) -> Mapping[str, Sequence[str]]:
        """`isthmus platforms` says which of these can be used here, and why not the others."""
        return {"attention": PRIORITY, "*": ("triton",)}

    def communicator(self, group: GroupSpec, device: torch.device) -> Communicator:
        """Raises PlatformError if neither XCCL nor oneCCL's bindings are there."""
        if group.size == 1:
            return SingleCommunicator()
        return TorchCommunicator(group, collective_backend(), device)


def collective_backend() -> str:
    """torch's own XCCL, else oneCCL's bindings. Raises PlatformError, with both reasons, if there is neither."""
    if dist.is_xccl_available():
        return "xccl"
    if importlib.util.find_spec(ONECCL_BINDINGS) is not None:
        importlib.import_module(ONECCL_BINDINGS)
        return "ccl"
    raise PlatformError(
        f"no collectives between Intel GPUs: torch {torch.__version__} is built without XCCL, and {ONECCL_BINDINGS} is "
        "not installed; install an XPU build of torch with XCCL, or parallel.tensor_parallel_size=1"
    )


def supported_dtypes(device: Any) -> tuple[str, ...]:
    """Compute dtypes by name, the preferred one first, from `torch.xpu.get_device_properties`."""
    declined = declined_dtypes(device)
    return tuple(name for name in ("bfloat16", "float16", "float32") if name not in declined)


def declined_dtypes(device: Any) -> Mapping[str, str]:
    """Dtype -> why a device that torch.xpu runs on does not compute in it."""
    declined = {}
    if not device.has_subgroup_matrix_multiply_accumulate:
        declined["bfloat16"] = f"{device.name} has no matrix units (XMX), so that it would be emulated"
    if not device.has_fp16:
        declined["float16"] = f"{device.name} has no float16 arithmetic"
    return declined
