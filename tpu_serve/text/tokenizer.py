"""Text to token ids and back, for the tokenizer of a Hugging Face folder.

Decoding is defined here, once, on bytes: every token stands for some bytes, a text is their concatenation read as UTF-8, and each
maximal invalid piece of it reads as one U+FFFD. Decoding at once and piece by piece therefore agree by construction. For valid
UTF-8 the text is the `tokenizers` library's; for invalid byte-fallback runs that library gives one U+FFFD per byte of the whole run,
valid characters included, which no stream could know in time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from tpu_serve.config import ConfigError
from tpu_serve.request import InvalidRequest
from tpu_serve.text.longest_token import characters_per_token


class Tokenizer:
    """The tokenizer of one model. Never changes once made, so threads may share it.

    Attributes:
      vocab_size: highest token id plus one, added tokens included. The model's embedding is often wider.
      special_ids: ids of the special tokens, which `skip_special_tokens` leaves out of a text.
      special_tokens: text of the named special tokens that exist (`bos_token`, `eos_token`, `pad_token`, ...), for templates.
      characters_per_token: no text has fewer tokens than its characters divided by this; None where that cannot be said.
      settings: the folder's tokenizer_config.json, empty where there is none.
      chat_template_source: the folder's chat template, or its templates by name, or None.
      num_leading_spaces_dropped: spaces that a text loses at its very start (SentencePiece vocabularies write one there).
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: dict[str, str] | None = None,
        chat_template_source: str | dict[str, str] | None = None,
        settings: dict[str, Any] | None = None,
    ):
        """Owns `backend` from now on. Raises `ConfigError` for a decoder whose tokens do not stand for bytes."""
        backend.no_truncation()
        backend.no_padding()
        added = backend.get_added_tokens_decoder()
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.special_tokens = special_tokens or {}
        self.chat_template_source = chat_template_source
        self.settings = settings or {}
        self.characters_per_token = characters_per_token(backend)
        self._backend = backend
        self._decoder = _Decoder.read(json.loads(backend.decoder.__getstate__()) if backend.decoder else None)
        self.num_leading_spaces_dropped = self._decoder.num_leading_spaces
        # Filled on first use: a vocabulary holds up to 262,144 tokens and a server shows a fraction of them.
        self._bytes: dict[int, bytes] = {}
        self._whole_texts: dict[int, str | None] = {}
        if self._decoder.byte_level:
            # Added tokens are literal text, never written in the byte alphabet.
            self._bytes.update((token_id, token.content.encode()) for token_id, token in added.items())

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Reads tokenizer.json and, where present, tokenizer_config.json, special_tokens_map.json and the chat template files.

        Raises `ConfigError` naming the file when tokenizer.json is missing or a file is broken.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"{folder} has no tokenizer.json.")
        config = _read_json(folder / "tokenizer_config.json")
        special_tokens = _read_special_tokens(config, _read_json(folder / "special_tokens_map.json"))
        chat_template = _read_chat_template(folder, config)
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
            return cls(backend, special_tokens=special_tokens, chat_template_source=chat_template, settings=config)
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"{path} cannot be used: {error}") from error

    @property
    def bos_token(self) -> str | None:
        return self.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.special_tokens.get("eos_token")

    def token_id(self, text: str) -> int | None:
        """Id of the token spelled exactly `text` in the vocabulary, or None."""
        return self._backend.token_to_id(text)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with the special tokens (such as a leading BOS) that tokenizer.json adds, unless told not to.

        Special tokens written in the text are recognised. Raises `InvalidRequest` for text that is not valid Unicode.
        """
        try:
            # Not `encode`, which holds the interpreter's lock for as long as it takes, whatever thread it runs in.
            return self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids
        except TypeError as error:
            if not isinstance(text, str):
                raise
            raise InvalidRequest(None, "The text holds a lone surrogate, which is not valid Unicode.") from error

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids. Ids outside the vocabulary give no text."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        data = b"".join(self.token_bytes(token_id) for token_id in token_ids if token_id not in skipped)
        for _ in range(self.num_leading_spaces_dropped):
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def token_text(self, token_id: int) -> str:
        """A token shown alone, special ones too: its bytes as text, with U+FFFD where they are only part of a character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def whole_text(self, token_id: int) -> str | None:
        """The text of a token that is whole characters, whatever comes before and after it; None for one that is not."""
        try:
            return self._whole_texts[token_id]
        except KeyError:
            pass
        try:
            text = self.token_bytes(token_id).decode("utf-8")
        except UnicodeDecodeError:
            text = None
        if 0 <= token_id < self.vocab_size:
            self._whole_texts[token_id] = text
        return text

    def token_spelling(self, token_id: int) -> str:
        """A token as the vocabulary writes it (`Ġis` where it is byte-level), which no other one shares; "" outside of it."""
        return (self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, empty outside the vocabulary.

        Joined over a sequence they are the UTF-8 of its text, special tokens shown, before the leading space is dropped.
        """
        data = self._bytes.get(token_id)
        if data is None:
            token = self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
            if token is None:
                return b""
            data = self._bytes[token_id] = self._decoder.token_bytes(token)
        return data


@dataclass(frozen=True)
class _Decoder:
    """What the decoder of a tokenizer.json does to one token, and to the start of the text."""

    byte_level: bool = False
    byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    prefix: str = ""
    num_leading_spaces: int = 0

    @staticmethod
    def read(state: dict[str, Any] | None) -> _Decoder:
        if state is None:  # the library joins tokens with spaces then
            return _Decoder(prefix=" ", num_leading_spaces=1)
        byte_level, byte_fallback, fused, num_leading_spaces = False, False, False, 0
        replacements: list[tuple[str, str]] = []
        for step in state["decoders"] if state["type"] == "Sequence" else [state]:
            match step:
                case {"type": "ByteLevel"}:
                    byte_level = fused = True
                case {"type": "Fuse"}:
                    fused = True
                case {"type": "ByteFallback"} if not fused:
                    byte_fallback = True
                case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if not fused:
                    replacements.append((old, new))
                case {"type": "Metaspace", "replacement": str(old), "prepend_scheme": scheme} if not fused:
                    replacements.append((old, " "))
                    num_leading_spaces = 0 if scheme == "never" else 1
                case {"type": "Strip", "content": " ", "start": int(start), "stop": 0} if fused:
                    num_leading_spaces = start
                case _:
                    raise ConfigError(f"the decoder step {json.dumps(step, ensure_ascii=False)} is not supported.")
        return _Decoder(byte_level, byte_fallback, tuple(replacements), "", num_leading_spaces)

    def token_bytes(self, token: str) -> bytes:
        for old, new in self.replacements:
            token = token.replace(old, new)
        if self.byte_fallback and re.fullmatch("<0x[0-9A-Fa-f]{2}>", token):
            return bytes([int(token[3:5], 16)])
        if self.byte_level and all(character in _BYTE_OF_CHARACTER for character in token):
            return bytes(_BYTE_OF_CHARACTER[character] for character in token)
        return (self.prefix + token).encode()


def _byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level BPE vocabularies, as introduced by GPT-2."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + index): byte for index, byte in enumerate(hidden)}


_BYTE_OF_CHARACTER = _byte_alphabet()


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8") if path.is_file() else None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    text = _read_text(path)
    try:
        value = {} if text is None else json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object.")
    return value


def _get(entry: object, name: str) -> object:
    return entry.get(name) if isinstance(entry, dict) else None


def _read_special_tokens(config: dict[str, Any], special_tokens_map: dict[str, Any]) -> dict[str, str]:
    """Older folders keep the named special tokens in a file of their own; tokenizer_config.json wins."""
    texts: dict[str, str] = {}
    for name, entry in [*special_tokens_map.items(), *config.items()]:
        text = entry if isinstance(entry, str) else _get(entry, "content")
        if name.endswith("_token") and isinstance(text, str):
            texts[name] = text
    return texts


def _read_chat_template(folder: Path, config: dict[str, Any]) -> str | dict[str, str] | None:
    default = _read_text(folder / "chat_template.jinja")
    if default is not None:
        others = {
            path.stem: _read_text(path) or "" for path in sorted(folder.glob("additional_chat_templates/*.jinja"))
        }
        return {**others, "default": default} if others else default
    source = _read_json(folder / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(source, list):
        source = {str(_get(entry, "name")): _get(entry, "template") for entry in source}
    if source is None or isinstance(source, str):
        return source
    if isinstance(source, dict) and all(isinstance(text, str) for text in source.values()):
        return source
    raise ConfigError(f"The chat template of {folder} must be a string or a list of objects with name and template.")
