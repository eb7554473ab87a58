"""What a sampled token means for its sequence: whether it ends, and what is told of it."""

from __future__ import annotations

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
    token_id, request = result.token_id, sequence.request
    assert token_id is not None
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


def _failed(sequence: Sequence, error: str) -> TokenOutput:
    return TokenOutput(
        request_id=sequence.request.id, finish_reason=FinishReason.ERROR, error=error, timing=sequence.timing()
    )
