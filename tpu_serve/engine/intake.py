"""From what a user asked to engine requests: checks against the model, limits, seeds, one request per choice."""

from __future__ import annotations

import dataclasses
import operator
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tpu_serve.request import InvalidRequest, Request, SamplingParams


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
    """

    name: str
    architecture: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    default_params: Mapping[str, Any] = field(default_factory=dict)
    num_params: int = 0
    max_num_queued: int = 1024


class Intake:
    """Makes engine requests. One per engine: unseeded requests draw their seeds from its generator."""

    def __init__(self, info: ModelInfo, seed: int = 0):
        self.info = info
        self._seeds = random.Random(seed)

    def params(self, **given: Any) -> SamplingParams:
        """Sampling parameters over the model's defaults; None counts as not given.

        Raises:
          InvalidRequest: a value is out of range.
        """
        values = {**self.info.default_params, **{name: value for name, value in given.items() if value is not None}}
        return SamplingParams(**values)

    def requests(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        cache_salt: str = "",
        param: str = "prompt",
    ) -> list[Request]:
        """One request per choice, with ids `request_id` and `request_id#1`, `#2`, ….

        Args:
          param: name of the field that held the prompt, for messages.

        Raises:
          InvalidRequest: the prompt is empty, too long or has an id outside the vocabulary, or a stop id is outside it.
        """
        info = self.info
        try:
            prompt = tuple(map(operator.index, prompt_token_ids))  # numpy's integers too
        except TypeError:
            raise InvalidRequest(param, "Token ids must be integers.", "invalid_type") from None
        if not prompt:
            raise InvalidRequest(param, "The prompt is empty: at least one token is needed.", "empty_prompt")
        for token_id in prompt:
            if not 0 <= token_id < info.vocab_size:
                raise InvalidRequest(
                    param,
                    f"Token id {token_id} is out of vocabulary: ids must be in [0, {info.vocab_size}).",
                    "out_of_vocabulary",
                )
        if len(prompt) >= info.max_model_len:
            raise InvalidRequest(
                param,
                f"This model's maximum context length is {info.max_model_len} tokens. However, your prompt contains {len(prompt)} input "
                f"tokens, which leaves no room for an answer. Shorten the prompt or start the server with a larger --max-model-len.",
                "context_length_exceeded",
            )
        for token_id in params.stop_token_ids:
            if token_id >= info.vocab_size:
                raise InvalidRequest(
                    "stop_token_ids",
                    f"Token id {token_id} is out of vocabulary: ids must be in [0, {info.vocab_size}).",
                    "out_of_vocabulary",
                )
        room = info.max_model_len - len(prompt)
        params = dataclasses.replace(params, max_tokens=min(params.max_tokens or room, room))
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
            )
            for choice in range(params.n)
        ]
