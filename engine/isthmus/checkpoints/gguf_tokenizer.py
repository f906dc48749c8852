"""The tokenizer of a GGUF file, converted by transformers once and kept in the cache."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from isthmus.checkpoints.cache import cache_dir, scratch_dir
from isthmus.checkpoints.gguf_header import GGUFHeader
from isthmus.errors import CheckpointError

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

_CONVERSION = 1
"""Part of the cache key: raise it when a conversion changes here."""


def load_tokenizer(header: GGUFHeader) -> PreTrainedTokenizerBase:
    """The tokenizer that the metadata describes, with its chat template, from the cache if it is there.

    Converting a vocabulary of 262,144 tokens takes many seconds, reading the converted one about two. Raises
    CheckpointError if the metadata describes none that transformers can build.
    """
    from transformers import AutoTokenizer

    directory = cache_dir() / "tokenizers" / _cache_key(header.path)
    if not directory.is_dir():
        tokenizer = _convert(header)
        try:
            _save(tokenizer, directory)
        except OSError as error:
            advice = "set ISTHMUS_CACHE to a writable directory"
            logger.warning("cannot keep the tokenizer of %s (%s); %s", header.path, error, advice)
            return tokenizer
    cached: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    return cached


def _cache_key(path: Path) -> str:
    import tokenizers
    import transformers

    stat = path.stat()
    file = (str(path.resolve()), stat.st_size, stat.st_mtime_ns)
    makers = (transformers.__version__, tokenizers.__version__, _CONVERSION)
    return hashlib.sha256(repr((file, makers)).encode()).hexdigest()[:32]


def _save(tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Write it so that `directory` appears complete or not at all."""
    with scratch_dir(directory.parent, ".converting-") as scratch:
        tokenizer.save_pretrained(str(scratch / "tokenizer"))
        try:
            os.rename(scratch / "tokenizer", directory)
        except OSError:
            if not directory.is_dir():  # otherwise another process was faster
                raise


def _convert(header: GGUFHeader) -> PreTrainedTokenizerBase:
    from transformers import PreTrainedTokenizerFast

    # Alone in a directory: transformers would prefer a tokenizer.json or a template that happens to lie beside it.
    with tempfile.TemporaryDirectory() as alone:
        (Path(alone) / "model.gguf").symlink_to(header.path.resolve())
        try:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(alone, gguf_file="model.gguf", local_files_only=True)
        except (KeyError, ValueError, TypeError, IndexError) as error:
            raise CheckpointError(
                f"{header.path}: the metadata gives no usable tokenizer ({error!r}); convert the model to GGUF again"
            ) from error
    _fix_pre_tokenizer(tokenizer, header)
    return tokenizer


def _fix_pre_tokenizer(tokenizer: PreTrainedTokenizerFast, header: GGUFHeader) -> None:
    """Split text as `tokenizer.ggml.pre` says; transformers takes a name that it does not know for GPT-2's way."""
    from tokenizers.pre_tokenizers import ByteLevel

    backend = tokenizer.backend_tokenizer
    if header.metadata.get("tokenizer.ggml.model") != "gpt2" or not isinstance(backend.pre_tokenizer, ByteLevel):
        return
    kind = header.metadata.get("tokenizer.ggml.pre", "default")
    if kind in _PRE_TOKENIZERS:
        backend.pre_tokenizer = _PRE_TOKENIZERS[kind]()
    elif kind not in ("default", "gpt-2"):
        logger.warning("%s: text is split as for GPT-2, because pre-tokenizer '%s' is not known", header.path, kind)


def _single_digits() -> PreTokenizer:
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    return Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])


_PRE_TOKENIZERS: Mapping[str, Callable[[], PreTokenizer]] = MappingProxyType(
    {"smollm": _single_digits, "starcoder": _single_digits, "refact": _single_digits}
)
