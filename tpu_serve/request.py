"""What a user asks of the engine and what the engine answers: plain data, no jax, no text.

`SamplingParams` says how to generate, `Request` adds the prompt, `TokenOutput` is what one engine step produced for one request.
Values are checked where they enter (`InvalidRequest` names the field), so nothing below this file has to.
"""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 1024
"""Every generated token is looked for among them."""
MAX_BIASES = 512
"""Most entries that the device adds to one row's logits: logit_bias, banned tokens and the stop tokens that min_tokens forbids."""
MAX_BAD_WORDS = 128
MAX_BAD_WORD_TOKENS = 1024
"""Most tokens of all bad words together, each with and without a space in front."""
MAX_LOGIT_BIAS = 100.0
MAX_LOGPROBS = 20
"""Largest number of alternatives per token. The compiled step always has room for this many, so that asking changes no program."""
MAX_CHOICES = 128
GREEDY_BELOW = 1e-5
"""A temperature under this value means greedy decoding."""
NOT_A_NUMBER_ID, NOTHING_ALLOWED_ID = -1, -2
"""What the device puts in place of a token: the logits hold a NaN, or every token was forbidden. Both end that request only."""


class InvalidRequest(ValueError):
    """A request that cannot be served as asked.

    Attributes:
      param: name of the offending field as the user wrote it, or None when no single field is to blame.
      reason: stable machine-readable code, for example `invalid_value` or `context_length_exceeded`.
      status: HTTP status that the server answers.
    """

    def __init__(self, param: str | None, message: str, reason: str = "invalid_value", status: int = 400):
        super().__init__(message)
        self.param, self.message, self.reason, self.status = param, message, reason, status


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


def _check_number(name: str, value: object, low: float, high: float, *, low_open: bool = False) -> None:
    bounds = f"{'(' if low_open else '['}{low:g}, {high:g}{']' if math.isfinite(high) else ')'}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(name, f"{name} must be a number in {bounds}, got {value!r}.")
    if not math.isfinite(value) or value < low or value > high or (low_open and value == low):
        raise InvalidRequest(name, f"{name} must be in {bounds}, got {value}.")


def _check_integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(name, f"{name} must be an integer, got {value!r}.")
    if not low <= value <= high:
        raise InvalidRequest(name, f"{name} must be between {low} and {high}, got {value}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to generate. A bad value raises `InvalidRequest` naming the field.

    Attributes:
      n: number of choices generated for the prompt.
      max_tokens: most tokens to generate; None means whatever is left of the context. Clipped to the context.
      temperature: in [0, 2]; below 1e-5 decoding is greedy and top_p, top_k and min_p have no effect.
      top_p: in (0, 1]; keep the smallest set of tokens whose probability mass reaches it.
      top_k: keep the k most probable tokens; 0 and -1 keep all.
      min_p: in [0, 1]; drop tokens less probable than min_p times the most probable one.
      seed: a signed 64-bit integer: the same seed, prompt and parameters give the same tokens whatever else runs. None: a fresh one.
      stop: strings that end the text, in any position relative to token boundaries.
      include_stop_str_in_output: keep the stop string (or stop token's text) that ended the text.
      stop_token_ids: ids that end the generation in addition to the model's end-of-sequence ids.
      ignore_eos: generate past every end-of-sequence id; stop_token_ids still stop.
      logprobs: number of most probable alternatives reported per token, 0 for only the sampled one, None for nothing.
        Log-probabilities are of the model's raw distribution, before temperature and filters.
      skip_special_tokens: leave special tokens out of the text.
      detokenize: make text of the tokens; without it there is none, and no stop string.
      presence_penalty, frequency_penalty: in [-2, 2]; taken from the logits of tokens that were generated, once or once per occurrence.
      repetition_penalty: above 0; logits of tokens in the prompt or the answer are divided by it if positive, else multiplied.
      logit_bias: token ids and what is added to their logits before everything else, in [-100, 100]. A mapping is taken too.
      min_tokens: no end-of-sequence id and none of stop_token_ids is generated before so many tokens, and no stop string ends the text.
      bad_words: texts whose tokens are never generated in a row, with and without a space in front.
      allowed_token_ids: only these are generated; None for all.
      prompt_logprobs: as `logprobs`, for the tokens of the prompt; the first one has none. The prefix cache is not read then.
    """

    n: int = 1
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        # Lists and single strings are what people write; the frozen object keeps tuples.
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        pairs = self.logit_bias.items() if isinstance(self.logit_bias, Mapping) else self.logit_bias
        object.__setattr__(self, "logit_bias", tuple(pairs))
        words = (self.bad_words,) if isinstance(self.bad_words, str) else tuple(self.bad_words)
        object.__setattr__(self, "bad_words", words)
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", tuple(self.allowed_token_ids))
        _check_integer("n", self.n, 1, MAX_CHOICES)
        if self.max_tokens is not None:
            _check_integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check_number("temperature", self.temperature, 0.0, 2.0)
        _check_number("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _check_integer("top_k", self.top_k, -1, 2**31 - 1)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _check_integer("seed", self.seed, -(2**63), 2**63 - 1)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(
                "stop", f"stop holds {len(self.stop)} strings; at most {MAX_STOP_STRINGS} are allowed."
            )
        if not all(isinstance(text, str) and text for text in self.stop):
            raise InvalidRequest("stop", "stop must hold non-empty strings.")
        if self.stop and not self.detokenize:
            raise InvalidRequest("stop", "stop strings are found in the text, which detokenize = false leaves out.")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequest(
                "stop_token_ids",
                f"stop_token_ids holds {len(self.stop_token_ids)} ids; at most {MAX_STOP_TOKEN_IDS} are allowed.",
            )
        for token_id in self.stop_token_ids:
            _check_integer("stop_token_ids", token_id, 0, 2**31 - 1)
        if self.logprobs is not None:
            _check_integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _check_integer("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        _check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_number("repetition_penalty", self.repetition_penalty, 0.0, math.inf, low_open=True)
        for token_id, value in self.logit_bias:
            _check_integer("logit_bias", token_id, 0, 2**31 - 1)
            _check_number("logit_bias", value, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
        _check_integer("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                "min_tokens", f"min_tokens ({self.min_tokens}) must not be larger than max_tokens ({self.max_tokens})."
            )
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise InvalidRequest(
                "bad_words", f"bad_words holds {len(self.bad_words)} texts; at most {MAX_BAD_WORDS} are allowed."
            )
        if not all(isinstance(text, str) and text for text in self.bad_words):
            raise InvalidRequest("bad_words", "bad_words must hold non-empty strings.")
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                raise InvalidRequest("allowed_token_ids", "allowed_token_ids must not be empty: nothing could be said.")
            for token_id in self.allowed_token_ids:
                _check_integer("allowed_token_ids", token_id, 0, 2**31 - 1)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1


@dataclass(frozen=True, slots=True)
class Bias:
    """Added to the logit of a token while fewer than `until` tokens of the answer have been generated; minus infinity forbids it."""

    token_id: int
    value: float
    until: int = 2**31 - 1


class Constraint(Protocol):
    """Which tokens may come next in one sequence, which it follows token by token. Only the engine's thread touches it once the request runs.

    Attributes:
      follows: the mask depends on the tokens so far, so the sequence is not launched while the host does not know its last one.
      mask: little-endian words of 32 bits, bit i % 32 of word i // 32 says whether id i may come next, ceil(vocabulary / 32) words;
        None while everything may.
      is_finished: nothing may follow: the sequence ends with the token accepted last.
    """

    @property
    def follows(self) -> bool: ...

    @property
    def mask(self) -> bytes | None: ...

    @property
    def is_finished(self) -> bool: ...

    def accept(self, token_id: int) -> None:
        """Takes the next token.

        Raises:
          ValueError: it is not allowed, or what follows cannot be said; the request fails with this message.
        """

    def copy(self) -> Constraint:
        """One at the same place, for another choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One sequence to generate. `n > 1` choices are as many requests, which share the prompt through the prefix cache.

    Attributes:
      id: unique while the request lives.
      prompt_token_ids: the whole prompt, at least one id.
      params: `max_tokens` is set (clipped to the context) by the time the engine sees it.
      eos_token_ids: ids that end the sequence unless `params.ignore_eos`.
      seed: seed of the random stream, `params.seed` or a fresh one.
      choice: index of the choice, folded into the random stream.
      cache_salt: requests share cached prefixes only with requests of the same salt.
      arrival: seconds on the monotonic clock.
      biases: what is added to logits, at most `MAX_BIASES` entries; those of one id add up, so minus infinity stays.
      constraint: which tokens may be sampled; each sequence follows a copy of its own.
      priority: lower ones go first, and are preempted last.
      forced_token_ids: a script for tests: these are "sampled" one after another, then an end-of-sequence id; logits are computed all the same.
      shown_token_ids: special tokens that are text although `params.skip_special_tokens`.
    """

    id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
    seed: int = 0
    choice: int = 0
    cache_salt: str = ""
    arrival: float = field(default_factory=time.monotonic)
    biases: tuple[Bias, ...] = ()
    constraint: Constraint | None = None
    priority: int = 0
    forced_token_ids: tuple[int, ...] = ()
    shown_token_ids: frozenset[int] = frozenset()


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of one generated token: its own, and of the most probable alternatives in falling order."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """When a request passed the stations of its life, seconds on the monotonic clock.

    Attributes:
      admitted: first got a slot; None for one that ended in the queue.
      first_token, last_token: the host knew its first and its last token so far; None without any.
      num_preemptions: how often it lost its pages.
      num_prompt_computed: prompt tokens that were computed, not taken from the prefix cache.
    """

    arrival: float
    admitted: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    num_preemptions: int = 0
    num_prompt_computed: int = 0


class TokenOutput(msgspec.Struct, array_like=True):  # one is made per token, and crosses from one process to another
    """What one launch of the engine brought one request. Nobody changes it.

    Attributes:
      request_id: which request.
      token_ids: new tokens, in order; empty only on an abort or an error.
      logprobs: one entry per new token when the request asked for them, else None.
      finish_reason: set on the last output of a request.
      stop_token_id: the id of `stop_token_ids` that ended it; None for an end-of-sequence id.
      ended_by_token: the last token is a stop or end-of-sequence token (its text is not shown by default).
      num_cached_tokens: prompt tokens taken from the prefix cache.
      error: what went wrong, when finish_reason is ERROR.
      prompt_logprobs: with the first token, when asked for: an entry per prompt token, None for the first one.
      timing: with the first token and with the last output of a request.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    ended_by_token: bool = False
    num_cached_tokens: int = 0
    error: str | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    timing: Timing | None = None
