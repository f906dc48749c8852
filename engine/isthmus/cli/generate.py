"""`isthmus generate`: complete prompts."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from isthmus.cli.console import note
from isthmus.cli.engine_args import add_engine_arguments, open_llm
from isthmus.cli.parser import unicode_text
from isthmus.cli.sampling_args import add_sampling_arguments, sampling_params
from isthmus.cli.stream import plural, stream_answer, summary, timing_of, where
from isthmus.cli.text_files import STDIN, read_text
from isthmus.config import EngineConfig
from isthmus.errors import InvalidParamsError, InvalidPromptError
from isthmus.outputs import RequestOutput, TokenLogprobs
from isthmus.plugins.commands import Subparsers
from isthmus.sampling_params import SamplingParams

_TITLE_LENGTH = 60


class TextModel(Protocol):
    """What this command needs of an LLM."""

    @property
    def config(self) -> EngineConfig: ...

    def stream(self, prompt: str, sampling_params: SamplingParams, /) -> Iterator[RequestOutput]: ...

    def generate(self, prompts: list[str], sampling_params: SamplingParams, /) -> list[RequestOutput]: ...


def add_parser(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "generate",
        help="complete prompts",
        description="Complete prompts as they are, without a chat template. One prompt is shown as it is written.",
    )
    parser.add_argument(
        "--prompt",
        dest="prompts",
        type=unicode_text,
        action="append",
        default=[],
        metavar="TEXT",
        help="a prompt (repeatable)",
    )
    parser.add_argument(
        "--prompt-file",
        dest="prompt_files",
        action="append",
        default=[],
        metavar="FILE",
        help="a file that is one prompt, - for stdin (repeatable; stdin is read too if no prompt is given)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object a result")
    add_engine_arguments(parser)
    add_sampling_arguments(parser)
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Everything that can be wrong with the request is found before the model is loaded."""
    params = sampling_params(args)
    if params.logprobs is not None and not args.json:
        raise InvalidParamsError(f"--logprobs={params.logprobs}: plain text has no place for them; add --json")
    prompts = read_prompts(args.prompts, args.prompt_files)
    with open_llm(args) as llm:
        if args.json:
            return print_json(llm, prompts, params)
        if len(prompts) == 1:
            return print_stream(llm, prompts[0], params)
        return print_all(llm, prompts, params)


def read_prompts(texts: Sequence[str], files: Sequence[str]) -> list[str]:
    """Prompts in the order of the flags, texts first; stdin if there are none. Raises InvalidPromptError."""
    if not texts and not files and sys.stdin.isatty():
        raise InvalidPromptError("there is no prompt; give --prompt TEXT or --prompt-file FILE, or pipe it in")
    from_stdin = [STDIN] if not texts and not files else []
    return [*texts, *(read_text(path) for path in [*files, *from_stdin])]


def print_stream(llm: TextModel, prompt: str, params: SamplingParams) -> int:
    """Write one answer as it comes."""
    answer = stream_answer(llm.stream(prompt, params), sys.stdout)
    note(summary(answer.timing, llm.config))
    if answer.interrupted:
        raise KeyboardInterrupt
    return 0


def print_all(llm: TextModel, prompts: list[str], params: SamplingParams) -> int:
    """Write several answers, each under its prompt's first words."""
    start_s = time.monotonic()
    outputs = llm.generate(prompts, params)
    elapsed_s = time.monotonic() - start_s
    for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True), start=1):
        print(f"[{number}/{len(prompts)}] {_title(prompt)}\n{output.outputs[0].text}\n")
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    rate = f"{num_tokens / elapsed_s:.1f} tokens/s" if elapsed_s > 0 else "no time"
    note(f"-- {plural(num_tokens, 'token')} in {elapsed_s:.2f} s, {rate} {where(llm.config)}")
    return 0


def print_json(llm: TextModel, prompts: list[str], params: SamplingParams) -> int:
    """Write one JSON object a line."""
    for output in llm.generate(prompts, params):
        print(json.dumps(as_json(output), ensure_ascii=False))
    return 0


def as_json(output: RequestOutput) -> dict[str, Any]:
    """A finished output as plain data; times in seconds."""
    completion, timing = output.outputs[0], timing_of(output)
    data: dict[str, Any] = {
        "prompt": output.prompt,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "num_output_tokens": timing.num_tokens,
        "time_to_first_token_s": timing.time_to_first_token_s,
        "total_s": timing.total_s,
        "tokens_per_s": timing.tokens_per_s,
    }
    if completion.logprobs is not None:
        data["logprobs"] = [_plain(position) for position in completion.logprobs]
    return data


def _plain(position: TokenLogprobs) -> dict[int, dict[str, Any]]:
    return {token_id: dataclasses.asdict(candidate) for token_id, candidate in position.items()}


def _title(prompt: str) -> str:
    words = " ".join(prompt.split())
    return words if len(words) <= _TITLE_LENGTH else f"{words[:_TITLE_LENGTH]}..."
