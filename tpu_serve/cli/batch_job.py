"""One run of a batch: every line answered, results written, figures kept."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tpu_serve.cli.batch_file import BatchLine, Result, ResultWriter, read_lines
from tpu_serve.cli.batch_runner import from_thread, run_lines
from tpu_serve.cli.progress import Progress
from tpu_serve.config import ConfigError
from tpu_serve.request import InvalidRequest

Handlers = Mapping[str, Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]]
"""By URL: what turns the body of a request into that of the answer, or raises what the server's `error_body` understands."""

RETRY_SECONDS = 0.05


@dataclass(slots=True)
class Totals:
    """Figures of a run. Lines that an earlier run answered count as resumed and, where that answer was an error, as failed."""

    num_requests: int = 0
    num_failed: int = 0
    num_resumed: int = 0
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    started: float = field(default_factory=time.monotonic)

    def add(self, result: Result) -> None:
        self.num_requests += 1
        self.num_failed += result.failed
        self.num_prompt_tokens += result.num_tokens("prompt")
        self.num_completion_tokens += result.num_tokens("completion")

    @property
    def tokens_per_second(self) -> float:
        """Completion tokens per second since the first line."""
        return self.num_completion_tokens / max(time.monotonic() - self.started, 1e-9)

    def as_json(self) -> dict[str, Any]:
        return {
            "requests": self.num_requests,
            "failed": self.num_failed,
            "resumed": self.num_resumed,
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "seconds": round(time.monotonic() - self.started, 3),
            "tokens_per_second": round(self.tokens_per_second, 1),
        }


class Batch:
    """One run over an input file.

    Args:
      writer: where results go.
      progress: is advanced per line.
      concurrency: most lines under way.
      ordered: results keep the order of the lines.
    """

    def __init__(self, writer: ResultWriter, progress: Progress, *, concurrency: int, ordered: bool):
        self._writer, self._progress, self.totals = writer, progress, Totals()
        self._concurrency, self._ordered = concurrency, ordered

    async def run(self, source: Iterable[bytes], handlers: Handlers, failure: Callable[[], str | None]) -> None:
        """Answers every line that no earlier run has answered.

        Args:
          failure: why the engine cannot go on, or None while it can.

        Raises:
          ConfigError: the engine failed; lines without a result have none.
          OSError: a file failed.
        """

        async def answer(line: BatchLine) -> Result:
            return await answer_line(line, handlers, failure)

        self._progress.start()
        lines = from_thread(self._unanswered(source, handlers))
        await run_lines(lines, answer, self._write, concurrency=self._concurrency, ordered=self._ordered)

    def _unanswered(self, source: Iterable[bytes], handlers: Handlers) -> Iterator[BatchLine]:
        for line in read_lines(source, handlers):
            failed = self._writer.answered.get(line.key)
            if failed is None:
                yield line
            else:
                self._progress.skip()
                self.totals.num_resumed += 1
                self.totals.num_failed += failed

    def _write(self, results: Sequence[Result]) -> None:
        self._writer.write(results)
        for result in results:
            self.totals.add(result)
        self._progress.advance(f"{self.totals.tokens_per_second:.1f} tokens/s", len(results))


async def answer_line(line: BatchLine, handlers: Handlers, failure: Callable[[], str | None]) -> Result:
    """The result of one line, whatever is wrong with it.

    Raises:
      ConfigError: nothing is wrong with the line, but the engine has failed.
    """
    from tpu_serve.server.errors import error_body, log_unexpected

    error: Exception
    while True:
        try:
            if line.problem is not None:
                raise line.problem
            return Result(line=line, status=200, body=await handlers[line.url](line.body))
        except InvalidRequest as refused:
            if refused.reason != "queue_full":
                error = refused
                break
            await asyncio.sleep(RETRY_SECONDS)  # more choices than lines: the others must finish first
        except Exception as failed:
            if (why := failure()) is not None:
                raise stopped(why) from failed
            log_unexpected(failed, f"of line {line.number}")
            error = failed
            break
    status, body = error_body(error)
    return Result(line=line, status=status, body=body)


def stopped(why: str) -> ConfigError:
    """The error that ends a run before its last line."""
    return ConfigError(f"The batch stopped: {why}. What is written stays; --resume continues.")
