"""Calls of tools as plain JSON, for models whose own form is not known: what a forced call looks like then."""

from __future__ import annotations

from tpu_serve.parsing.events import Event
from tpu_serve.parsing.hermes import CallObject
from tpu_serve.parsing.parser import CallParser
from tpu_serve.parsing.reader import Steps


class JsonCalls(CallParser):
    """The whole text is `[{"name": "f", "parameters": {…}}, …]` or one such object; anything else is content."""

    def begin(self, prompt_end: str) -> list[Event]:
        """Nothing: calls of this form begin with the answer, whatever the prompt has written in front of it."""
        return []

    def _program(self) -> Steps[None]:
        reader = self._reader
        reader.record()
        yield from reader.spaces()
        is_list = yield from reader.skip("[")
        while True:
            if not (yield from CallObject(self).read()):
                break
            reader.recorded_text()
            reader.record()
            yield from reader.spaces()
            if not is_list or not (yield from reader.skip(",")):
                break
        yield from reader.skip("]")
        rest = reader.recorded_text()
        if rest.strip() != "]":
            self._content(rest)
        yield from reader.until((), self._content)
