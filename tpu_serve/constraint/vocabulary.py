"""The tokens of a model as grammars see them."""

from __future__ import annotations

from collections.abc import Iterable

from llguidance import LLTokenizer, TokenizerWrapper

from tpu_serve.constraint.checker import Tokens
from tpu_serve.constraint.masks import mask_of, num_mask_bytes
from tpu_serve.text.tokenizer import Tokenizer


class GrammarVocabulary:
    """What the tokens of a vocabulary stand for in a grammar: the very bytes that the tokenizer makes text of.

    Special tokens and those that end a sequence are no text: a grammar has them only where it names them. Rows of the embedding
    without a token are never allowed. Making one takes a second or two for 150,000 tokens.

    Attributes:
      eos_token_ids: all that end a sequence.
      eos_mask: these and no others.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Iterable[int]):
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)
        self.eos_mask = mask_of(self.eos_token_ids, vocab_size)
        special = special_tokens(tokenizer, vocab_size, self.eos_token_ids)
        tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        for token_id, text in special.items():
            tokens[token_id] = text.encode()
        # The library needs an end to name; one behind all others serves where the model has none.
        ends = sorted(self.eos_token_ids) or [vocab_size]
        tokens += [b"<end>"] * (not self.eos_token_ids)
        wrapper = TokenizerWrapper(Tokens(tokens, sorted({*special, *ends}), ends[0]))
        self.backend = LLTokenizer(wrapper, n_vocab=len(tokens), eos_token=ends)

    def cut(self, mask: bytes) -> bytes:
        """A mask of the library, which has room for one more id than there are, as one of the model."""
        size, spare = num_mask_bytes(self.vocab_size), self.vocab_size % 8
        if self.eos_token_ids:
            return mask[:size]
        words = bytearray(mask[:size])
        if spare:
            words[self.vocab_size // 8] &= (1 << spare) - 1
        return bytes(words)


def special_tokens(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Iterable[int]) -> dict[int, str]:
    """Texts of the tokens that are no text in a grammar; a made-up name where the tokenizer has none."""
    return {
        token_id: tokenizer.token_text(token_id) or f"<|{token_id}|>"
        for token_id in sorted({*tokenizer.special_ids, *eos_token_ids})
        if token_id < vocab_size
    }
