"""What a sampled token means for its sequence: whether it ends, and what is told of it."""

from __future__ import annotations

from collections.abc import Iterable

from tpu_serve.request import NOT_A_NUMBER_ID, NOTHING_ALLOWED_ID, FinishReason, TokenOutput
from tpu_serve.scheduler.sequence import Sequence
from tpu_serve.scheduler.step import SampledToken

NOTHING_ALLOWED = "no token was allowed: what the request forbids and what it constrains leave nothing to say"
ERRORS = {
    NOT_A_NUMBER_ID: "the model's output for this request is not a number",
    NOTHING_ALLOWED_ID: NOTHING_ALLOWED,
}


def take_token(sequence: Sequence, result: SampledToken, now: float) -> TokenOutput:
    """Appends a token to its sequence. The output says how the sequence ends, if it does, and has no token where that is an error.

    Args:
      now: seconds on the monotonic clock.
    """
    token_id, tokens = result.token_id, sequence.tokens
    assert token_id is not None
    if (
        token_id < 0
        or token_id in sequence.end_ids
        or len(tokens) + 1 >= sequence.max_num_tokens
        or sequence.first_token is None
        or sequence.constraint is not None
    ):
        return _take_notable_token(sequence, result, token_id, now)
    tokens.append(token_id)
    sequence.last_token = now
    logprobs = None if result.logprobs is None else (result.logprobs,)
    return TokenOutput(sequence.request.id, (token_id,), logprobs, num_cached_tokens=sequence.num_cached)


def _take_notable_token(sequence: Sequence, result: SampledToken, token_id: int, now: float) -> TokenOutput:
    """One that may be the first or the last, or that a constraint must see."""
    request = sequence.request
    if token_id < 0:
        return _failed(sequence, ERRORS[token_id])
    reason, stop_token_id = None, None
    if token_id in request.eos_token_ids and not request.params.ignore_eos:
        reason = FinishReason.STOP
    elif token_id in request.params.stop_token_ids:
        reason, stop_token_id = FinishReason.STOP, token_id
    ended_by_token = reason is not None
    if reason is None and sequence.constraint is not None:
        try:
            sequence.constraint.accept(token_id)
        except ValueError as error:
            return _failed(sequence, str(error))
        if sequence.constraint.is_finished:
            reason = FinishReason.STOP
    sequence.tokens.append(token_id)
    if reason is None and len(sequence.tokens) >= sequence.max_num_tokens:
        reason = FinishReason.LENGTH
    sequence.last_token = now
    is_first = sequence.first_token is None
    prompt_logprobs = None
    if is_first:
        sequence.first_token = now
        if sequence.prompt_logprobs is not None:
            prompt_logprobs, sequence.prompt_logprobs = tuple(sequence.prompt_logprobs), None
    return TokenOutput(
        request_id=request.id,
        token_ids=(token_id,),
        logprobs=None if result.logprobs is None else (result.logprobs,),
        finish_reason=reason,
        stop_token_id=stop_token_id,
        ended_by_token=ended_by_token,
        num_cached_tokens=sequence.num_cached,
        prompt_logprobs=prompt_logprobs,
        timing=sequence.timing() if is_first or reason is not None else None,
    )


def take_tokens(
    sequence: Sequence, results: Iterable[SampledToken], now: float
) -> tuple[list[TokenOutput], SampledToken]:
    """Appends the tokens of several steps, up to the one that ends the sequence.

    Returns:
      One output that has all of them, with an error in one of its own behind it; and the last result that was taken.
    """
    outputs: list[TokenOutput] = []
    for last in results:
        outputs.append(take_token(sequence, last, now))
        if outputs[-1].finish_reason is not None:
            break
    errors = [outputs.pop()] if outputs[-1].error is not None else []
    if len(outputs) > 1:
        first, joined = outputs[0], outputs[-1]
        joined.token_ids = tuple(token_id for output in outputs for token_id in output.token_ids)
        if joined.logprobs is not None:
            joined.logprobs = tuple(entry for output in outputs for entry in output.logprobs or ())
        joined.prompt_logprobs, joined.timing = first.prompt_logprobs, joined.timing or first.timing
        outputs = [joined]
    return outputs + errors, last


def _failed(sequence: Sequence, error: str) -> TokenOutput:
    return TokenOutput(
        request_id=sequence.request.id, finish_reason=FinishReason.ERROR, error=error, timing=sequence.timing()
    )
