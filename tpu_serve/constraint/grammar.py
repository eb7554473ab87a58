"""The constraint of a compiled grammar."""

from __future__ import annotations

import re

from llguidance import LLMatcher

from tpu_serve.constraint.masks import is_allowed
from tpu_serve.constraint.vocabulary import GrammarVocabulary


class Grammar:
    """Tokens that may follow in a text of the grammar; every end-of-sequence id where the text may end, none elsewhere.

    Attributes:
      source: the grammar in Lark.
    """

    follows = True

    def __init__(self, matcher: LLMatcher, vocabulary: GrammarVocabulary, source: str):
        """Owns the matcher, which stands anywhere. Raises `ValueError` when nothing can follow there."""
        self._matcher = matcher
        self._vocabulary, self.source = vocabulary, source
        self._lineage = _Lineage()
        self.mask: bytes | None = None
        self.is_finished = False
        self._look()

    def accept(self, token_id: int) -> None:
        if self.mask is None or not is_allowed(self.mask, token_id):
            raise ValueError(f"Token {token_id} is not what the grammar allows there.")
        if token_id in self._vocabulary.eos_token_ids:
            self.is_finished, self.mask = True, self._vocabulary.eos_mask
        elif self._matcher.consume_token(token_id):
            self._look()
        else:
            raise self._lost()

    @property
    def is_spent(self) -> bool:
        """The library gave up on this one or a copy. They all share what it has learnt of the grammar, and the limit of that."""
        return self._lineage.is_spent

    def copy(self) -> Grammar:
        other = object.__new__(Grammar)
        other._matcher, other._vocabulary = self._matcher.deep_copy(), self._vocabulary
        other._lineage, other.source = self._lineage, self.source
        other.mask, other.is_finished = self.mask, self.is_finished
        return other

    def _look(self) -> None:
        self.mask = self._vocabulary.cut(self._matcher.compute_bitmask())
        if self._matcher.is_error():
            raise self._lost()
        self.is_finished = self._matcher.is_stopped() or self.mask == self._vocabulary.eos_mask

    def _lost(self) -> ValueError:
        self._lineage.is_spent = True
        return ValueError(f"The grammar cannot be followed any further: {short(self._matcher.get_error())}.")


class _Lineage:
    """What a grammar and its copies have in common."""

    is_spent = False


MAX_ERROR_CHARACTERS = 400
_PATTERN_ERROR = re.compile(r"regex parse error:.*\nerror: ([^\n]*)", re.DOTALL)


def short(error: str) -> str:
    """What the library says of a grammar, on one line, without the excerpt and the place in a text that the user never wrote."""
    if "NoExtension" in error:
        return "no token of the model's vocabulary can follow"
    pattern = _PATTERN_ERROR.search(error)
    if pattern:  # which repeats all of a pattern twice before it comes to the point
        return f"invalid pattern, {pattern[1].rstrip('. ')}"
    lines = error.split("\n   1 | ")[0].replace("<non-verbose/>", "").split("\n")
    text = " ".join(" ".join(line.split()) for line in lines if line.strip())
    if len(text) > MAX_ERROR_CHARACTERS:
        text = f"{text[: MAX_ERROR_CHARACTERS // 2]} … {text[-MAX_ERROR_CHARACTERS // 2 :]}"
    return text.rstrip(". ") or "it is too complex"
