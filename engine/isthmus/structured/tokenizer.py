"""A tokenizer as the grammar compiler needs it: text that can be sent to another process."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from isthmus.errors import InvalidGrammarError

if TYPE_CHECKING:
    from llguidance import LLTokenizer
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class TokenizerText:
    """json: what Hugging Face's `tokenizers` write, tokenizer.json.  num_ids: added tokens included."""

    json: str
    num_ids: int
    eos_token_ids: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, eos_token_ids: Sequence[int]) -> TokenizerText:
        """Raises InvalidGrammarError for a tokenizer that is not of `tokenizers`."""
        backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None or not hasattr(backend, "to_str"):
            raise _unusable(f"a {type(tokenizer).__name__} has no tokenizer.json")
        backend = copy(backend)
        backend.no_padding()
        backend.no_truncation()
        return cls(backend.to_str(), len(tokenizer), tuple(eos_token_ids))

    def build(self, vocab_size: int) -> LLTokenizer:
        """For a model of so many logits. Holds Python's lock for about a quarter of a second for 50,000 ids.

        Raises InvalidGrammarError.
        """
        try:
            from llguidance import LLTokenizer
        except ModuleNotFoundError as error:
            raise InvalidGrammarError(
                f"SamplingParams.structured: needs {error.name}; install isthmus[structured]"
            ) from error
        # Of a model that has none the library finds one itself. It is masked, as it would end nothing.
        eos_ids = [token_id for token_id in self.eos_token_ids if token_id < self.num_ids]
        try:
            return LLTokenizer(self.json, n_vocab=max(vocab_size, self.num_ids), eos_token=eos_ids or None)
        except ValueError as error:
            raise _unusable(str(error)) from error


def _unusable(why: str) -> InvalidGrammarError:
    return InvalidGrammarError(
        f"SamplingParams.structured: this model's tokenizer cannot be used for it: {why}; leave it out"
    )
