"""Which tokens' log-probabilities belong to the words of an answer, and not to its reasoning, its calls or the marks between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tpu_serve.request import TokenLogprobs


class TextLogprobs:
    """Gives every piece of text the tokens that it was made of.

    Args:
      token_bytes: of a token id.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]):
        self._token_bytes = token_bytes
        self._held: list[tuple[TokenLogprobs, bytes]] = []

    def see(self, entries: Sequence[TokenLogprobs]) -> None:
        """Tokens whose text comes now or later."""
        self._held += [(entry, self._token_bytes(entry.token_id)) for entry in entries]

    def take(self, text: str) -> list[TokenLogprobs]:
        """The tokens of the text that comes next; those before it were of marks. All there are where its bytes are not found."""
        data, raw = text.encode(), b"".join(part for _, part in self._held)
        # A mark comes before the text, and may look like it.
        start = 0 if raw.startswith(data) else raw.rfind(data)
        if start < 0:
            start, end = 0, len(raw)
        else:
            end = start + len(data)
        taken: list[TokenLogprobs] = []
        place = num_done = 0
        for entry, part in self._held:
            if place >= end:
                break
            place += len(part)
            num_done += 1
            if place > start:
                taken.append(entry)
        del self._held[:num_done]
        return taken
