"""Tensors inside a backend's own objects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass

import torch


def tensors_in(value: object, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of every tensor with elements in dataclasses, mappings, sequences and plain objects, however
    nested. Names are paths: "decode[0].blocks".
    """
    if isinstance(value, torch.Tensor):
        if value.numel():
            yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_in(item, f"{name}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from tensors_in(item, f"{name}[{index}]")
    else:
        for attribute, item in _attributes(value):
            yield from tensors_in(item, f"{name}.{attribute}" if name else attribute)


def _attributes(value: object) -> Iterator[tuple[str, object]]:
    if is_dataclass(value):
        yield from ((field.name, getattr(value, field.name)) for field in fields(value))
    elif hasattr(value, "__dict__"):
        yield from vars(value).items()
