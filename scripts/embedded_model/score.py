"""Scores the embedded model (or any other) over HTTP, greedily: a fixed list of questions, one line per kind and a JSON summary at the end.

    tpu-serve serve &
    python scripts/embedded_model/score.py [--url http://127.0.0.1:8000] [--show]

Exit code 1 when a kind is below its goal.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from questions import Question, questions

GOALS = {"facts": 0.95, "sums": 0.80, "stories": 0.80, "json": 0.80, "json valid": 0.95, "tools": 0.90, "unknown": 0.90}
"""Least share of right answers of each kind. `json` asks for the values, `json valid` for JSON of any content."""


def ask(url: str, question: Question) -> dict[str, Any]:
    """The answer's message."""
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": question.text}],
        "temperature": 0,
        "max_completion_tokens": 300,
    }
    if question.tools:
        body["tools"] = list(question.tools)
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)["choices"][0]["message"]


def judge(question: Question, message: dict[str, Any]) -> dict[str, bool]:
    """By kind, whether the answer is right."""
    text = (message["content"] or "").strip()
    match question.kind:
        case "json":
            try:
                value = json.loads(text)
            except ValueError:
                return {"json": False, "json valid": False}
            return {"json": value == question.expected, "json valid": True}
        case "stories":
            name, kind = question.expected
            return {"stories": text.count(name) >= 2 and kind in text}
        case "tools":
            calls = message.get("tool_calls") or [{"function": {"name": "", "arguments": "null"}}]
            function = calls[0]["function"]
            try:
                return {"tools": (function["name"], json.loads(function["arguments"])) == question.expected}
            except ValueError:
                return {"tools": False}
        case _:
            return {question.kind: text == question.expected}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server (default: %(default)s)")
    parser.add_argument("--show", action="store_true", help="print every wrong answer")
    given = parser.parse_args()
    asked = questions()
    with ThreadPoolExecutor(8) as pool:
        messages = list(pool.map(lambda question: ask(given.url.rstrip("/"), question), asked))
    right, total = Counter[str](), Counter[str]()
    for question, message in zip(asked, messages, strict=True):
        verdict = judge(question, message)
        for kind, is_right in verdict.items():
            right[kind] += is_right
            total[kind] += 1
        if given.show and not all(verdict.values()):
            print(f"{question.kind}: {question.text}\n  {message['content']!r} {message.get('tool_calls') or ''}")
    shares = {kind: right[kind] / total[kind] for kind in GOALS}
    for kind, goal in GOALS.items():
        print(f"{kind:12}{right[kind]:4} of {total[kind]:3}  {shares[kind]:6.1%}  (goal {goal:.0%})")
    print(json.dumps({kind: round(share, 4) for kind, share in shares.items()}))
    return int(any(shares[kind] < goal for kind, goal in GOALS.items()))


if __name__ == "__main__":
    sys.exit(main())
