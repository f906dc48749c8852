"""A plugin that imports torch when it is imported."""

from __future__ import annotations

import torch

from .plugin import Plugin

HAS_BFLOAT16 = torch.bfloat16.itemsize == 2


class PluginWithTorch(Plugin):
    """Otherwise right."""
