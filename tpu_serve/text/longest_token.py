"""The most characters that a token can stand for, to tell that a text is too long without tokenising it."""

from __future__ import annotations

import json
from typing import Any

import tokenizers
from tokenizers import pre_tokenizers

_COMPOSITION = {"NFC": 4, "NFKC": 4}
"""Characters of a text that a normaliser may write as one: the longest canonical decomposition of a character has four."""
_HARMLESS = frozenset({"Prepend", "NFD", "NFKD", "Lowercase"})
_KEEPING = frozenset({"ByteLevel", "Metaspace", "Digits", "UnicodeScripts"})


def characters_per_token(backend: tokenizers.Tokenizer) -> int | None:
    """No text has fewer tokens than its characters divided by this, rounded up; None where nothing can be said.

    Nothing can be said where unknown text becomes one token or none, and of tokenizers that drop parts of a text.
    """
    vocabulary = backend.get_vocab(with_added_tokens=True)
    pre_tokenizer = _state(backend.pre_tokenizer)
    if type(backend.model).__name__ != "BPE" or not _knows_every_byte(backend.model, pre_tokenizer, vocabulary):
        return None
    added = backend.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):  # takes any number of spaces with it
        return None
    shrinking = _shrinking(_state(backend.normalizer))
    if shrinking is None or not _keeps_everything(pre_tokenizer):
        return None
    return shrinking * max(map(len, vocabulary))


def _state(part: Any) -> dict[str, Any] | None:
    return None if part is None else json.loads(part.__getstate__())


def _knows_every_byte(model: Any, pre_tokenizer: dict[str, Any] | None, vocabulary: dict[str, int]) -> bool:
    if model.byte_fallback:
        return all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    steps = [] if pre_tokenizer is None else pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    is_byte_level = any(step["type"] == "ByteLevel" for step in steps)
    return is_byte_level and all(letter in vocabulary for letter in pre_tokenizers.ByteLevel.alphabet())


def _shrinking(normalizer: dict[str, Any] | None) -> int | None:
    """How many characters become one at most; None when that has no limit."""
    if normalizer is None:
        return 1
    match normalizer:
        case {"type": "Sequence", "normalizers": steps}:
            product = 1
            for step in steps:
                factor = _shrinking(step)
                if factor is None:
                    return None
                product *= factor
            return product
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            return max(1, -(-len(old) // len(new))) if new else None
        case {"type": str(name)} if name in _COMPOSITION:
            return _COMPOSITION[name]
        case {"type": str(name)} if name in _HARMLESS:
            return 1
    return None


def _keeps_everything(step: dict[str, Any] | None) -> bool:
    if step is None:
        return True
    if step["type"] == "Sequence":
        return all(_keeps_everything(part) for part in step["pretokenizers"])
    if step["type"] in ("Split", "Punctuation"):
        return step["behavior"] != "Removed"
    return step["type"] in _KEEPING
