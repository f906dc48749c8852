"""Prompt and parameters in, checked Request out. Whatever is wrong with a request is found here."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from isthmus.errors import InvalidParamsError, InvalidPromptError
from isthmus.pooling_params import PoolingParams
from isthmus.sampling_params import BeamSearchParams, SamplingParams
from isthmus.scheduler.beam import BeamGroup
from isthmus.scheduler.request import Request
from isthmus.scheduling_params import DEFAULT_SCHEDULING, SchedulingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or {"prompt": text} / {"prompt_token_ids": ids}."""

AnyParams = SamplingParams | BeamSearchParams | PoolingParams
"""What a prompt is for: completions, the best of many, or a vector."""

MAX_LOGPROBS = 20
_NO_OUTPUT = SamplingParams(max_tokens=1, temperature=0)
"""Of requests that are pooled. They have no output; the scheduler counts the one that others would get there."""


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What bounds a request of this model. hidden_size: numbers in an embedding."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    hidden_size: int


def eos_token_ids(
    generation_config: Mapping[str, Any], config: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase | None
) -> tuple[int, ...]:
    """Every id that ends a text: generation_config.json's (config.json's if it has none), and the tokenizer's own.

    Either file may hold one id or a list.
    """
    declared = generation_config.get("eos_token_id")
    if declared is None:
        declared = config.get("eos_token_id")
    found = [] if declared is None else [declared] if isinstance(declared, int) else list(declared)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        found.append(tokenizer.eos_token_id)
    return tuple(dict.fromkeys(found))


class InputProcessor:
    """Makes requests. Requests without a seed get one from a generator that `seed` starts, so a run repeats."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, limits: ModelLimits, *, seed: int) -> None:
        self.tokenizer = tokenizer
        self.limits = limits
        self._seeds = random.Random(seed)

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        params: AnyParams,
        scheduling: SchedulingParams = DEFAULT_SCHEDULING,
    ) -> tuple[Request, str | None]:
        """The request and the prompt's text, if it was given as text.

        Raises InvalidPromptError or InvalidParamsError.
        """
        text, token_ids = self._tokenize(prompt)
        if isinstance(params, PoolingParams):
            return self._to_be_pooled(request_id, token_ids, params, scheduling), text
        self._check_length(token_ids)
        params.check_vocab(self.limits.vocab_size)
        if isinstance(params, BeamSearchParams):
            return self._first_beam(request_id, token_ids, params, scheduling), text
        self._check_params(params)
        bad_words_ids = self._bad_words_ids(params)
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(63)
        request = Request(
            request_id,
            token_ids,
            params,
            eos_token_ids=self.limits.eos_token_ids,
            bad_words_ids=bad_words_ids,
            seed=seed,
            scheduling=scheduling,
        )
        params.check_masks(bad_words_ids, self.limits.vocab_size, request.stop_ids)
        return request, text

    def _first_beam(
        self, request_id: str, token_ids: list[int], params: BeamSearchParams, scheduling: SchedulingParams
    ) -> Request:
        eos_token_ids = () if params.ignore_eos else self.limits.eos_token_ids
        request = Request(
            request_id,
            token_ids,
            params.of_a_beam(len({*eos_token_ids, *params.stop_token_ids})),
            eos_token_ids=eos_token_ids,
            scheduling=scheduling,
        )
        request.beams = BeamGroup(params, request)
        return request

    def _to_be_pooled(
        self, request_id: str, token_ids: list[int], params: PoolingParams, scheduling: SchedulingParams
    ) -> Request:
        self._check_length(token_ids, num_outputs=0)
        params.check_hidden_size(self.limits.hidden_size)
        keys = {} if params.cache_salt is None else {"salt": params.cache_salt}
        return Request(request_id, token_ids, _NO_OUTPUT, scheduling=scheduling, cache_keys=keys, pooling=params)

    def _tokenize(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), self._checked_ids(prompt["prompt_token_ids"])
            if "prompt" not in prompt:
                raise InvalidPromptError(
                    f"prompt {prompt!r} has neither 'prompt' nor 'prompt_token_ids'; give one of them"
                )
            prompt = prompt["prompt"]
        if isinstance(prompt, str):
            return prompt, self.encode(prompt)
        return None, self._checked_ids(prompt)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        if self.tokenizer is None:
            raise InvalidPromptError("this engine has no tokenizer; give token ids")
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return ids

    def _checked_ids(self, ids: Any) -> list[int]:
        if not isinstance(ids, Sequence) or isinstance(ids, (str, bytes)):
            ids = ids.tolist() if hasattr(ids, "tolist") else ids
            if not isinstance(ids, list):
                raise InvalidPromptError(f"prompt of type {type(ids).__name__}; give a string or a list of token ids")
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int):
                raise InvalidPromptError(f"prompt token {token!r} is a {type(token).__name__}; token ids are integers")
            if not 0 <= token < self.limits.vocab_size:
                raise InvalidPromptError(
                    f"prompt token {token} is outside the vocabulary of {self.limits.vocab_size} ids; "
                    f"encode the prompt with this model's tokenizer"
                )
        return list(ids)

    def _check_length(self, token_ids: list[int], *, num_outputs: int = 1) -> None:
        if not token_ids:
            raise InvalidPromptError("the prompt has no tokens; give at least one")
        if len(token_ids) + num_outputs > self.limits.max_model_len:
            raise InvalidPromptError(
                f"the prompt has {len(token_ids)} tokens, the model takes "
                f"{self.limits.max_model_len}{' with at least one for the output' if num_outputs else ''}; shorten the "
                "prompt or raise model.max_model_len"
            )

    def _check_params(self, params: SamplingParams) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(params, name)
            if count is not None and count > MAX_LOGPROBS:
                raise InvalidParamsError(f"SamplingParams.{name}={count}: at most {MAX_LOGPROBS}; ask for fewer")
        if self.tokenizer is None and (params.stop or params.bad_words):
            raise InvalidParamsError(
                "stop strings and bad_words need a tokenizer, and this engine has none; use token ids"
            )

    def _bad_words_ids(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Each word as it is spelled at the start of a text and after a space."""
        found: dict[tuple[int, ...], None] = {}
        for word in params.bad_words or ():
            for text in (word, " " + word.lstrip()):
                ids = tuple(self.encode(text, add_special_tokens=False))
                if ids:
                    found[ids] = None
        return tuple(found)
