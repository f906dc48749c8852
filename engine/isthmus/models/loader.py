"""From a checkpoint to a model on its device: every parameter filled, every tensor used, or an error that names it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from isthmus.errors import CheckpointError
from isthmus.layers.env import ModelEnv
from isthmus.layers.param import Param
from isthmus.models.base import CausalLM
from isthmus.models.registry import ModelRegistry
from isthmus.models.spec import ModelSpec

if TYPE_CHECKING:
    from isthmus.checkpoints.base import Checkpoint

HARMLESS_SUFFIXES = ("rotary_emb.inv_freq",)
"""Tensors that older checkpoints carry and that follow from the config."""
TIED_HEAD = "lm_head.weight"
DUMMY_STD = 0.02


def load_model(
    checkpoint: Checkpoint, spec: ModelSpec, env: ModelEnv, device: torch.device, registry: ModelRegistry | None = None
) -> CausalLM:
    """Build the model of `spec` and fill it with the checkpoint's weights in env.dtype.

    Raises UnsupportedModelError for an unknown architecture, CheckpointError for a tensor that is missing, left over
    or of the wrong shape.
    """
    model = build_model(spec, env, device, registry)
    load_weights(model, spec, checkpoint, env.dtype)
    return model


def build_model(
    spec: ModelSpec, env: ModelEnv, device: torch.device, registry: ModelRegistry | None = None
) -> CausalLM:
    """The model with uninitialised weights on `device`. Built on env.device, which is the meta device by default."""
    model = (registry or ModelRegistry()).resolve(spec.architecture)(spec, env)
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            if isinstance(param, Param):
                setattr(module, name, param.on(device))
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(device))
    return model.eval()


def load_weights(model: CausalLM, spec: ModelSpec, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
    """Stream the checkpoint into the model's parameters, one tensor at a time."""
    places = _places(model)
    for name, tensor in checkpoint.tensors(dtype):
        ours = _our_name(model, name)
        if ours in places:
            param, slot = places[ours]
            param.load(name, tensor, slot)
        elif not _is_harmless(model, spec, name, ours):
            raise CheckpointError(
                f"tensor {name!r} has no place in {spec.architecture}; the checkpoint is of another model, or a "
                "setting that this weight belongs to is not implemented"
            )
    for ours, (param, slot) in places.items():
        if slot not in param.filled:
            raise CheckpointError(f"no tensor for {ours!r} of {spec.architecture}; the checkpoint is incomplete")


def init_dummy(model: CausalLM, seed: int) -> None:
    """Fill the model without a checkpoint: matrices from normal(0, DUMMY_STD), vectors with ones; seed decides all."""
    for param in model.parameters():
        if param.dim() == 1:
            param.data.fill_(1.0)
        else:
            generator = torch.Generator(device=param.device).manual_seed(seed)
            param.data.normal_(0.0, DUMMY_STD, generator=generator)
            seed += 1


def _places(model: CausalLM) -> Mapping[str, tuple[Param, int]]:
    """Name of each expected tensor, with our prefix -> where it goes."""
    return {
        ours: (param, slot)
        for name, param in model.named_parameters()
        if isinstance(param, Param)
        for ours, slot in _unstack(model, name)
    }


def _unstack(model: CausalLM, name: str) -> Iterator[tuple[str, int]]:
    """The checkpoint's names of one parameter: `...qkv_proj.weight` -> (`...q_proj.weight`, 0), ..."""
    path = name.split(".")
    parts = [(part, slot) for part, (fused, slot) in model.stacked_params.items() if fused == path[-2]]
    for part, slot in parts or [(path[-2], 0)]:
        yield ".".join([*path[:-2], part, path[-1]]), slot


def _our_name(model: CausalLM, name: str) -> str:
    for theirs, ours in model.renamed_prefixes.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


def _is_harmless(model: CausalLM, spec: ModelSpec, name: str, ours: str) -> bool:
    tied = spec.tie_word_embeddings and ours == TIED_HEAD
    return tied or name.endswith(HARMLESS_SUFFIXES) or name.startswith(model.skipped_prefixes)
