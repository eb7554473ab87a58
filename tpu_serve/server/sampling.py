"""From request fields to sampling parameters."""

from __future__ import annotations

from collections.abc import Sequence

from tpu_serve.request import MAX_LOGPROBS, InvalidRequest, SamplingParams
from tpu_serve.server.errors import show
from tpu_serve.server.parameters import unsupported
from tpu_serve.server.protocol import GenerationFields
from tpu_serve.server.service import Service

MAX_LENGTH = 2**31 - 1


def sampling_params(
    service: Service, request: GenerationFields, *, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """Sampling parameters of a request over the model's defaults.

    Args:
      max_tokens: the endpoint's reading of its length fields; None for whatever fits.
      logprobs: likewise.

    Raises:
      InvalidRequest: a value is out of range, or two contradict each other.
    """
    if request.best_of is not None and request.best_of != (1 if request.n is None else request.n):
        raise unsupported("best_of", request.best_of, "it must equal n, the number of choices")
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options", "stream_options needs stream = true.")
    if request.response_format is not None and request.response_format.type != "text":
        hint = "only {'type': 'text'} is served; ask for the format in the prompt"
        raise unsupported("response_format", request.response_format.type, hint)
    return service.frontend.engine.intake.params(
        n=request.n,
        max_tokens=max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        seed=None if request.seed == -1 else request.seed,
        stop=request.stop,
        stop_token_ids=request.stop_token_ids,
        include_stop_str_in_output=request.include_stop_str_in_output,
        ignore_eos=request.ignore_eos,
        skip_special_tokens=request.skip_special_tokens,
        logprobs=logprobs,
    )


def read_length(param: str, value: int | None) -> int | None:
    """A number of tokens to generate, under the name that the request used. Any large one means what the context has room for."""
    if value is not None and value < 1:
        raise InvalidRequest(param, f"{param} must be at least 1, got {show(value)}.")
    return None if value is None else min(value, MAX_LENGTH)


def check_logprobs(param: str, value: int | None) -> int | None:
    """A number of alternatives per token, under the name that the request used."""
    if value is not None and value > MAX_LOGPROBS:
        raise InvalidRequest(
            param, f"Requested sample logprobs of {value}, which is greater than max allowed: {MAX_LOGPROBS}."
        )
    if value is not None and value < 0:
        raise InvalidRequest(param, f"{param} must be between 0 and {MAX_LOGPROBS}, got {value}.")
    return value


def check_cache_salt(salt: str | None) -> str:
    if salt is None:
        return ""
    is_unicode = not any("\ud800" <= character <= "\udfff" for character in salt)
    if not 1 <= len(salt) <= 128 or set(salt) & set("@/\\\0") or not is_unicode:
        raise InvalidRequest("cache_salt", "cache_salt must be 1 to 128 characters without @, /, \\ and NUL.")
    return salt


def truncate(request: GenerationFields, token_ids: Sequence[int], max_model_len: int) -> Sequence[int]:
    """The prompt as `truncate_prompt_tokens` and `truncation_side` leave it."""
    if request.truncation_side not in ("left", "right"):
        raise InvalidRequest(
            "truncation_side", f"truncation_side must be left or right, got {show(request.truncation_side)}."
        )
    limit = request.truncate_prompt_tokens
    if limit is None:
        return token_ids
    if limit < 1 and limit != -1:
        raise InvalidRequest(
            "truncate_prompt_tokens", f"truncate_prompt_tokens must be at least 1, or -1, got {limit}."
        )
    kept = max_model_len - 1 if limit == -1 else limit  # one token is left for the answer
    if len(token_ids) <= kept:
        return token_ids
    return token_ids[-kept:] if request.truncation_side == "left" else token_ids[:kept]
