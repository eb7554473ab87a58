"""Random texts under a constraint, and small vocabularies to walk them in."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tpu_serve.constraint.compiler import GrammarCompiler, GrammarSpec
from tpu_serve.request import Constraint
from tpu_serve.text.tokenizer import Tokenizer

FIXTURES = Path(__file__).parent / "fixtures"
CLOSING = frozenset(b'"}]<|>')


class Model:
    """The vocabulary of a fixture and a compiler for it. Some rows behind the tokenizer's ids have no token."""

    def __init__(self, name: str, eos_token_ids: Sequence[int], num_spare: int = 13):
        self.name, self.eos = name, frozenset(eos_token_ids)
        self.tokenizer = Tokenizer.load(FIXTURES / name)
        self.vocab_size = self.tokenizer.vocab_size + num_spare
        self.pieces = [self.tokenizer.token_bytes(token_id) for token_id in range(self.vocab_size)]
        self.text_ids = [
            token_id
            for token_id, piece in enumerate(self.pieces)
            if piece and token_id not in self.tokenizer.special_ids and token_id not in self.eos
        ]
        self.compiler = GrammarCompiler(self.tokenizer, self.vocab_size, eos_token_ids)

    def allowed(self, constraint: Constraint) -> set[int]:
        """Read from the mask bit by bit."""
        assert constraint.mask is not None
        words = np.frombuffer(constraint.mask, "<u4")
        assert len(words) == (self.vocab_size + 31) // 32
        bits = words[:, None] >> np.arange(32, dtype=np.uint32) & 1
        return set(np.flatnonzero(bits).tolist())

    def walk(self, constraint: Constraint, seed: int, max_tokens: int = 600) -> tuple[list[int], bool]:
        """Random tokens, with a liking for those that bring an end nearer, and whether the end came."""
        generator = random.Random(seed)
        token_ids: list[int] = []
        while len(token_ids) < max_tokens:
            allowed = sorted(self.allowed(constraint))
            assert allowed, "nothing is allowed, and the text is not finished"
            choice = [i for i in allowed if i in self.eos] if generator.random() < 0.5 else []
            if not choice and generator.random() < 0.1 + len(token_ids) / max_tokens:
                choice = [i for i in allowed if self.pieces[i] and set(self.pieces[i]) <= CLOSING]
            token_id = generator.choice(choice or allowed)
            constraint.accept(token_id)
            if token_id in self.eos:
                return token_ids, True
            token_ids.append(token_id)
            if constraint.is_finished:
                return token_ids, True
        return token_ids, False

    def text(self, token_ids: Sequence[int]) -> str:
        return b"".join(self.pieces[token_id] for token_id in token_ids).decode("utf-8")

    def taken(self, spec: GrammarSpec, text: str) -> int:
        """How many characters a grammar takes of a text, in the tokens of the tokenizer; -1 for all and the end."""
        constraint = self.compiler.compile_now(spec, "form")
        so_far: list[int] = []
        for token_id in self.tokenizer.encode(text, add_special_tokens=False):
            if token_id not in self.allowed(constraint):
                return len(self.text(so_far))
            constraint.accept(token_id)
            so_far.append(token_id)
        assert self.text(so_far) == text
        return -1 if self.allowed(constraint) & self.eos else len(text)
