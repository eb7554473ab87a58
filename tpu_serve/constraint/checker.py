"""A program that compiles grammars for the server, so that one that never ends or brings its process down brings down this one only.

It reads lines of JSON and answers each with one. The first line describes the vocabulary: `{"vocab_size", "special": {id: text}}`.
Each other is `{"grammar": Lark text, "translate": whether it may be GBNF}`, answered by `{"grammar": Lark text}` or `{"error": text}`.
Its vocabulary has the special tokens under their ids and, behind all others, one token per byte: what a grammar allows next does
not depend on the rest, and a step over few tokens shows whether anything can begin at all.

It imports nothing of the package: it starts in a moment, and needs little memory.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Sequence
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import any_to_lark

MAX_MEMORY_BYTES = 4 * 2**30
MAX_LEXER_STATES = 50_000
STACK_BYTES = 2**20
"""Less than threads of the server have: what passes here does not overflow there."""


class Tokens:
    """What llguidance asks of a tokenizer."""

    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], special: Sequence[int], eos: int):
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, special, eos

    def __call__(self, text: str) -> list[int]:
        raise NotImplementedError("grammars never force tokens")


def limits() -> LLParserLimits:
    """How much of time and memory one grammar may take in each of its steps."""
    return LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)


def _tokenizer(vocab_size: int, special: dict[str, str]) -> LLTokenizer:
    tokens = [b""] * vocab_size + [bytes([byte]) for byte in range(256)]
    for token_id, text in special.items():
        tokens[int(token_id)] = text.encode()
    end = len(tokens)
    tokens.append(b"<end>")
    ids = [*map(int, special), end]
    return LLTokenizer(TokenizerWrapper(Tokens(tokens, ids, end)), n_vocab=len(tokens), eos_token=end)


def _check(tokenizer: LLTokenizer, grammar: str, translate: bool, options: str) -> dict[str, str]:
    if translate:
        try:
            grammar = any_to_lark(grammar)
        except Exception as error:  # whatever the translator did not expect
            return {"error": str(error) or "it is neither Lark nor GBNF"}
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(grammar + options), log_level=0, limits=limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
        if matcher.is_error():
            return {
                "error": "no text can begin as it asks" if "NoExtension" in matcher.get_error() else matcher.get_error()
            }
        return {"grammar": grammar}
    return {"error": matcher.get_error()}


def _limit_memory() -> None:
    try:
        import resource
    except ImportError:  # not on every system, and only a second line of defence
        return
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _serve() -> None:
    first: dict[str, Any] = json.loads(sys.stdin.buffer.readline())
    tokenizer = _tokenizer(first["vocab_size"], first["special"])
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        answer = _check(tokenizer, asked["grammar"], asked["translate"], first["options"])
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    _limit_memory()
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve)
    thread.start()
    thread.join()
