"""One choice of an answer: token outputs in, text out, cut at stop strings."""

from __future__ import annotations

from dataclasses import dataclass

from tpu_serve.request import FinishReason, Request, Timing, TokenLogprobs, TokenOutput
from tpu_serve.text.detokenizer import Detokenizer, TextDelta
from tpu_serve.text.tokenizer import Tokenizer


@dataclass(slots=True, kw_only=True)  # not frozen: one is made per token, and freezing makes that three times as slow
class ChoiceDelta:
    """What one engine step added to one choice. Nobody changes it.

    Attributes:
      index: which choice.
      text: new text that is safe to show; often empty while a character or a stop string is incomplete.
      token_ids: new tokens that belong to the answer.
      num_tokens: tokens of the answer so far, these included.
      logprobs: one entry per new token when asked for, else None.
      prompt_logprobs: with the first token, when asked for: an entry per prompt token, None for the first one.
      finish_reason: set on the last delta of the choice.
      stop_reason: the stop string or the stop token id that ended it; None for an end-of-sequence id.
      error: what went wrong, when finish_reason is ERROR.
    """

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    num_tokens: int = 0
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None


class Choice:
    """Text and counts of one choice while it is generated.

    Attributes:
      request: the engine request behind it.
      num_tokens: tokens of the answer so far; tokens sampled after a stop string was complete do not count.
      num_cached_tokens: prompt tokens taken from the prefix cache.
      finish_reason: None while it runs.
      timing: what the engine has told so far, None before its first token.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer):
        params = request.params
        self.request, self.num_tokens, self.num_cached_tokens = request, 0, 0
        self.finish_reason: FinishReason | None = None
        self.timing: Timing | None = None
        self._detokenizer = Detokenizer(
            tokenizer,
            stop=params.stop,
            include_stop_str_in_output=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            shown_token_ids=request.shown_token_ids,
            prompt_token_ids=request.prompt_token_ids,
            min_tokens=params.min_tokens,
        )

    def feed(self, output: TokenOutput) -> ChoiceDelta:
        """Takes the next output of the request. When it ends at a stop string, the caller must abort the engine request."""
        reason, stop_reason = output.finish_reason, output.stop_token_id
        token_ids, logprobs = output.token_ids, output.logprobs
        hide_last = output.ended_by_token and not self.request.params.include_stop_str_in_output
        visible = token_ids[:-1] if hide_last else token_ids
        if self.request.params.detokenize:
            delta = self._detokenizer.push(visible, finished=reason is not None)
        else:
            delta = TextDelta("", None, len(visible))
        stop: int | str | None = stop_reason
        if delta.stop is not None:
            reason, stop = FinishReason.STOP, delta.stop
            token_ids = token_ids[: delta.num_tokens]
            logprobs = None if logprobs is None else logprobs[: delta.num_tokens]
        self.num_tokens += len(token_ids)
        self.num_cached_tokens = output.num_cached_tokens
        self.finish_reason = reason
        return ChoiceDelta(
            index=self.request.choice,
            text=delta.text,
            token_ids=token_ids,
            num_tokens=self.num_tokens,
            logprobs=logprobs,
            prompt_logprobs=output.prompt_logprobs,
            finish_reason=reason,
            stop_reason=stop,
            error=output.error,
        )
