"""An LLM that answers from a script, for tests of the commands."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from isthmus.config import EngineConfig, ModelConfig, with_values
from isthmus.errors import InvalidPromptError
from isthmus.outputs import CompletionOutput, FinishReason, RequestMetrics, RequestOutput
from isthmus.sampling_params import SamplingParams


def config() -> EngineConfig:
    """A configuration with what a summary shows."""
    values = {"model.dtype": "bfloat16", "device.device": "cpu"}
    return with_values(EngineConfig(model=ModelConfig(model="m")), values)


def states(text: str, prompt: str = "", *, ttft_s: float = 0.25, per_token_s: float = 0.5) -> list[RequestOutput]:
    """The outputs of a request whose tokens are characters, one token a step."""
    outputs = []
    for count in range(1, len(text) + 1):
        finished = count == len(text)
        completion = CompletionOutput(
            index=0,
            text=text[:count],
            token_ids=[ord(character) for character in text[:count]],
            finish_reason=FinishReason.STOP if finished else None,
        )
        end_s = 10 + ttft_s + per_token_s * (count - 1)
        metrics = RequestMetrics(arrival_s=10, first_token_s=10 + ttft_s, finished_s=end_s if finished else None)
        outputs.append(
            RequestOutput(
                request_id="0",
                prompt=prompt,
                prompt_token_ids=[1, 2, 3],
                outputs=[completion],
                finished=finished,
                metrics=metrics,
            )
        )
    return outputs


class StubLLM:
    """Answers with `answers` in turn; what it was asked is in `asked`. `on_token` is called before each token."""

    def __init__(self, *answers: str, on_token: Callable[[int], None] | None = None) -> None:
        self.config = config()
        self.asked: list[tuple[object, SamplingParams]] = []
        self.closed = 0
        self._answers = iter(answers)
        self._on_token = on_token

    def stream(self, prompt: str, params: SamplingParams, /) -> Iterator[RequestOutput]:
        return self._stream(prompt, params)

    def stream_chat(self, messages: Sequence[dict[str, str]], params: SamplingParams, /) -> Iterator[RequestOutput]:
        if messages[-1]["content"] == "too long":
            raise InvalidPromptError("the prompt has 600 tokens")
        return self._stream([dict(message) for message in messages], params)

    def generate(self, prompts: list[str], params: SamplingParams, /) -> list[RequestOutput]:
        self.asked += [(prompt, params) for prompt in prompts]
        finals = [states(next(self._answers), prompt)[-1] for prompt in prompts]
        return [dataclasses.replace(final, request_id=str(index)) for index, final in enumerate(finals)]

    def _stream(self, asked: object, params: SamplingParams) -> Iterator[RequestOutput]:
        self.asked.append((asked, params))
        return self._play(states(next(self._answers)))

    def _play(self, outputs: list[RequestOutput]) -> Iterator[RequestOutput]:
        try:
            for index, output in enumerate(outputs):
                if self._on_token is not None:
                    self._on_token(index)
                yield output
        finally:
            self.closed += 1
