"""Linear layers on weights that oneDNN has laid out for its kernels once, instead of at every call."""

from __future__ import annotations

from typing import ClassVar

import torch

from isthmus.platforms import DeviceInfo, LinearBackend, LinearSpec

HINT_ROWS = 64
"""Rows of input that the layout is made for. Layouts for 16 to 512 rows measured alike on 1 to 512 rows."""


class OneDnnLinearBackend(LinearBackend):
    """torch's own binding of oneDNN; measured 1.0 to 2x plain `F.linear` in bfloat16, 1.3 to 3.5x in float32."""

    name: ClassVar[str] = "onednn"

    @classmethod
    def unsupported_reason(cls, spec: LinearSpec, info: DeviceInfo) -> str | None:
        if not torch.backends.mkldnn.is_available():
            return "this torch was built without oneDNN"
        if spec.dtype not in (torch.float32, torch.bfloat16):
            return f"oneDNN packs float32 and bfloat16, not {str(spec.dtype).removeprefix('torch.')}"
        if spec.dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return "this CPU has no bfloat16 kernels in oneDNN (it needs AVX-512)"
        return None

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """An opaque tensor that only `apply` can read."""
        packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), HINT_ROWS)
        return packed

    def apply(self, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
        return out
