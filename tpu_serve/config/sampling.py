"""What requests that do not say get, and what log-probabilities they may ask for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tpu_serve.option import ConfigError, check_choices, check_types, option

DEFAULTS: Mapping[str, str] = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "min_new_tokens": "min_tokens",
    "min_tokens": "min_tokens",
}
"""Sampling defaults that can be set, by the names of generation_config.json and of requests, and the request's name."""
MOST_LOGPROBS = 20
"""The compiled step has room for this many alternatives per token."""


@dataclass(frozen=True)
class SamplingOptions:
    """Defaults and limits of sampling."""

    generation_config: str = option(
        "auto",
        "'auto' takes sampling defaults from the model's generation_config.json, 'vllm' takes none; its end-of-sequence ids hold either way",
        choices=("auto", "vllm"),
    )
    override_generation_config: dict[str, Any] = option(
        {},
        f"JSON object of sampling defaults, laid over those of --generation-config: {', '.join(DEFAULTS)}",
        metavar="JSON",
    )
    max_logprobs: int = option(
        MOST_LOGPROBS,
        f"most log-probabilities of alternatives per token that a request may ask for, at most {MOST_LOGPROBS}",
    )
    logprobs_mode: str = option(
        "raw_logprobs",
        "what log-probabilities are of: the model's own distribution, or the one that tokens are drawn from, after biases, constraints, "
        "penalties, temperature and filters; '..._logits' are not normalised",
        choices=("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"),
    )

    def __post_init__(self) -> None:
        check_types(self)
        check_choices(self)
        if not 0 <= self.max_logprobs <= MOST_LOGPROBS:
            raise ConfigError(f"--max-logprobs must be between 0 and {MOST_LOGPROBS}, got {self.max_logprobs}.")
        for name in self.override_generation_config:
            if name not in DEFAULTS:
                raise ConfigError(
                    f"--override-generation-config cannot set {name!r}; what it can set is {', '.join(DEFAULTS)}."
                )

    @property
    def overrides(self) -> dict[str, Any]:
        """Values of `override_generation_config` by the names of requests; None takes the model's default away."""
        return {DEFAULTS[name]: value for name, value in self.override_generation_config.items()}
