"""What a model's text turns out to be: its reasoning, its words, and calls of tools."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningText:
    text: str


@dataclass(frozen=True, slots=True)
class ContentText:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool is called. Its arguments follow, until the next call or the end."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the JSON text of the arguments of the call that started last."""

    text: str


Event = ReasoningText | ContentText | CallStart | CallArguments


def merged(events: Iterable[Event]) -> Iterator[Event]:
    """The same with pieces of one kind that follow one another joined, and no empty ones."""
    kind: type[ReasoningText | ContentText | CallArguments] | None = None
    texts: list[str] = []
    for event in events:
        if not isinstance(event, CallStart):
            if type(event) is not kind and event.text:
                if kind is not None:
                    yield kind("".join(texts))
                kind, texts = type(event), []
            texts.append(event.text)
            continue
        if kind is not None:
            yield kind("".join(texts))
        kind, texts = None, []
        yield event
    if kind is not None:
        yield kind("".join(texts))
