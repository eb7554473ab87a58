"""Which tokens the text of a response gets: each example cuts an answer into tokens and says what its texts are and whose they are."""

import pytest

from tpu_serve.request import TokenLogprobs
from tpu_serve.server.responses_logprobs import TextLogprobs

EXAMPLES: list[tuple[list[str], list[tuple[str, list[int]]]]] = [
    (["a", "b"], [("ab", [0, 1])]),
    (["a", "b"], [("a", [0]), ("b", [1])]),
    (["<think>", "t", "</think>", "t"], [("t", [3])]),  # and not the one before, which looks the same
    (["hm", "</think>", "\n\n", "yes"], [("yes", [3])]),
    (["Hi", " <b", ">", "STOP"], [("Hi <b>", [0, 1, 2])]),
    (["Hi there", "."], [("Hi", [0]), (".", [1])]),
    (["", "a", ""], [("a", [1])]),
    (["other", "words"], [("é", [0, 1])]),  # a text that no tokens are found for
    (["a", "<call>", "f", "</call>", "b"], [("a", [0]), ("f", [2]), ("b", [4])]),
]


@pytest.mark.parametrize(("tokens", "texts"), EXAMPLES)
def test_texts_get_the_tokens_that_they_are_made_of(tokens: list[str], texts: list[tuple[str, list[int]]]):
    reader = TextLogprobs(lambda token_id: tokens[token_id].encode())
    entries = [TokenLogprobs(place, -float(place), ()) for place in range(len(tokens))]
    seen = 0
    for text, places in texts:
        reader.see(entries[seen : places[-1] + 1])
        seen = max(seen, places[-1] + 1)
        if (text, places) == texts[-1]:
            reader.see(entries[seen:])
        assert [entry.token_id for entry in reader.take(text)] == places


def test_parts_of_a_character_belong_to_it():
    data = "é".encode()
    reader = TextLogprobs(lambda token_id: data[token_id : token_id + 1])
    reader.see([TokenLogprobs(place, -1.0, ()) for place in range(2)])
    assert [entry.token_id for entry in reader.take("é")] == [0, 1]
    assert reader.take("more") == []
