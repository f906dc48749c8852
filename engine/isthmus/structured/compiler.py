"""Compiles grammars in threads of its own, each once, and keeps them."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING

from isthmus.errors import InvalidGrammarError, QueueFullError
from isthmus.structured.grammar import Grammar
from isthmus.structured.spec import StructuredOutput
from isthmus.structured.tokenizer import TokenizerText

if TYPE_CHECKING:
    from llguidance import LLTokenizer

logger = logging.getLogger(__name__)

NUM_AT_ONCE = 2
STACK_BYTES = 256 * 2**20
"""The library follows rules by recursion, and a stack that overflows ends the process. The usual 8 MiB overflow within
the size that a schema may have; 512 MiB held ten times that. Only what is touched of it becomes memory."""
MAX_CACHED = 256
MAX_PENDING = 64
TIMEOUT_S = 10.0
RETRY_AFTER_S = 1.0
_PATIENCE_S = 0.1


class GrammarCompiler:
    """Grammars by what was asked for; those that failed, too. The least recently used are forgotten.

    make_tokenizer: called when the first grammar comes, in a thread of the compiler, unless somebody has offered one.
    vocab_size: logits of a token.  timeout_s: what one may take, once the tokenizer is there.
    """

    def __init__(
        self,
        make_tokenizer: Callable[[], TokenizerText],
        vocab_size: int,
        *,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._make_tokenizer = make_tokenizer
        self._vocab_size = vocab_size
        self._timeout_s = timeout_s
        self._found: OrderedDict[StructuredOutput, Future[Grammar]] = OrderedDict()
        self._places = threading.Semaphore(NUM_AT_ONCE)
        self._tokenizer_lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._ready_s: float | None = None

    def offer(self, tokenizer: TokenizerText) -> None:
        """Use this one: to load it a second time would hold up the engine."""
        self._make_tokenizer = lambda: tokenizer

    def submit(self, spec: StructuredOutput) -> Compilation:
        """Compile it, unless that was done before. Called by the engine's thread only; returns at once.

        Raises QueueFullError if too many are being compiled.
        """
        future = self._found.get(spec)
        if future is None:
            future = self._start(spec)
        self._found.move_to_end(spec)
        return Compilation(future, self._seconds_left)

    def _start(self, spec: StructuredOutput) -> Future[Grammar]:
        num_pending = sum(not future.done() for future in self._found.values())
        if num_pending >= MAX_PENDING:
            raise _full(f"{num_pending} grammars are being compiled")
        if len(self._found) >= MAX_CACHED:
            del self._found[next(old for old, future in self._found.items() if future.done())]
        future: Future[Grammar] = Future()
        try:
            _start_thread(lambda: self._compile(spec, future))
        except RuntimeError as error:  # the system has no room for one more
            raise _full(f"no grammar can be compiled now: {error}") from error
        self._found[spec] = future
        return future

    def _compile(self, spec: StructuredOutput, future: Future[Grammar]) -> None:
        """A thread's work."""
        with self._places:
            try:
                future.set_result(Grammar(spec, self._ready_tokenizer()))
            except InvalidGrammarError as error:
                future.set_exception(error)
            except BaseException as error:  # the library's panics are no Exceptions; none may reach the engine
                logger.error("a grammar was not compiled", exc_info=error)
                future.set_exception(
                    InvalidGrammarError(
                        f"SamplingParams.structured: cannot be compiled: {type(error).__name__}: {error}"
                    )
                )

    def _ready_tokenizer(self) -> LLTokenizer:
        with self._tokenizer_lock:
            if self._tokenizer is None:
                self._tokenizer = self._make_tokenizer().build(self._vocab_size)
                self._ready_s = time.monotonic()
            return self._tokenizer

    def _seconds_left(self, submitted_s: float) -> float:
        """Of the time that something submitted then may take."""
        now_s = time.monotonic()
        since_s = now_s if self._ready_s is None else max(submitted_s, self._ready_s)
        return since_s + self._timeout_s - now_s


class Compilation:
    """One request's wait for a grammar that others may wait for as well."""

    def __init__(self, future: Future[Grammar], seconds_left: Callable[[float], float]) -> None:
        self._future = future
        self._seconds_left = seconds_left
        self._submitted_s = time.monotonic()

    def poll(self) -> Grammar | None:
        """The grammar; None = not yet. Raises InvalidGrammarError if it cannot be compiled, or not in time."""
        if not self._future.done():
            if self._seconds_left(self._submitted_s) <= 0:
                raise InvalidGrammarError(
                    "SamplingParams.structured: could not be compiled in time; make it simpler, or try again later"
                )
            return None
        return self._future.result()

    def wait(self) -> Grammar:
        """As poll(), for who has nothing else to do."""
        while (grammar := self.poll()) is None:
            wait([self._future], timeout=_PATIENCE_S)
        return grammar


def _full(why: str) -> QueueFullError:
    return QueueFullError(f"{why}; try again in {RETRY_AFTER_S:.1f} s", retry_after_s=RETRY_AFTER_S)


def _start_thread(work: Callable[[], None]) -> None:
    """It must not keep the process alive: nothing can interrupt the library."""
    before = threading.stack_size(STACK_BYTES)
    try:
        threading.Thread(target=work, name="isthmus-grammar", daemon=True).start()
    finally:
        threading.stack_size(before)
