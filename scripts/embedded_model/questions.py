"""The fixed list of questions by which the embedded model is scored. Unknown topics in it do not occur in training; everything else is drawn as
training text is, with another seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from text import ABOUT, TOOLS, json_person, tool_question
from words import ANIMALS, BEYOND, CAPITALS, COLORS, NAMES, OPPOSITES, TERMS, UNKNOWN_TOPICS, VERBS

SCORE_SEED = 2024


@dataclass(frozen=True)
class Question:
    """One question of the score.

    Attributes:
      kind: facts, sums, stories, json, tools or unknown.
      expected: the answer's text; for stories the name, for json the value, for tools (name, arguments).
    """

    kind: str
    text: str
    expected: Any
    tools: tuple[dict[str, Any], ...] = field(default=())


def questions() -> list[Question]:
    """The fixed list: every fact once, and a sample of everything that is made of parts."""
    r = random.Random(SCORE_SEED)
    asked = [
        *(
            Question("facts", f"What is the capital of {country}?", f"The capital of {country} is {city}.")
            for country, city in CAPITALS.items()
        ),
        *(Question("facts", f"What is {term}?", text) for term, text in TERMS.items()),
        *(
            Question("facts", f"What is the opposite of {one}?", f"The opposite of {one} is {other}.")
            for one, other in OPPOSITES
        ),
        *(
            Question("facts", f"What color is {thing}?", f"{thing[0].upper()}{thing[1:]} is {color}.")
            for thing, color in COLORS.items()
        ),
    ]
    pairs = r.sample([(a, b) for a in range(21) for b in range(21)], 60)
    asked += [Question("sums", f"What is {a} + {b}?", f"{a} + {b} = {a + b}") for a, b in pairs]
    for _ in range(30):
        who, kind = r.choice(NAMES), r.choice(ANIMALS)
        asked.append(Question("stories", f"Tell me a story about {who} the {kind}.", (who, kind)))
    for _ in range(40):
        asked.append(Question("json", *json_person(r)))
    for _ in range(40):
        text, name, arguments = tool_question(r)
        offered = [tool for tool in TOOLS if tool["function"]["name"] == name] + r.sample(TOOLS, 1)
        unique = tuple({tool["function"]["name"]: tool for tool in offered}.values())
        asked.append(Question("tools", text, (name, arguments), unique))
    asked += [Question("unknown", r.choice(ABOUT).format(topic), BEYOND) for topic in UNKNOWN_TOPICS]
    asked += [
        Question("unknown", f"How do I {r.choice(VERBS)} {thing}?", BEYOND)
        for thing in ("a kennel", "a stove", "a lute", "a tent", "curtains")
    ]
    return asked
