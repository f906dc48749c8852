"""HIP graphs of decodes. torch speaks of them as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from isthmus.platforms.captured_graph import Capture, CapturedGraphBackend


class HipGraphBackend(CapturedGraphBackend):
    """Decodes at `sizes`, numbers of requests, as HIP graphs; everything else eagerly."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__(sizes, new_capture)


def new_capture() -> Capture:
    """A Capture whose graphs share one memory pool."""
    pool = torch.cuda.graph_pool_handle()

    def capture(step: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process may allocate meanwhile.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            step()
        return graph.replay

    return capture
