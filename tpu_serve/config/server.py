"""How the HTTP endpoint serves."""

from __future__ import annotations

import os
from dataclasses import dataclass

from tpu_serve.option import ConfigError, check_at_least, check_choices, option


@dataclass(frozen=True)
class ServerConfig:
    """The HTTP endpoint."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 for every interface")
    port: int = option(8000, "port to listen on; 0 takes a free one")
    served_model_name: tuple[str, ...] = option(
        (), "names that requests may use for the model; the first one is echoed", metavar="NAME"
    )
    api_key: tuple[str, ...] = option(
        (), "key that requests must bring; may be repeated; also read from TPU_SERVE_API_KEY", metavar="KEY"
    )
    chat_template: str | None = option(
        None, "file with a jinja2 chat template that replaces the model's", metavar="FILE"
    )
    strict_fields: bool = option(
        False, "answer 400 to unknown request fields instead of naming them in a response header"
    )
    max_request_bytes: int = option(32 * 2**20, "largest request body (k, m, g suffixes allowed)")
    shutdown_timeout: float = option(30.0, "seconds that running requests get to finish after SIGTERM")
    log_level: str = option("info", "least severe messages shown", choices=("debug", "info", "warning", "error"))
    log_stats_interval: float = option(
        10.0, "seconds between log lines with throughput and load while there is work; 0 for none"
    )
    enable_log_requests: bool = option(False, "log every request's id, sizes and outcome (never its text)")

    def __post_init__(self) -> None:
        check_choices(self)
        check_at_least(self, 1, "max_request_bytes")
        if "" in self.api_key:
            raise ConfigError("--api-key must not be empty: everyone could send that key.")
        if not all(self.served_model_name):
            raise ConfigError("--served-model-name must not be empty.")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port must be between 0 and 65535, got {self.port}.")
        if not self.shutdown_timeout >= 0:
            raise ConfigError(f"--shutdown-timeout must not be negative, got {self.shutdown_timeout}.")
        if not self.log_stats_interval >= 0:
            raise ConfigError(f"--log-stats-interval must not be negative, got {self.log_stats_interval}.")

    @property
    def api_keys(self) -> frozenset[str]:
        from_environment = os.environ.get("TPU_SERVE_API_KEY")
        return frozenset(self.api_key) | (frozenset([from_environment]) if from_environment else frozenset())
