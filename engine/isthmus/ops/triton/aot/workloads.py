"""Steps of the host's code whose launches are what production launches: the attention backend's, and every provider's.

Shapes are those of common models, so that the figures mean something. Tensors that no host code reads are on the meta
device: they have a shape, strides and the size of a storage, and take no memory.
"""

from __future__ import annotations

from isthmus.ops.triton.aot.attention_workloads import attention_workloads
from isthmus.ops.triton.aot.op_workloads import op_workloads
from isthmus.ops.triton.aot.workload import Workload
from isthmus.ops.triton.arch import Arch


def workloads(arch: Arch) -> list[Workload]:
    """All that are served on `arch`."""
    return [*attention_workloads(arch), *op_workloads(arch)]
