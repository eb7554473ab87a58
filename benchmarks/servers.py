"""How this server and others are started on one checkpoint, on the CPU, and what they are asked."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CONTEXT = 2048
"""Tokens of a sequence, prompt and answer."""
MOST_AT_ONCE = 64
OURS = "tpu-serve"


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A server.

    Attributes:
      command: its words for (program, folder of the model, port).
      model: what it is called in requests, for a folder.
      environment: laid over that of this process.
      fields: of every request, so that answers go on to their full length, for a number of tokens.
    """

    name: str
    command: Callable[[str, Path, int], Sequence[str]]
    model: Callable[[Path], str] = str
    environment: Mapping[str, str] = field(default_factory=dict)
    fields: Callable[[int], Mapping[str, Any]] = lambda output_len: {"ignore_eos": True}


def gguf_of(folder: Path) -> Path:
    return folder.with_suffix(".gguf")


def _ours(program: str, folder: Path, port: int) -> Sequence[str]:
    return [
        program, "serve", str(folder), "--host", "127.0.0.1", "--port", str(port), "--max-model-len", str(CONTEXT),
        "--max-num-seqs", str(MOST_AT_ONCE), "--no-enable-prefix-caching",
    ]  # fmt: skip


def _vllm(program: str, folder: Path, port: int) -> Sequence[str]:
    return [
        program, "serve", str(folder), "--host", "127.0.0.1", "--port", str(port), "--max-model-len", str(CONTEXT),
        "--max-num-seqs", str(MOST_AT_ONCE), "--no-enable-prefix-caching",
    ]  # fmt: skip


def _transformers(program: str, folder: Path, port: int) -> Sequence[str]:
    return [
        program, "serve", str(folder), "--continuous-batching", "--host", "127.0.0.1", "--port", str(port), "--device", "cpu",
        "--dtype", "bfloat16", "--cb-block-size", "32", "--cb-num-blocks", str(MOST_AT_ONCE * CONTEXT // 32 // 4), "--cb-max-batch-tokens", "1024",
    ]  # fmt: skip


def _llama(program: str, folder: Path, port: int) -> Sequence[str]:
    return [
        program, "--model", str(gguf_of(folder)), "--host", "127.0.0.1", "--port", str(port), "--parallel", str(MOST_AT_ONCE),
        "--ctx-size", str(MOST_AT_ONCE * CONTEXT), "--cache-ram", "0", "--no-webui",
    ]  # fmt: skip


def _no_end(output_len: int) -> Mapping[str, Any]:
    """transformers has no `ignore_eos`: a generation configuration without an end takes its place."""
    return {"generation_config": json.dumps({"max_new_tokens": output_len, "do_sample": False, "eos_token_id": -1})}


PEERS = {
    peer.name: peer
    for peer in (
        Peer(name=OURS, command=_ours),
        Peer(name="vllm", command=_vllm, environment={"VLLM_CPU_KVCACHE_SPACE": "2"}),
        Peer(name="transformers", command=_transformers, fields=_no_end),
        Peer(name="llama.cpp", command=_llama, fields=lambda output_len: {"ignore_eos": True, "cache_prompt": False}),
    )
}
DEFAULT_PROGRAM = str(Path(sys.executable).with_name("tpu-serve"))
