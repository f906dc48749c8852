"""What the engine asks of a hardware platform: 3 questions it must answer, 8 with working defaults."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from isthmus.platforms.comm import Communicator, GroupSpec, SingleCommunicator, TorchCommunicator
from isthmus.platforms.facts import DeviceInfo, MemoryStats
from isthmus.platforms.graph import EagerBackend, GraphBackend

if TYPE_CHECKING:
    from isthmus.config import EngineConfig


class Platform(ABC):
    """One kind of hardware. Answers questions and hands over kernels; never a worker, runner or scheduler.

    A first port implements `device_info`, `init_device` and `memory_stats`.
    """

    name: str
    """Lower case, `[a-z][a-z0-9_]*`; what `--device` takes."""
    device_type: str
    """torch's name of the device type, e.g. for `torch.device(device_type, index)`."""
    dist_backend: str = "gloo"
    """torch.distributed backend of the default communicator."""
    pin_memory: bool = False
    """Whether host buffers that feed the device should be page-locked."""
    visible_devices_env: str | None = None
    """Environment variable that limits the visible devices, if there is one."""
    ray_resource: str | None = None
    """Ray's resource key, if Ray can place this device."""
    is_asynchronous: bool = False
    """Whether queued work runs while the host goes on; if so, the next step is scheduled meanwhile."""
    profile_tokens: int | None = None
    """Tokens of the start-up profiling step; None = the whole token budget. A smaller step is scaled up linearly."""
    static_shapes: bool = False
    """Whether each shape that an operation is given costs a compilation. If so, a step's inputs are tensors of their
    own instead of views, with block tables at full width; logits are computed for as many rows as the step is padded
    to, and edited on the host; weights are put together on the host.
    """
    refused_native: Mapping[str, str] = MappingProxyType({})
    """What native must not serve here, because its results or its costs are wrong on this device: "attention" or an op
    -> why, for people. Another provider must.
    """
    unclaimed: Mapping[str, str] = MappingProxyType({})
    """Areas of the conformance kit that this platform does not claim to pass: area -> why, for people."""

    @abstractmethod
    def device_info(self, index: int = 0) -> DeviceInfo:
        """Facts of device `index`, without binding this process to it."""

    @abstractmethod
    def init_device(self, local_rank: int) -> torch.device:
        """Bind this process to its device and return it. Called once, in the worker, before any allocation."""

    @abstractmethod
    def memory_stats(self, device: torch.device, *, reset_peak: bool = False) -> MemoryStats:
        """Memory now. With `reset_peak`, `peak` starts again from `allocated` after this call."""

    def synchronize(self, device: torch.device) -> None:
        """Wait for all queued work. Default: nothing is queued."""
        return None

    def release_cached_memory(self, device: torch.device) -> None:
        """Give the allocator's unused memory back. Default: the allocator keeps none."""
        return None

    def inference_mode(self) -> Any:
        """The context in which everything is computed, where no graph backend says otherwise; it must decorate too.

        Default: `torch.inference_mode`. The other choice is `torch.no_grad`.
        """
        return torch.inference_mode()

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Zero-filled memory of the KV cache, for as long as the tensor lives. Default: torch's allocator."""
        return torch.zeros(tuple(shape), dtype=dtype, device=device)

    def async_to_host(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start copying `tensor` to the host; the returned function waits and gives the host tensor.

        Default: copies at once.
        """
        host = tensor.to("cpu", copy=True)
        return lambda: host

    def config_defaults(self, config: EngineConfig) -> Mapping[str, object]:
        """Proposals for fields that the user left on AUTO: dotted path -> value, or `isthmus.config.Proposal` with a
        reason. Pure; default: none.
        """
        return {}

    def kernel_priority(self) -> Mapping[str, Sequence[str]]:
        """Provider names by op ("attention", an op's name, or "*" for the rest), best first; native is always last."""
        return {}

    def graph_backend(self, config: EngineConfig, device: torch.device) -> GraphBackend:
        """The capture or compile policy. Default: eager."""
        return EagerBackend(self.inference_mode)

    def communicator(self, group: GroupSpec, device: torch.device) -> Communicator:
        """Collectives of one group. Default: torch.distributed, or no-ops for a group of one."""
        return SingleCommunicator() if group.size == 1 else TorchCommunicator(group, self.dist_backend, device)
