"""The other side of `process.py`: `python -m tpu_serve.tuner.worker MODULE:FUNCTION ARGUMENTS`.

Requests come on standard input and answers go to standard output, a line of JSON each. What else is printed goes to standard error.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time
from typing import Any


def _words(error: BaseException, limit: int = 600) -> str:
    line = " ".join(f"{type(error).__name__}: {error}".split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def _end_with(parent: int) -> None:
    """Ends this process when that one has: nobody would end it if it hangs, and it may hold the TPU."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def main(handler: str, arguments: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    try:
        module, name = handler.split(":")
        answer = getattr(importlib.import_module(module), name)(**json.loads(arguments))
    except Exception as error:
        say({"raised": _words(error)})
        return
    say({})
    for line in sys.stdin:
        try:
            said = answer(json.loads(line))
        except Exception as error:
            said = {"raised": _words(error)}
        say(said)


if __name__ == "__main__":
    main(*sys.argv[1:])
