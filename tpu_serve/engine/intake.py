"""From what a user asked to engine requests: checks against the model, limits, seeds, one request per choice."""

from __future__ import annotations

import dataclasses
import operator
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tpu_serve.constraint.both import combine
from tpu_serve.constraint.words import AllowedIds, BannedSequences
from tpu_serve.engine.biases import banned_sequences, biases_of
from tpu_serve.request import MAX_LOGPROBS, Bias, Constraint, InvalidRequest, Request, SamplingParams
from tpu_serve.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What the world outside the engine may know of the model.

    Attributes:
      name: the folder or hub id it came from.
      architecture: class name from config.json.
      max_model_len: longest sequence, prompt and answer together, tokens.
      vocab_size: rows of the embedding; prompt ids must be below.
      eos_token_ids: every end-of-sequence id.
      default_params: sampling defaults from generation_config.json, by `SamplingParams` name.
      num_params: weights, counted once.
      max_num_queued: most requests that may wait.
      max_num_queued_tokens: most prompt tokens that they may have together; None for any number.
      max_logprobs: most alternatives per token that a request may ask for.
      scheduling_policy: "fcfs", or "priority" where requests may bring one.
    """

    name: str
    architecture: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    default_params: Mapping[str, Any] = field(default_factory=dict)
    num_params: int = 0
    max_num_queued: int = 1024
    max_num_queued_tokens: int | None = None
    max_logprobs: int = MAX_LOGPROBS
    scheduling_policy: str = "fcfs"


class Intake:
    """Makes engine requests. One per engine: unseeded requests draw their seeds from its generator.

    Args:
      tokenizer: reads bad_words; a request with some is refused without one.
    """

    def __init__(self, info: ModelInfo, seed: int = 0, tokenizer: Tokenizer | None = None):
        self.info, self._tokenizer = info, tokenizer
        self._seeds = random.Random(seed)

    def params(self, **given: Any) -> SamplingParams:
        """Sampling parameters over the model's defaults; None counts as not given.

        Raises:
          InvalidRequest: a value is out of range.
        """
        sent = {name: value for name, value in given.items() if value is not None}
        values = {**self.info.default_params, **sent}
        if "min_tokens" not in sent and isinstance(longest := sent.get("max_tokens"), int):
            values["min_tokens"] = min(values.get("min_tokens", 0), max(0, longest))  # nobody is blamed for a default
        return SamplingParams(**values)

    def requests(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        cache_salt: str = "",
        param: str = "prompt",
        priority: int = 0,
        constraint: Constraint | None = None,
        forced_token_ids: Sequence[int] = (),
        shown_token_ids: Iterable[int] = (),
    ) -> list[Request]:
        """One request per choice, with ids `request_id` and `request_id#1`, `#2`, ….

        Args:
          param: name of the field that held the prompt, for messages.
          priority: lower ones go first; needs the policy "priority" unless it is 0.
          constraint: which tokens may be sampled, besides what `params` allow. Not to be used elsewhere afterwards.
          forced_token_ids: what every choice "samples", whatever else is allowed; see `Request`.
          shown_token_ids: special tokens that are text all the same.

        Raises:
          InvalidRequest: the prompt is empty, too long or has an id outside the vocabulary, or something else does not fit the model; the
            message and `param` say what.
        """
        info = self.info
        if len(prompt_token_ids) >= info.max_model_len:
            raise InvalidRequest(
                param,
                f"This model's maximum context length is {info.max_model_len} tokens. However, your prompt contains "
                f"{len(prompt_token_ids)} input tokens, which leaves no room for an answer. Shorten the prompt or start the server with a larger --max-model-len.",
                "context_length_exceeded",
            )
        prompt = self._known(param, prompt_token_ids)
        if not prompt:
            raise InvalidRequest(param, "The prompt is empty: at least one token is needed.", "empty_prompt")
        if info.max_num_queued_tokens is not None and len(prompt) > info.max_num_queued_tokens:
            raise InvalidRequest(
                param,
                f"The prompt has {len(prompt)} tokens, more than the {info.max_num_queued_tokens} that may ever wait "
                f"(--max-num-queued-tokens).",
                "prompt_exceeds_queue",
            )
        self._check_ids(params)
        self._check_priority(priority)
        self._check_logprobs(params)
        forced = self._known("scripted_token_ids", forced_token_ids)
        biases, constraint = self._limits(params, constraint)
        if forced:
            constraint = None  # a script says what comes, whatever is allowed
        room = info.max_model_len - len(prompt)
        max_tokens = min(params.max_tokens or room, room)
        # What does not fit the context any more is clipped, as the length is.
        params = dataclasses.replace(params, max_tokens=max_tokens, min_tokens=min(params.min_tokens, max_tokens))
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(63)
        return [
            Request(
                id=request_id if choice == 0 else f"{request_id}#{choice}",
                prompt_token_ids=prompt,
                params=params,
                eos_token_ids=info.eos_token_ids,
                seed=seed,
                choice=choice,
                cache_salt=cache_salt,
                biases=biases,
                constraint=constraint,
                priority=priority,
                forced_token_ids=forced,
                shown_token_ids=frozenset(shown_token_ids),
            )
            for choice in range(params.n)
        ]

    def _known(self, param: str, token_ids: Sequence[int]) -> tuple[int, ...]:
        """The ids as Python's integers, all of which the model has."""
        try:
            known = tuple(map(operator.index, token_ids))  # numpy's integers too
        except TypeError:
            raise InvalidRequest(param, "Token ids must be integers.", "invalid_type") from None
        for token_id in known:
            if not 0 <= token_id < self.info.vocab_size:
                raise InvalidRequest(
                    param,
                    f"Token id {token_id} is out of vocabulary: ids must be in [0, {self.info.vocab_size}).",
                    "out_of_vocabulary",
                )
        return known

    def _check_ids(self, params: SamplingParams) -> None:
        self._known("stop_token_ids", params.stop_token_ids)
        self._known("logit_bias", [token_id for token_id, _ in params.logit_bias])
        self._known("allowed_token_ids", params.allowed_token_ids or ())

    def _check_priority(self, priority: int) -> None:
        if not -(2**63) <= priority < 2**63:
            raise InvalidRequest("priority", f"priority must be a signed 64-bit integer, got {priority}.")
        if priority and self.info.scheduling_policy != "priority":
            raise InvalidRequest(
                "priority",
                f"priority = {priority} has no effect with --scheduling-policy {self.info.scheduling_policy}: leave it out, or start the "
                f"server with --scheduling-policy priority.",
                "unsupported_parameter",
            )

    def _check_logprobs(self, params: SamplingParams) -> None:
        for name, what in (("logprobs", "sample"), ("prompt_logprobs", "prompt")):
            asked: int | None = getattr(params, name)
            if asked is not None and asked > self.info.max_logprobs:
                raise InvalidRequest(
                    name,
                    f"Requested {what} logprobs of {asked}, which is greater than max allowed: {self.info.max_logprobs}.",
                )

    def _limits(
        self, params: SamplingParams, constraint: Constraint | None
    ) -> tuple[tuple[Bias, ...], Constraint | None]:
        """What is added to logits, and which tokens may come."""
        size = self.info.vocab_size
        sequences: list[tuple[int, ...]] = []
        if params.bad_words:
            if self._tokenizer is None:
                raise InvalidRequest("bad_words", "bad_words cannot be read without a tokenizer.")
            # A tokenizer may know ids that the model lacks; those never come.
            sequences = [
                sequence for sequence in banned_sequences(params.bad_words, self._tokenizer) if max(sequence) < size
            ]
        biases = biases_of(
            params, self.info.eos_token_ids, [sequence[0] for sequence in sequences if len(sequence) == 1]
        )
        longer = [sequence for sequence in sequences if len(sequence) > 1]
        return biases, combine(
            constraint,
            None if params.allowed_token_ids is None else AllowedIds(params.allowed_token_ids, size),
            BannedSequences(longer, size) if longer else None,
        )
