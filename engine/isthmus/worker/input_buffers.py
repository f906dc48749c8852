"""The static tensors that every step reads, allocated once; a step fills host mirrors and receives device views."""

from __future__ import annotations

import numpy as np
import torch


class StaticBuffer:
    """A device tensor at a fixed address and its host mirror. Where host and device are one, they share memory.

    static_shapes: of the platform; if so, there is only the mirror.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, pin_memory: bool, static_shapes: bool
    ) -> None:
        self._host = torch.zeros(shape, dtype=dtype, pin_memory=pin_memory)
        self._device = self._host if static_shapes else self._host.to(device)
        self._sent_to = device if static_shapes else None
        self.np: np.ndarray = self._host.numpy()

    def commit(self, *sizes: int) -> torch.Tensor:
        """Send the leading `sizes` of the mirror to the device; returns the device view, or a tensor of its own."""
        view = tuple(slice(size) for size in sizes)
        if self._sent_to is not None:
            return self._host[view].to(self._sent_to, copy=True)
        if self._device is not self._host:
            # Whole rows: pieces of them would pass through memory that is not page-locked, and the host would wait.
            rows = slice(sizes[0])
            self._device[rows].copy_(self._host[rows], non_blocking=True)
        return self._device[view]


class InputBuffers:
    """Inputs of a step at its largest: T = max_num_tokens, R = max_num_reqs, B = max_blocks a request. There are slots
    and a table for each block group.
    """

    def __init__(
        self,
        max_num_tokens: int,
        max_num_reqs: int,
        max_blocks: int,
        device: torch.device,
        *,
        num_groups: int = 1,
        pin_memory: bool,
        static_shapes: bool = False,
    ) -> None:
        def buffer(dtype: torch.dtype, *shape: int) -> StaticBuffer:
            return StaticBuffer(shape, dtype, device, pin_memory=pin_memory, static_shapes=static_shapes)

        self.input_ids = buffer(torch.int64, max_num_tokens)
        self.positions = buffer(torch.int64, max_num_tokens)
        self.slot_mappings = [buffer(torch.int64, max_num_tokens) for _ in range(num_groups)]
        self.query_start_loc = buffer(torch.int32, max_num_reqs + 1)
        self.seq_lens = buffer(torch.int32, max_num_reqs)
        self.block_tables = [buffer(torch.int32, max_num_reqs, max_blocks) for _ in range(num_groups)]
        self.logits_indices = buffer(torch.int64, max_num_reqs)
