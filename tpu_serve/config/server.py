"""How the HTTP endpoint serves."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    api_key_file: str | None = option(None, "file with one such key per line", metavar="FILE")
    metrics_without_key: bool = option(False, "answer /metrics without an API key too")
    uds: str | None = option(None, "Unix socket to listen on, instead of --host and --port", metavar="PATH")
    root_path: str = option("", "path under which a proxy shows this server, such as /llm", metavar="PATH")
    ssl_keyfile: str | None = option(None, "PEM file with the private key; needs --ssl-certfile", metavar="FILE")
    ssl_certfile: str | None = option(None, "PEM file with the certificate: serves https", metavar="FILE")
    ssl_ca_certs: str | None = option(
        None, "PEM file with the authorities that clients' certificates must come from", metavar="FILE"
    )
    ssl_cert_reqs: int | None = option(
        None, "clients' certificates: 0 none, 1 optional, 2 required; 2 with --ssl-ca-certs", metavar="N"
    )
    allowed_origins: tuple[str, ...] = option(
        (), "origins whose pages a browser lets call this server, as words or one JSON list; any when left out"
    )
    allowed_methods: tuple[str, ...] = option((), "methods that such pages may use; any when left out")
    allowed_headers: tuple[str, ...] = option((), "request headers that such pages may send; any when left out")
    allow_credentials: bool = option(False, "let such pages send cookies")
    enable_request_id_headers: bool = option(True, "send X-Request-Id with every response")
    disable_fastapi_docs: bool = option(False, "leave out /docs and /openapi.json")
    enable_tokenizer_info_endpoint: bool = option(False, "answer /tokenizer_info with the model's tokenizer settings")
    profile_dir: str | None = option(
        None, "folder for traces of /start_profile and /stop_profile, which need it", metavar="DIR"
    )
    chat_template: str | None = option(
        None, "file with a jinja2 chat template that replaces the model's", metavar="FILE"
    )
    trust_request_chat_template: bool = option(
        False, "let requests bring a chat template of their own; a template is a program"
    )
    default_chat_template_kwargs: dict[str, Any] = option(
        {},
        "JSON object of chat template variables that requests may override with chat_template_kwargs",
        metavar="JSON",
    )
    reasoning_parser: str = option(
        "auto",
        "how reasoning is told from the answer: auto goes by the model, none leaves it in the text",
        metavar="NAME",
    )
    tool_call_parser: str = option(
        "auto",
        "how calls of tools are found in the answer: auto goes by the model, none leaves them in the text",
        metavar="NAME",
    )
    enable_auto_tool_choice: bool = option(
        True, "let the model decide whether it calls a tool; without it tools need a tool_choice that forces a call"
    )
    reasoning_content: bool = option(True, "send reasoning under its older name reasoning_content as well")
    strict_fields: bool = option(
        False, "answer 400 to unknown request fields instead of naming them in a response header"
    )
    stream_interval: int = option(
        1, "tokens that a chunk of a stream has at least; the first and the last one never wait"
    )
    enable_force_include_usage: bool = option(
        False, "put the usage on every chunk of every stream and at its end, asked for or not"
    )
    enable_scripted_output: bool = option(
        False, "for tests: let requests say with scripted_token_ids what the model is to answer"
    )
    max_request_bytes: int = option(32 * 2**20, "largest request body (k, m, g suffixes allowed)")
    body_timeout: float = option(60.0, "seconds that a request's body may take to arrive", metavar="SECONDS")
    h11_max_incomplete_event_size: int = option(2**16, "most bytes of a request's headers", metavar="BYTES")
    h11_max_header_count: int = option(256, "most headers of a request", metavar="N")
    queue_full_status: int = option(503, "status of requests refused because too many wait: 503 or 429")
    sse_keep_alive_interval: float = option(
        0.0, "seconds without a chunk after which a stream gets a comment line, so that proxies keep it; 0 for none"
    )
    shutdown_timeout: float = option(30.0, "seconds that running requests get to finish after SIGTERM")
    log_level: str = option("info", "least severe messages shown", choices=("debug", "info", "warning", "error"))
    log_stats_interval: float = option(
        10.0, "seconds between log lines with throughput and load while there is work; 0 for none"
    )
    disable_log_stats: bool = option(False, "write no such lines, as --log-stats-interval 0; /metrics stays")
    log_format: str = option(
        "text", "how log lines look: text, or json for one object a line", choices=("text", "json")
    )
    disable_access_log: bool = option(
        False, "write no line for each HTTP request", aliases=("--disable-uvicorn-access-log",)
    )
    disable_access_log_for_endpoints: tuple[str, ...] = option(
        ("/health", "/ping", "/metrics", "/load"),
        "paths whose requests are logged at --log-level debug only",
        metavar="PATH",
    )
    uvicorn_log_level: str | None = option(
        None,
        "least severe messages shown of the HTTP server, access lines included; --log-level when left out",
        choices=("debug", "info", "warning", "error", "critical"),
    )
    enable_log_requests: bool = option(False, "log every request's id, sizes and outcome")
    max_log_len: int = option(0, "characters of a prompt that --enable-log-requests shows; 0 for none of its text")
    metrics_prefix: str = option(
        "vllm", "prefix under which /metrics repeats what it says as tpu_serve:…; tpu_serve for no repetition"
    )
    otlp_traces_endpoint: str | None = option(
        None, "where to send a trace of every request, as in http://localhost:4318/v1/traces", metavar="URL"
    )

    def __post_init__(self) -> None:
        check_choices(self)
        check_at_least(self, 1, "max_request_bytes", "stream_interval", "h11_max_header_count")
        check_at_least(self, 1024, "h11_max_incomplete_event_size")
        for name in ("allowed_origins", "allowed_methods", "allowed_headers"):
            object.__setattr__(self, name, _words(name, getattr(self, name)))
        self._check_ssl()
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigError(f"--root-path must start with / and not end with it, got {self.root_path!r}.")
        if self.queue_full_status not in (429, 503):
            raise ConfigError(f"--queue-full-status must be 429 or 503, got {self.queue_full_status}.")
        if not self.body_timeout > 0:
            raise ConfigError(f"--body-timeout must be positive, got {self.body_timeout}.")
        if not self.sse_keep_alive_interval >= 0:
            raise ConfigError(f"--sse-keep-alive-interval must not be negative, got {self.sse_keep_alive_interval}.")
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
        self._check_logs()

    def _check_logs(self) -> None:
        paths = tuple(path for word in self.disable_access_log_for_endpoints for path in word.split(",") if path)
        object.__setattr__(self, "disable_access_log_for_endpoints", paths)
        for path in paths:
            if not path.startswith("/"):
                raise ConfigError(f"--disable-access-log-for-endpoints takes paths such as /health, got {path!r}.")
        check_at_least(self, 0, "max_log_len")
        if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", self.metrics_prefix):
            raise ConfigError(f"--metrics-prefix must be letters, digits and _, got {self.metrics_prefix!r}.")
        if self.otlp_traces_endpoint is not None and not re.match(r"https?://[^/]", self.otlp_traces_endpoint):
            raise ConfigError(
                f"--otlp-traces-endpoint must be an address as in http://localhost:4318/v1/traces, got {self.otlp_traces_endpoint!r}."
            )

    def _check_ssl(self) -> None:
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ConfigError("--ssl-keyfile needs --ssl-certfile, the certificate that belongs to the key.")
        if self.ssl_certfile is None and (self.ssl_ca_certs is not None or self.ssl_cert_reqs is not None):
            raise ConfigError("--ssl-ca-certs and --ssl-cert-reqs need --ssl-certfile, which switches https on.")
        if self.ssl_cert_reqs not in (None, 0, 1, 2):
            raise ConfigError(f"--ssl-cert-reqs must be 0, 1 or 2, got {self.ssl_cert_reqs}.")
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise ConfigError(f"--ssl-cert-reqs {self.ssl_cert_reqs} needs --ssl-ca-certs to check certificates by.")
        if self.ssl_ca_certs is not None and self.ssl_cert_reqs == 0:
            raise ConfigError("--ssl-ca-certs has no use with --ssl-cert-reqs 0: leave one of them out.")

    @property
    def api_keys(self) -> frozenset[str]:
        """Every key that opens the server; nobody needs one when there is none.

        Raises:
          ConfigError: the file of keys cannot be used.
        """
        from_environment = os.environ.get("TPU_SERVE_API_KEY")
        return frozenset([*self.api_key, *([from_environment] if from_environment else ()), *self._keys_of_file()])

    def _keys_of_file(self) -> list[str]:
        if self.api_key_file is None:
            return []
        try:
            lines = Path(self.api_key_file).expanduser().read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise ConfigError(f"--api-key-file {self.api_key_file} cannot be read: {why}.") from None
        keys = [line.strip() for line in lines if line.strip()]
        if not keys:
            raise ConfigError(f"--api-key-file {self.api_key_file} holds no key: everyone could use the server.")
        return keys


def _words(name: str, values: tuple[str, ...]) -> tuple[str, ...]:
    """Words as they are; one JSON list, as other servers' command lines have it, taken apart."""
    if len(values) != 1 or not values[0].lstrip().startswith("["):
        return values
    try:
        listed = json.loads(values[0])
    except ValueError:
        listed = None
    if not isinstance(listed, list) or not all(isinstance(word, str) for word in listed):
        raise ConfigError(f"--{name.replace('_', '-')} must be words or a JSON list of strings, got {values[0]!r}.")
    return tuple(listed)
