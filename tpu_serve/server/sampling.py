"""From request fields to sampling parameters."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from tpu_serve.request import MAX_BIASES, MAX_LOGIT_BIAS, Constraint, InvalidRequest, SamplingParams
from tpu_serve.server.errors import show
from tpu_serve.server.parameters import unsupported
from tpu_serve.server.protocol import GenerationFields
from tpu_serve.server.service import Service
from tpu_serve.server.structured import form_of

MAX_LENGTH = 2**31 - 1
MAX_KEYS_SHOWN = 10


def sampling_params(
    service: Service,
    request: GenerationFields,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    scores_prompt: bool = False,
) -> SamplingParams:
    """Sampling parameters of a request over the model's defaults.

    Args:
      max_tokens: the endpoint's reading of its length fields; None for whatever fits.
      logprobs: likewise.
      scores_prompt: the prompt's tokens get as many alternatives as the answer's, because they are shown with them.

    Raises:
      InvalidRequest: a value is out of range, or two contradict each other.
    """
    if request.best_of is not None and request.best_of != (1 if request.n is None else request.n):
        raise unsupported("best_of", request.best_of, "it must equal n, the number of choices")
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options", "stream_options needs stream = true.")
    prompt_logprobs = check_logprobs(service, "prompt_logprobs", request.prompt_logprobs)
    if prompt_logprobs is not None and request.stream:
        raise InvalidRequest("prompt_logprobs", "prompt_logprobs are not available when stream = true.")
    allowed, size = request.allowed_token_ids, service.info.vocab_size
    if allowed is not None and len(allowed) > size:
        raise InvalidRequest(
            "allowed_token_ids", f"allowed_token_ids holds {len(allowed)} ids; the vocabulary has {size}."
        )
    if scores_prompt and logprobs is not None:
        prompt_logprobs = max(logprobs, prompt_logprobs or 0)
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
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=request.repetition_penalty,
        logit_bias=_read_biases(request.logit_bias),
        min_tokens=request.min_tokens,
        bad_words=request.bad_words,
        allowed_token_ids=request.allowed_token_ids,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def script_of(service: Service, request: GenerationFields) -> list[int]:
    """The ids that an answer is made to have, none when it is the model's own.

    Raises:
      InvalidRequest: the server does not allow it.
    """
    script = request.scripted_token_ids
    if script is None:
        return []
    if not service.enable_scripted_output:
        hint = "it is for tests, and the server was started without --enable-scripted-output"
        raise unsupported("scripted_token_ids", script, hint)
    if not script:
        raise InvalidRequest("scripted_token_ids", "scripted_token_ids must hold at least one token id.")
    return script


async def constraint_of(service: Service, request: GenerationFields) -> Constraint | None:
    """What gives the answer the form that a request asks for, from the answer's first token on.

    Raises:
      InvalidRequest: there is no such form.
    """
    form = form_of(request)
    return None if form is None else await service.grammars.compile(form.spec, form.param)


def _read_biases(given: Mapping[str, object] | None) -> dict[int, float] | None:
    """Biases by token id. JSON has them by texts."""
    if given is None:
        return None
    if len(given) > MAX_BIASES:
        raise InvalidRequest(
            "logit_bias", f"logit_bias holds {len(given)} tokens; at most {MAX_BIASES} are allowed.", "too_many_biases"
        )
    wrong = [key for key in given if not re.fullmatch("0|-?[1-9][0-9]{0,18}", key)]
    if wrong:
        shown = ", ".join(map(show, wrong[:MAX_KEYS_SHOWN])) + (", …" if len(wrong) > MAX_KEYS_SHOWN else "")
        raise InvalidRequest("logit_bias", f"The keys of logit_bias must be token ids, got {shown}.")
    biases: dict[int, float] = {}
    for key, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidRequest(
                "logit_bias", f"The values of logit_bias must be numbers, got {show(value)}.", "invalid_type"
            )
        if not -MAX_LOGIT_BIAS <= value <= MAX_LOGIT_BIAS:
            raise InvalidRequest(
                "logit_bias",
                f"The values of logit_bias must be in [{-MAX_LOGIT_BIAS:g}, {MAX_LOGIT_BIAS:g}], got {show(value)}.",
            )
        biases[int(key)] = float(value)
    return biases


def read_length(param: str, value: int | None) -> int | None:
    """A number of tokens to generate, under the name that the request used. Any large one means what the context has room for."""
    if value is not None and value < 1:
        raise InvalidRequest(param, f"{param} must be at least 1, got {show(value)}.")
    return None if value is None else min(value, MAX_LENGTH)


def check_logprobs(service: Service, param: str, value: int | None) -> int | None:
    """A number of alternatives per token, under the name that the request used."""
    if value is None:
        return None
    if value < -1:
        raise InvalidRequest(param, f"{param} must be 0 or more, or -1 for the whole vocabulary, got {show(value)}.")
    info = service.info
    asked = info.vocab_size if value == -1 else value
    if asked > info.max_logprobs:
        what = "prompt" if param == "prompt_logprobs" else "sample"
        raise InvalidRequest(
            param,
            f"Requested {what} logprobs of {show(asked)}, which is greater than max allowed: {info.max_logprobs}.",
        )
    return asked


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
