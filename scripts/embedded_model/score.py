"""Scores the embedded model (or any other) over HTTP, greedily: a fixed list of questions, one line per kind and a JSON summary at the end.

    python scripts/embedded_model/score.py [--model FOLDER] [--url URL] [--show]

It starts a server of its own, of the embedded model unless a folder is named, and stops it; with --url it asks one that is there. Exit code 1 when a
kind is below its goal.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
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


@contextmanager
def served(model: str) -> Iterator[str]:
    """The address of a server of this model, which ends with the context."""
    command = [sys.executable, "-m", "tpu_serve.cli.main", "serve", *([model] if model else []), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            lines = []
            for line in process.stderr:
                lines.append(line)
                if match := re.search(r"Serving \S+ at (http://\S+) after", line):
                    yield match[1]
                    break
            else:
                sys.exit(f"no server: {''.join(lines[-5:])}")
        finally:
            process.terminate()
            process.communicate()


def score(url: str, show: bool = False) -> dict[str, tuple[int, int]]:
    """By kind how many answers are right, of how many. Prints a line for each kind, and every wrong answer where that is asked for."""
    asked = questions()
    with ThreadPoolExecutor(8) as pool:
        messages = list(pool.map(lambda question: ask(url.rstrip("/"), question), asked))
    right, total = Counter[str](), Counter[str]()
    for question, message in zip(asked, messages, strict=True):
        verdict = judge(question, message)
        for kind, is_right in verdict.items():
            right[kind] += is_right
            total[kind] += 1
        if show and not all(verdict.values()):
            print(f"{question.kind}: {question.text}\n  {message['content']!r} {message.get('tool_calls') or ''}")
    for kind, goal in GOALS.items():
        share = right[kind] / total[kind]
        print(f"{kind:12}{right[kind]:4} of {total[kind]:3}  {share:6.1%}  (goal {goal:.0%})")
    return {kind: (right[kind], total[kind]) for kind in GOALS}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--model", default="", help="folder to serve (default: the embedded model)")
    where.add_argument("--url", help="of a server that is there")
    parser.add_argument("--show", action="store_true", help="print every wrong answer")
    given = parser.parse_args()
    if given.url:
        found = score(given.url, given.show)
    else:
        with served(given.model) as url:
            found = score(url, given.show)
    print(json.dumps({kind: round(right / total, 4) for kind, (right, total) in found.items()}))
    return int(any(right / total < GOALS[kind] for kind, (right, total) in found.items()))


if __name__ == "__main__":
    sys.exit(main())
