"""A whole batch, from its two files to its summary."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from isthmus.async_llm import AsyncLLM
from isthmus.batch.lines import BatchLine, read_lines
from isthmus.batch.progress import BatchProgress
from isthmus.batch.results import BatchResult, ResultFile
from isthmus.batch.runner import BatchRunner
from isthmus.config import EngineConfig
from isthmus.errors import ConfigError
from isthmus.server.app import make_app, make_context
from isthmus.server.settings import ServerSettings


def run_batch(
    config: EngineConfig,
    settings: ServerSettings,
    input_file: Path,
    output_file: Path,
    *,
    concurrency: int,
    engine_process: Literal["on", "off"],
    restart_engine: int,
    say: Callable[[str], None],
) -> None:
    """Returns when every line of `input_file` has a result in `output_file`. Those that are there already are kept, so
    that a batch that was broken off goes on. say: writes a line for people.

    Raises ConfigError for files that cannot be used, before the model is loaded; then what AsyncLLM.start() raises; and
    EngineDeadError if the engine dies for good.
    """
    if output_file.exists() and input_file.exists() and output_file.samefile(input_file):
        raise ConfigError([f"--output-file={output_file}: is the input file; choose another"])
    lines = read_lines(input_file)
    with ResultFile(output_file, [line.custom_id for line in lines]) as results:
        left = [line for line in lines if line.custom_id not in results.done]
        if results.done:
            say(f"{len(results.done)} of {len(lines)} lines have a result already")
        if left:
            llm = AsyncLLM(config, engine_process=engine_process, restart_engine=restart_engine, drain_timeout_s=0.0)
            asyncio.run(_run(llm, settings, left, results, concurrency, say))
        num_failed = sum(not is_ok for is_ok in results.done.values())
        if num_failed:
            say(f"{num_failed} of the lines that had a result already failed; delete them to have them tried again")


async def _run(
    llm: AsyncLLM,
    settings: ServerSettings,
    lines: Sequence[BatchLine],
    results: ResultFile,
    concurrency: int,
    say: Callable[[str], None],
) -> None:
    context = make_context(llm, settings)
    async with llm:
        await context.learn()
        with BatchProgress(len(lines), say) as progress:

            def keep(result: BatchResult) -> None:
                results.append(result)
                progress.took(result)

            try:
                await BatchRunner(make_app(context), llm, keep).run(lines, concurrency)
            except BaseExceptionGroup as group:
                raise group.exceptions[0] from None
        say(progress.summary())
