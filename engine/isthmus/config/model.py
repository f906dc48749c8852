"""Which model, and how it is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from isthmus.config.field import AUTO, Spec
from isthmus.config.section import Section

DTYPES = ("bfloat16", "float16", "float32")
"""Names of the compute dtypes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(Section):
    """The model and its tokenizer."""

    path: ClassVar[str] = "model"

    model: Annotated[
        str, Spec(help="A local Hugging Face directory, a GGUF file, the name of a small named model, or a hub id.")
    ]
    tokenizer: Annotated[str | None, Spec(help="A local folder with another tokenizer; none is the model's own.")] = (
        None
    )
    revision: Annotated[str | None, Spec(help="Branch, tag or commit of a hub id; none is its main branch.")] = None
    dtype: Annotated[
        str,
        Spec(
            choices=DTYPES,
            help="Type of weights and activations; auto is the checkpoint's where the platform has it, else the "
            "platform's preferred one.",
        ),
    ] = AUTO
    max_model_len: Annotated[
        int,
        Spec(
            min=1,
            unit="tokens",
            help="Longest sequence, prompt and output together; auto is the most that the model allows and the "
            "KV cache holds.",
        ),
    ] = AUTO
    seed: Annotated[
        int,
        Spec(min=0, max=2**63 - 1, help="Seed of the requests that bring none, and of dummy weights."),
    ] = 0
