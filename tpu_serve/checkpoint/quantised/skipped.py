"""The lists of modules that a config says are not quantised."""

from __future__ import annotations

import re
from collections.abc import Iterable

from tpu_serve.config import ConfigError

_REGEX = "re:"


class SkipList:
    """Entries of `ignore`, `modules_to_not_convert`, `ignored_layers` or `exclude_modules`.

    An entry covers the modules below it too. It is a name, whole or a part of it between dots (`lm_head`, `mlp.gate`), a glob from the
    beginning of the name (`model.layers.*.self_attn`), or `re:` and a regular expression that matches from the beginning.

    Raises:
      ConfigError: an entry is not a string, or not a regular expression.
    """

    def __init__(self, entries: Iterable[object], origin: str):
        self._names: set[str] = set()
        self._globs: list[tuple[str, re.Pattern[str]]] = []
        self._regexes: list[tuple[str, re.Pattern[str]]] = []
        for entry in entries:
            if not isinstance(entry, str):
                raise ConfigError(f"{origin} must list names of modules as strings, but {entry!r} is among them.")
            if entry.startswith(_REGEX):
                self._regexes.append((entry, _compile(entry.removeprefix(_REGEX), origin)))
            elif "*" in entry or "?" in entry:
                body = re.escape(entry).replace(r"\*", ".*").replace(r"\?", ".")
                self._globs.append((entry, re.compile(rf"(?:{body})(?:\..*)?", re.DOTALL)))
            elif entry:
                self._names.add(entry)
        # One expression for all globs: most modules match none of hundreds.
        self._any_glob = re.compile("|".join(pattern.pattern for _, pattern in self._globs), re.DOTALL)

    def find(self, module: str) -> str | None:
        """The entry that covers a module, or None."""
        parts = module.split(".")
        for start in range(len(parts)):
            for stop in range(start + 1, len(parts) + 1):
                if (name := ".".join(parts[start:stop])) in self._names:
                    return name
        if self._globs and self._any_glob.fullmatch(module):
            return next(entry for entry, pattern in self._globs if pattern.fullmatch(module))
        return next((entry for entry, pattern in self._regexes if pattern.match(module)), None)


def _compile(text: str, origin: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ConfigError(f"{origin} lists {_REGEX}{text}, which is not a regular expression: {error}.") from None
