"""What every answer says beside its text: who made it, and what it took."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from isthmus.outputs import RequestOutput
from isthmus.server.context import ServerContext
from isthmus.server.protocol.common import CachedTokens, StreamOptions, Usage


def heading(context: ServerContext, kind: str, request_id: str, created_s: int) -> dict[str, Any]:
    """The fields that all events of an answer share. kind: "cmpl" or "chatcmpl"."""
    return {
        "id": f"{kind}-{request_id}",
        "created": created_s,
        "model": context.settings.model_name,
        "system_fingerprint": context.fingerprint,
    }


@dataclass(slots=True)
class UsageCount:
    """Counts the tokens of outputs as they come."""

    num_output_tokens: int = 0
    _prompts: dict[int, tuple[int, int]] = field(default_factory=dict)

    def add(self, index: int, output: RequestOutput) -> None:
        """An output of prompt `index` that holds what is new."""
        self._prompts.setdefault(index, (len(output.prompt_token_ids), output.num_cached_tokens))
        self.num_output_tokens += sum(len(completion.token_ids) for completion in output.outputs)

    def usage(self) -> Usage:
        """So far."""
        num_prompt_tokens = sum(num_tokens for num_tokens, _ in self._prompts.values())
        return Usage(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=self.num_output_tokens,
            total_tokens=num_prompt_tokens + self.num_output_tokens,
            prompt_tokens_details=CachedTokens(cached_tokens=sum(cached for _, cached in self._prompts.values())),
        )


def usage_of(outputs: Iterable[RequestOutput]) -> Usage:
    """Of finished outputs, one a prompt."""
    count = UsageCount()
    for index, output in enumerate(outputs):
        count.add(index, output)
    return count.usage()


def wants_usage(options: StreamOptions | None) -> tuple[bool, bool]:
    """Whether the last event of a stream tells the usage, and whether every one does."""
    at_end = options is not None and bool(options.include_usage)
    return at_end, at_end and options is not None and bool(options.continuous_usage_stats)
