"""What a request adds to logits: its logit_bias, and minus infinity where a token must not come."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

from tpu_serve.request import MAX_BAD_WORD_TOKENS, MAX_BIASES, Bias, InvalidRequest, SamplingParams
from tpu_serve.text.tokenizer import Tokenizer

FORBIDDEN = -math.inf
MAX_BAD_WORD_CHARACTERS = 32 * MAX_BAD_WORD_TOKENS


def biases_of(params: SamplingParams, eos_token_ids: Collection[int], banned: Iterable[int] = ()) -> tuple[Bias, ...]:
    """Entries for the device. A token has two where it is forbidden until `min_tokens` and biased throughout: they add up.

    Args:
      banned: ids that never come; a bias given to them is left out.

    Raises:
      InvalidRequest: they are more than `MAX_BIASES`.
    """
    never = sorted(set(banned))
    entries = [Bias(token_id, FORBIDDEN) for token_id in never]
    if params.min_tokens:
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
        entries += [Bias(token_id, FORBIDDEN, params.min_tokens) for token_id in sorted(ends.difference(never))]
    num_forbidden = len(entries)
    # Of an id that is given twice the last value counts, as in a JSON object.
    given = {token_id: value for token_id, value in params.logit_bias if token_id not in never}
    entries += [Bias(token_id, value) for token_id, value in given.items() if value]
    if len(entries) > MAX_BIASES:
        param = "logit_bias" if given else "stop_token_ids" if num_forbidden > len(never) else "bad_words"
        raise InvalidRequest(
            param,
            f"logit_bias ({len(given)} tokens), min_tokens with its stop tokens ({num_forbidden - len(never)}) and bad_words of a single "
            f"token ({len(never)}) together change {len(entries)} logits; at most {MAX_BIASES} can be changed.",
            "too_many_biases",
        )
    return tuple(entries)


def banned_sequences(bad_words: Sequence[str], tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Token ids that spell the words, with and without a space in front, each sequence once.

    Raises:
      InvalidRequest: they are too many tokens, or a word has none.
    """
    num_characters = sum(map(len, bad_words))
    if num_characters > MAX_BAD_WORD_CHARACTERS:  # making tokens of them would take a while
        raise InvalidRequest(
            "bad_words",
            f"bad_words comes to {num_characters} characters; at most {MAX_BAD_WORD_CHARACTERS} are allowed.",
        )
    sequences: dict[tuple[int, ...], None] = {}
    for word in bad_words:
        bare = word.lstrip(" ") or word
        for text in dict.fromkeys((bare, f" {bare}")):
            try:
                token_ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            except InvalidRequest as error:
                raise InvalidRequest("bad_words", error.message) from None
            if not token_ids:
                raise InvalidRequest("bad_words", "bad_words holds a text without any token.")
            sequences[token_ids] = None
    num_tokens = sum(map(len, sequences))
    if num_tokens > MAX_BAD_WORD_TOKENS:
        raise InvalidRequest(
            "bad_words", f"bad_words comes to {num_tokens} tokens; at most {MAX_BAD_WORD_TOKENS} are allowed."
        )
    return list(sequences)
