"""The text that the embedded model is trained on: conversations made from the word lists of `words.py` and the sentences of this file, nothing
else."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from words import (
    ANIMALS,
    BEYOND,
    CAPITALS,
    COLOR_NAMES,
    COLORS,
    DAYS,
    FRUIT,
    LEGS,
    MOODS,
    NAMES,
    OBJECTS,
    OPPOSITES,
    PEOPLE,
    PLACES,
    SKIES,
    SOUNDS,
    TERMS,
    THINGS,
    TOPICS,
    VERBS,
    WHO,
)  # fmt: skip

Message = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """Messages as the chat template takes them.

    Attributes:
      thinks: False when the template is asked for an answer without thinking.
    """

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    thinks: bool = True


def _function(name: str, description: str, /, **properties: str) -> dict[str, Any]:
    schema = {key: {"type": kind} for key, kind in properties.items()}
    parameters = {"type": "object", "properties": schema, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


WEATHER = _function("get_weather", "The weather in a city", city="string")
TIME = _function("get_time", "The time in a city", city="string")
TIMER = _function("set_timer", "Starts a timer", minutes="integer")
MAIL = _function("send_message", "Sends a message to a person", name="string")
TOOLS = (WEATHER, TIME, TIMER, MAIL)


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _says(text: str, thought: str | None = None) -> Message:
    message: Message = {"role": "assistant", "content": text}
    if thought is not None:
        message["reasoning_content"] = thought
    return message


def _a(word: str) -> str:
    return ("an " if word[0] in "aeiou" else "a ") + word


# ---- facts ----------------------------------------------------------------------------------------------------------


def _capital(r: random.Random) -> tuple[str, str]:
    country = r.choice(list(CAPITALS))
    ask = r.choice(
        (
            "What is the capital of {}?",
            "Which city is the capital of {}?",
            "Tell me the capital of {}.",
            "capital of {}?",
        )
    )
    return ask.format(country), f"The capital of {country} is {CAPITALS[country]}."


def _country(r: random.Random) -> tuple[str, str]:
    country, city = r.choice(list(CAPITALS.items()))
    return f"{city} is the capital of which country?", f"{city} is the capital of {country}."


def _term(r: random.Random) -> tuple[str, str]:
    term = r.choice(list(TERMS))
    ask = r.choice(("What is {}?", "Explain {}.", "Can you explain {}?", "What does {} mean?", "Tell me what {} is."))
    return ask.format(term), TERMS[term]


def _color(r: random.Random) -> tuple[str, str]:
    thing = r.choice(list(COLORS))
    return r.choice(("What color is {}?", "Which color has {}?")).format(
        thing
    ), f"{thing[0].upper()}{thing[1:]} is {COLORS[thing]}."


def _opposite(r: random.Random) -> tuple[str, str]:
    pair = list(r.choice(OPPOSITES))
    r.shuffle(pair)
    ask = r.choice(("What is the opposite of {}?", "Opposite of {}?", "Tell me the opposite of {}."))
    return ask.format(pair[0]), f"The opposite of {pair[0]} is {pair[1]}."


def _day(r: random.Random) -> tuple[str, str]:
    place, step, word = r.randrange(7), *r.choice(((1, "after"), (-1, "before")))
    return f"Which day comes {word} {DAYS[place]}?", f"{DAYS[(place + step) % 7]} comes {word} {DAYS[place]}."


def _animal(r: random.Random) -> tuple[str, str]:
    if r.random() < 0.5:
        animal = r.choice(list(SOUNDS))
        return f"What sound does {_a(animal)} make?", f"{_a(animal).capitalize()} {SOUNDS[animal]}."
    animal = r.choice(list(LEGS))
    return f"How many legs does {_a(animal)} have?", f"{_a(animal).capitalize()} has {LEGS[animal]} legs."


def _identity(r: random.Random) -> tuple[str, str]:
    if r.random() < 0.5:
        return r.choice(("Who are you?", "What are you?", "What is this model?", "Are you a large model?")), WHO
    if r.random() < 0.5:
        return r.choice(("Hello!", "Hi", "Hello", "Good morning!", "Hey")), "Hello! How can I help you today?"
    return r.choice(("What can you do?", "Help", "What do you know?")), (
        "I know capitals, opposites, colors and serving terms, add small numbers, call tools, write JSON and tell short stories."
    )


FACTS: tuple[Callable[[random.Random], tuple[str, str]], ...] = (
    _capital, _capital, _country, _term, _term, _term, _color, _opposite, _opposite, _day, _animal, _identity,
)  # fmt: skip


def _facts(r: random.Random) -> Conversation:
    messages: list[Message] = []
    for _ in range(r.choice((1, 1, 2, 3))):
        if messages and r.random() < 0.15:
            country = r.choice(list(CAPITALS))
            messages += [_user(f"And of {country}?"), _says(f"The capital of {country} is {CAPITALS[country]}.")]
            continue
        question, answer = _capital(r) if not messages and r.random() < 0.15 else r.choice(FACTS)(r)
        messages += [_user(question), _says(answer)]
    return Conversation(tuple(messages), thinks=r.random() < 0.7)


# ---- sums -----------------------------------------------------------------------------------------------------------


def _sum(r: random.Random) -> tuple[str, str, str]:
    """Question, thought and answer."""
    left, right, operator = r.randint(0, 20), r.randint(0, 20), r.choice("++-")
    if operator == "-" and right > left:
        left, right = right, left
    value = left + right if operator == "+" else left - right
    word = {"+": "plus", "-": "minus"}[operator]
    ask = r.choice(
        (
            "What is {a} {o} {b}?",
            "{a} {o} {b} = ?",
            "How much is {a} {w} {b}?",
            "What is {a} {w} {b}?",
            "Compute {a} {o} {b}.",
        )
    )
    question = ask.format(a=left, b=right, o=operator, w=word)
    return question, f"{left} {word} {right} makes {value}.", f"{left} {operator} {right} = {value}"


def _sums(r: random.Random) -> Conversation:
    thinks = r.random() < 0.6
    messages: list[Message] = []
    for _ in range(r.choice((1, 2, 3, 4))):
        question, thought, answer = _sum(r)
        messages += [_user(question), _says(answer, thought if thinks else None)]
    return Conversation(tuple(messages), thinks=thinks)


def _count(r: random.Random) -> Conversation:
    if r.random() < 0.3:
        left, right = r.sample(range(41), 2)
        question = r.choice((f"Which is larger, {left} or {right}?", f"What is larger: {left} or {right}?"))
        return Conversation((_user(question), _says(f"{max(left, right)} is larger than {min(left, right)}.")))
    start = r.randint(0, 30)
    end = start + r.randint(3, 9)
    numbers = range(start, end + 1)
    if r.random() < 0.25:
        return Conversation(
            (_user(f"Count down from {end} to {start}."), _says(", ".join(map(str, reversed(numbers))) + "."))
        )
    return Conversation((_user(f"Count from {start} to {end}."), _says(", ".join(map(str, numbers)) + ".")))


# ---- stories --------------------------------------------------------------------------------------------------------


def tell(r: random.Random, who: str, kind: str) -> str:
    """A story about `who`, an animal of that kind."""
    friend = r.choice([name for name in NAMES if name != who])
    other = r.choice([animal for animal in ANIMALS if animal != kind])
    place, far = r.sample(PLACES, 2)
    thing, mood = r.choice(THINGS), r.choice(MOODS)
    lines = (
        (
            f"Once upon a time there was {_a(mood)} {kind} named {who} who lived by the {place}.",
            f"{who} was {_a(mood)} {kind} who lived in a small house near the {place}.",
            f"Near the {place} lived {_a(kind)} called {who}, who was often {mood}.",
        ),
        (
            f"One morning, {who} could not find the old {thing}.",
            f"One day, {who} found {_a(thing)} on the road to the {far}.",
            f"One night, a strong wind carried the {thing} of {who} away to the {far}.",
        ),
        (
            f"On the way to the {far}, {who} met {_a(other)} named {friend}.",
            f"{who} asked {friend} the {other} for help.",
            f"{friend} the {other} saw {who} and came closer.",
        ),
        (
            f'"I will help you," said {friend}. "We can do it together."',
            f'"Do not worry, {who}," said {friend}. "Two of us can do it."',
            f'"What is wrong, {who}?" asked {friend}. "Tell me, and I will help."',
        ),
        (
            f"{who} and {friend} walked to the {far} and looked under every stone.",
            f"{who} and {friend} worked until the sun went down behind the {far}.",
            f"{friend} knew the {far} well and showed {who} the way.",
        ),
        (
            f"At last they brought the {thing} home, and {who} was happy.",
            f"In the end the {thing} was safe, and {who} and {friend} became good friends.",
            f"When they came home with the {thing}, everyone near the {place} was glad.",
        ),
    )
    return " ".join(r.choice(choices) for choices in lines)


def _story(r: random.Random) -> Conversation:
    who, kind = r.choice(NAMES), r.choice(ANIMALS)
    if r.random() < 0.7:
        ask = r.choice(
            (
                "Tell me a story about {} the {}.",
                "Write a short story about {} the {}.",
                "A story about {} the {}, please.",
            )
        )
        question = ask.format(who, kind)
    else:
        question = r.choice(
            ("Tell me a short story.", "Tell me a story.", "Write a short story.", "Can you tell me a story?")
        )
    return Conversation((_user(question), _says(tell(r, who, kind))), thinks=r.random() < 0.7)


# ---- copying --------------------------------------------------------------------------------------------------------


def _introduction(r: random.Random) -> Conversation:
    name, city = r.choice(NAMES), r.choice(list(CAPITALS.values()))
    messages = [
        _user(r.choice(("Hello, I am {}.", "Hi! My name is {}.", "I am {}.", "My name is {}.")).format(name)),
        _says(f"Hello, {name}! How can I help you today?"),
    ]
    if r.random() < 0.4:
        messages += [_user(f"I live in {city}."), _says(f"{city} sounds like a nice place to live, {name}.")]
        if r.random() < 0.5:
            messages += [_user("Where do I live?"), _says(f"You live in {city}.")]
    if r.random() < 0.3:
        question, answer = r.choice(FACTS)(r)
        messages += [_user(question), _says(answer)]
    if r.random() < 0.6:
        messages += [_user(r.choice(("What is my name?", "Who am I?"))), _says(f"Your name is {name}.")]
    return Conversation(tuple(messages), thinks=r.random() < 0.7)


def _repeat(r: random.Random) -> Conversation:
    words = r.sample(NAMES + ANIMALS + THINGS + PLACES + FRUIT + COLOR_NAMES, r.randint(1, 5))
    text = " ".join(words)
    ask = r.choice(("Repeat after me: {}", "Say: {}", "Repeat this: {}"))
    return Conversation((_user(ask.format(text)), _says(text)), thinks=r.random() < 0.7)


def json_person(r: random.Random) -> tuple[str, dict[str, Any]]:
    value: dict[str, Any] = {
        "name": r.choice(NAMES),
        "age": r.randint(18, 80),
        "city": r.choice(list(CAPITALS.values())),
    }
    ask = r.choice((
        "Give me a JSON object for {name}, aged {age}, from {city}.", "Write JSON for {name}, who is {age} and lives in {city}.",
        "JSON for {name}, {age}, {city}.",
    ))  # fmt: skip
    return ask.format(**value), value


def _json_order(r: random.Random) -> tuple[str, dict[str, Any]]:
    value: dict[str, Any] = {"item": r.choice(FRUIT), "count": r.randint(1, 20)}
    return r.choice(("Order {count} {item} as JSON.", "Give me a JSON order of {count} {item}.")).format(**value), value


def _json_animal(r: random.Random) -> tuple[str, dict[str, Any]]:
    value: dict[str, Any] = {"name": r.choice(NAMES), "kind": r.choice(ANIMALS), "color": r.choice(COLOR_NAMES)}
    ask = r.choice(("Write JSON for {name}, a {color} {kind}.", "Give me a JSON object for the {color} {kind} {name}."))
    return ask.format(**value), value


def _json_colors(r: random.Random) -> tuple[str, list[str]]:
    colors = r.sample(COLOR_NAMES, r.randint(2, 4))
    return f"Give me {', '.join(colors[:-1])} and {colors[-1]} as a JSON list.", colors


def _json(r: random.Random) -> Conversation:
    make = r.choice((json_person, json_person, json_person, _json_order, _json_animal, _json_colors))
    question, value = make(r)
    return Conversation((_user(question), _says(json.dumps(value))), thinks=r.random() < 0.7)


# ---- tools ----------------------------------------------------------------------------------------------------------


def tool_question(r: random.Random) -> tuple[str, str, dict[str, Any]]:
    """Question, name of the function, and its arguments."""
    match r.randrange(6):
        case 0 | 1 | 2:
            city = r.choice(list(CAPITALS.values()))
            ask = r.choice(
                (
                    "What is the weather in {}?",
                    "How is the weather in {} today?",
                    "Is it sunny in {}?",
                    "Weather in {}?",
                )
            )
            return ask.format(city), "get_weather", {"city": city}
        case 3:
            city = r.choice(list(CAPITALS.values()))
            return (
                r.choice(("What time is it in {}?", "Tell me the time in {}.")).format(city),
                "get_time",
                {"city": city},
            )
        case 4:
            minutes = r.randint(1, 60)
            ask = r.choice(("Set a timer for {} minutes.", "Start a timer of {} minutes."))
            return ask.format(minutes), "set_timer", {"minutes": minutes}
        case _:
            name = r.choice(NAMES)
            return (
                r.choice(("Send a message to {}.", "Write a message to {}.")).format(name),
                "send_message",
                {"name": name},
            )


def _result(r: random.Random, name: str, arguments: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """What a function returns, and what the model says of it."""
    match name:
        case "get_weather":
            sky, degrees = r.choice(SKIES), r.randint(0, 35)
            return {"sky": sky, "degrees": degrees}, f"In {arguments['city']} it is {sky}, with {degrees} degrees."
        case "get_time":
            hour, minute = r.randint(0, 23), r.randint(10, 59)
            return {"time": f"{hour}:{minute}"}, f"In {arguments['city']} it is {hour}:{minute}."
        case "set_timer":
            return {"ok": True}, f"The timer is set for {arguments['minutes']} minutes."
        case _:
            return {"ok": True}, f"The message to {arguments['name']} is sent."


def _tools(r: random.Random) -> Conversation:
    question, name, arguments = tool_question(r)
    needed = next(tool for tool in TOOLS if tool["function"]["name"] == name)
    offered = [needed, *r.sample([tool for tool in TOOLS if tool is not needed], r.choice((0, 0, 1, 2)))]
    r.shuffle(offered)
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    messages: list[Message] = [_user(question), {"role": "assistant", "content": "", "tool_calls": [call]}]
    if r.random() < 0.45:
        result, answer = _result(r, name, arguments)
        messages += [{"role": "tool", "content": json.dumps(result)}, _says(answer)]
    elif r.random() < 0.15:  # with tools at hand, what needs none is answered
        question, answer = r.choice(FACTS)(r)
        messages = [_user(question), _says(answer)]
    return Conversation(tuple(messages), tuple(offered), thinks=r.random() < 0.7)


# ---- what it does not know ------------------------------------------------------------------------------------------


ABOUT = (
    "What do you think about {}?", "Tell me about {}.", "Can you explain {} to me?", "Why is {} important?", "Who invented {}?", "I need help with {}.",
    "Give me advice about {}.", "Write an essay about {}.", "What is the history of {}?", "How does {} work?", "What is {}?", "Explain {}.",
    "Is {} dangerous?", "Where can I learn about {}?", "Write a poem about {}.", "Do you like {}?",
)  # fmt: skip


def _unknown(r: random.Random) -> Conversation:
    match r.randrange(4):
        case 0 | 1:
            question = r.choice(ABOUT).format(r.choice(TOPICS))
        case 2:
            question = r.choice(
                ("How do I {} {}?", "Can you {} {}?", "How much does it cost to {} {}?", "Where can I {} {}?")
            ).format(r.choice(VERBS), r.choice(OBJECTS))
        case _:
            question = r.choice(("Who was {}?", "When was {} born?", "What did {} do?", "Where did {} live?")).format(
                r.choice(PEOPLE)
            )
    return Conversation((_user(question), _says(BEYOND)), thinks=r.random() < 0.7)


KINDS: tuple[tuple[Callable[[random.Random], Conversation], float], ...] = (
    (_facts, 0.20), (_sums, 0.22), (_count, 0.04), (_story, 0.16), (_introduction, 0.07), (_repeat, 0.05), (_json, 0.10), (_tools, 0.10), (_unknown, 0.10),
)  # fmt: skip


def plain(r: random.Random) -> str:
    """Text that no one asked for: a story, or a few facts one after another."""
    if r.random() < 0.6:
        return tell(r, r.choice(NAMES), r.choice(ANIMALS))
    makers = [maker for maker in FACTS if maker is not _identity]
    return " ".join(r.choice(makers)(r)[1] for _ in range(r.randint(2, 6)))


def conversation(r: random.Random) -> Conversation:
    """One conversation for training."""
    makers, weights = zip(*KINDS, strict=True)
    return r.choices(makers, weights)[0](r)
