"""How one request is sampled: every field checks itself where it is declared."""

from __future__ import annotations

import math
import numbers
import re
import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from isthmus.errors import InvalidParamsError
from isthmus.structured.spec import StructuredOutput

_INT32_LIMIT = 2**31
_TOKEN_ID = re.compile(r"-?[0-9]{1,18}")


class _Wrong(Exception):
    """Says why a value is refused; `__post_init__` adds the field's name and the value."""


MAX_N = 128
"""Most completions of one prompt."""
MAX_BEAM_WIDTH = 128
LARGEST_LENGTH_PENALTY = 10.0
"""Either way; 1.0 divides by the length."""
Check = Callable[[Any], None]


def _integer(value: object, low: int, high: int, rule: str) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise _Wrong(f"must be an integer, not {type(value).__name__}; {rule}")
    if not low <= int(value) < high:
        raise _Wrong(rule)


def _real(value: object, accepts: Callable[[float], bool], rule: str) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise _Wrong(f"must be a number, not {type(value).__name__}; {rule}")
    try:
        number = float(value)
    except OverflowError:
        raise _Wrong(rule) from None
    if not (math.isfinite(number) and accepts(number)):
        raise _Wrong(rule)


def _flag(value: object) -> None:
    if not isinstance(value, bool):
        raise _Wrong(f"must be True or False, not {type(value).__name__}")


def _early_stopping(value: object) -> None:
    if not isinstance(value, bool) and value != "never":
        raise _Wrong('must be True, False or "never"')


def _sequence(value: object, of: str) -> Sequence[Any]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise _Wrong(f"must be a list or tuple of {of}, not {type(value).__name__}")
    return value


def _ids(value: object) -> None:
    for token_id in _sequence(value, "token ids"):
        _integer(token_id, -_INT32_LIMIT, _INT32_LIMIT, "token ids are integers of this model's vocabulary")


def _allowed_ids(value: object) -> None:
    _ids(value)
    if not value:
        raise _Wrong("allows no token at all; name at least one id, or use None to allow every id")


def _text(value: object, what: str) -> None:
    if not isinstance(value, str):
        raise _Wrong(f"must be text, not {type(value).__name__}")
    if not value:
        raise _Wrong(f"{what} must not be empty")


def _words(value: object, what: str) -> None:
    for word in _sequence(value, "strings"):
        _text(word, what)


def _stop(value: object) -> None:
    _words([value] if isinstance(value, str) else value, "a stop string")


def _bias(value: object) -> None:
    if not isinstance(value, Mapping):
        raise _Wrong(f"must map token ids to numbers, not {type(value).__name__}")
    seen: set[int] = set()
    for key, bias in value.items():
        token_id = _bias_id(key)
        if token_id in seen:
            raise _Wrong(f"token id {token_id} is given twice; keep one of them")
        seen.add(token_id)
        _real(bias, lambda x: -100 <= x <= 100, f"the bias of token id {token_id} must be in [-100, 100]")


def _bias_id(key: object) -> int:
    if isinstance(key, str) and _TOKEN_ID.fullmatch(key):
        return int(key)
    if isinstance(key, bool) or not isinstance(key, numbers.Integral):
        raise _Wrong(f"key {key!r} is not a token id; use integers, or their digits as text")
    return int(key)


def _structured(value: object) -> None:
    if not isinstance(value, StructuredOutput):
        raise _Wrong(f"must be a StructuredOutput, not {type(value).__name__}")


def _setting(default: Any, check: Check, *, optional: bool = False) -> Any:
    return field(default=default, metadata={"check": check, "optional": optional})


def _number(default: float, accepts: Callable[[float], bool], rule: str) -> Any:
    return _setting(default, lambda value: _real(value, accepts, rule))


def _count(default: int | None, low: int, rule: str, high: int = _INT32_LIMIT) -> Any:
    return _setting(default, lambda value: _integer(value, low, high, rule), optional=default is None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """What a request asks of the sampler and of the text that comes back. The defaults sample the model as it is.

    Containers are kept as given; `stop_strings` and `logit_bias_by_id` give the two that have several spellings in
    one form. Do not change a container after handing it over.

    Raises InvalidParamsError, `SamplingParams.<field>=<value>: <why>; <what to do>`, for the first wrong field.
    """

    n: int = _setting(
        1,
        lambda value: _integer(value, 1, MAX_N + 1, f"must be in [1, {MAX_N}]; send the prompt again for more answers"),
    )
    """Completions of the prompt. They share its blocks; a seed is that of the first, the next ones count up."""
    temperature: float = _number(1.0, lambda x: x >= 0, "must be a finite number >= 0; 0 means greedy")
    """Divides the logits before the softmax; 0 takes the most likely token. Any positive value is safe."""
    top_k: int = _count(0, -1, "must be >= 1, or 0 or -1 to turn it off")
    """Sample among the k most likely tokens only (of equal ones the lower id first). 0, -1 or >= vocabulary: off."""
    top_p: float = _number(1.0, lambda x: 0 < x <= 1, "must be in (0, 1]; use 1.0 to turn it off")
    """Sample among the fewest most likely tokens whose probabilities sum to at least top_p."""
    min_p: float = _number(0.0, lambda x: 0 <= x <= 1, "must be in [0, 1]; use 0.0 to turn it off")
    """Drop tokens less likely than min_p times the most likely one."""
    presence_penalty: float = _number(0.0, lambda x: -2 <= x <= 2, "must be in [-2, 2]; use 0.0 to turn it off")
    """Subtracted from the logit of every token in the output so far."""
    frequency_penalty: float = _number(0.0, lambda x: -2 <= x <= 2, "must be in [-2, 2]; use 0.0 to turn it off")
    """Subtracted from a token's logit once per occurrence in the output so far."""
    repetition_penalty: float = _number(1.0, lambda x: x > 0, "must be a finite number > 0; use 1.0 to turn it off")
    """Divides positive and multiplies negative logits of every token in the prompt or the output so far."""
    logit_bias: Mapping[int, float] | Mapping[str, float] | None = _setting(None, _bias, optional=True)
    """Token id (or its digits as text) -> number in [-100, 100] added to its logit."""
    allowed_token_ids: Sequence[int] | None = _setting(None, _allowed_ids, optional=True)
    """The only ids that may be sampled; None = all."""
    bad_words: Sequence[str] = _setting((), lambda value: _words(value, "a bad word"))
    """Texts whose token sequence may not be completed by a sampled token."""
    seed: int | None = _count(None, -(2**63), "must fit in 64 bits, signed; use None for an arbitrary one", high=2**63)
    """Same seed, same tokens, whatever else is in the batch. None: the engine picks one."""
    max_tokens: int | None = _count(None, 1, "must be >= 1; use None for as much as fits in the context")
    """Most tokens of output. None, the default, means the rest of the context: text is not cut unless you ask."""
    min_tokens: int = _count(0, 0, "must be >= 0; 0 turns it off")
    """Until the output has this many tokens, no stop token is sampled; a stop string must begin after them."""
    stop: str | Sequence[str] | None = _setting(None, _stop, optional=True)
    """Texts that end the output; the one that is complete first wins."""
    stop_token_ids: Sequence[int] = _setting((), _ids)
    """Ids that end the output, besides the model's own end-of-sequence ids."""
    include_stop_str_in_output: bool = _setting(False, _flag)
    """Keep the stop string, or the text of the stop token, at the end of the output."""
    ignore_eos: bool = _setting(False, _flag)
    """Do not end at the model's end-of-sequence ids."""
    logprobs: int | None = _count(None, 0, "must be >= 0 (0 = the sampled token only); use None to turn it off")
    """For each output token, this many most likely tokens and the sampled one. The engine sets the upper limit."""
    prompt_logprobs: int | None = _count(None, 0, "must be >= 0 (0 = the prompt tokens only); use None to turn it off")
    """The same for each prompt token but the first."""
    detokenize: bool = _setting(True, _flag)
    """Turn the output into text."""
    skip_special_tokens: bool = _setting(True, _flag)
    """Leave special tokens out of the text."""
    cache_salt: str | None = _setting(None, lambda value: _text(value, "a salt"), optional=True)
    """Requests share cached prefixes only with requests of the same salt."""
    structured: StructuredOutput | None = field(default=None, metadata={"check": _structured, "optional": True})
    """What the output must look like; None = anything. It ends when nothing may follow. Where it may end before that,
    the model decides. `min_tokens` and `ignore_eos` hold only as long as it can go on."""

    def __post_init__(self) -> None:
        _check_fields(self)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            why = f"is more than max_tokens={self.max_tokens}; lower it or raise max_tokens"
            raise _invalid(self, "min_tokens", why)
        if self.stop_strings and not self.detokenize:
            raise _invalid(self, "stop", "stop strings need text; set detokenize=True or use stop_token_ids")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple; () if there is none."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def logit_bias_by_id(self) -> dict[int, float]:
        """`logit_bias` with integer keys; {} if there is none."""
        return {int(key): float(bias) for key, bias in (self.logit_bias or {}).items()}

    def check_vocab(self, vocab_size: int) -> None:
        """Raises InvalidParamsError if a field names an id outside [0, vocab_size)."""
        named: dict[str, Collection[int]] = {
            "logit_bias": self.logit_bias_by_id,
            "allowed_token_ids": self.allowed_token_ids or (),
            "stop_token_ids": self.stop_token_ids,
        }
        _check_ids(self, named, vocab_size)

    def check_masks(
        self, bad_words_ids: Sequence[Sequence[int]], vocab_size: int, stop_ids: Collection[int] = ()
    ) -> None:
        """Raises InvalidParamsError if the masks leave no token that could ever come first.

        bad_words_ids: `bad_words` as token sequences; those of one token are banned everywhere.
        stop_ids: every id that ends the output; they are banned while `min_tokens` holds.
        """
        banned = {ids[0] for ids in bad_words_ids if len(ids) == 1}
        if self.min_tokens > 0:
            banned.update(stop_ids)
        allowed = range(vocab_size) if self.allowed_token_ids is None else self.allowed_token_ids
        if all(token_id in banned for token_id in allowed):
            scope = "the vocabulary" if self.allowed_token_ids is None else "allowed_token_ids"
            field_name = "bad_words" if bad_words_ids else "min_tokens"
            others = " together with min_tokens" if bad_words_ids and self.min_tokens > 0 else ""
            raise InvalidParamsError(
                f"SamplingParams.{field_name}: bans every id of {scope}{others}, so no token is left to sample; "
                "allow another id or drop a ban"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """How the most likely outputs of a prompt are searched: `beam_width` sequences grow side by side, a token a step,
    and of all their continuations the most likely live on. Nothing is drawn at random.

    Raises InvalidParamsError, `BeamSearchParams.<field>=<value>: <why>; <what to do>`, for the first wrong field.
    """

    beam_width: int = _setting(
        4,
        lambda value: _integer(
            value, 2, MAX_BEAM_WIDTH + 1, f"must be in [2, {MAX_BEAM_WIDTH}]; one beam is SamplingParams(temperature=0)"
        ),
    )
    """Sequences that are kept after each token, and sequences that come back."""
    max_tokens: int | None = _count(None, 1, "must be >= 1; use None for as much as fits in the context")
    """Most tokens of each sequence. None: as many as fit in the context and, `beam_width` times, in the KV pool."""
    length_penalty: float = _number(
        1.0,
        lambda x: abs(x) <= LARGEST_LENGTH_PENALTY,
        f"must be in [-{LARGEST_LENGTH_PENALTY}, {LARGEST_LENGTH_PENALTY}]; use 0.0 to turn it off",
    )
    """A sequence's score is its log-probability divided by its number of tokens to this power: more favours longer."""
    early_stopping: bool | str = _setting(False, _early_stopping)
    """When the search ends, once `beam_width` sequences have ended. True: at once. False: when the most likely live
    beam, scored at its present length, is no better than the worst of them. "never": when it could not become better.
    """
    stop_token_ids: Sequence[int] = _setting((), _ids)
    """Ids that end a sequence, besides the model's own end-of-sequence ids."""
    ignore_eos: bool = _setting(False, _flag)
    """Do not end at the model's end-of-sequence ids."""
    include_stop_str_in_output: bool = _setting(False, _flag)
    """Keep the text of the stop token at the end of the output."""
    detokenize: bool = _setting(True, _flag)
    """Turn the output into text."""
    skip_special_tokens: bool = _setting(True, _flag)
    """Leave special tokens out of the text."""
    cache_salt: str | None = _setting(None, lambda value: _text(value, "a salt"), optional=True)
    """Requests share cached prefixes only with requests of the same salt."""

    def __post_init__(self) -> None:
        _check_fields(self)

    def check_vocab(self, vocab_size: int) -> None:
        """Raises InvalidParamsError if a field names an id outside [0, vocab_size)."""
        _check_ids(self, {"stop_token_ids": self.stop_token_ids}, vocab_size)

    def of_a_beam(self, num_stop_ids: int) -> SamplingParams:
        """How each beam is sampled: with the log-probabilities of as many tokens as can matter.

        `beam_width` continuations that do not end are needed at most from one beam, and those that end may stand
        before all of them.
        """
        return SamplingParams(
            temperature=0,
            logprobs=self.beam_width + num_stop_ids,
            max_tokens=self.max_tokens,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            include_stop_str_in_output=self.include_stop_str_in_output,
            detokenize=self.detokenize,
            skip_special_tokens=self.skip_special_tokens,
            cache_salt=self.cache_salt,
        )


def _check_fields(params: SamplingParams | BeamSearchParams) -> None:
    for item in fields(params):
        value = getattr(params, item.name)
        if value is None and item.metadata["optional"]:
            continue
        try:
            item.metadata["check"](value)
        except _Wrong as problem:
            raise _invalid(params, item.name, str(problem)) from None


def _check_ids(
    params: SamplingParams | BeamSearchParams, named: Mapping[str, Collection[int]], vocab_size: int
) -> None:
    for name, token_ids in named.items():
        for token_id in token_ids:
            if not 0 <= token_id < vocab_size:
                raise InvalidParamsError(
                    f"{type(params).__name__}.{name}: token id {token_id} is outside [0, {vocab_size}); "
                    "use ids of this model's vocabulary"
                )


def _invalid(params: SamplingParams | BeamSearchParams, name: str, why: str) -> InvalidParamsError:
    return InvalidParamsError(f"{type(params).__name__}.{name}={reprlib.repr(getattr(params, name))}: {why}")
