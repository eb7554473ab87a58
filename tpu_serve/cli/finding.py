"""What `tpu-serve doctor` says about one thing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
      name: of the thing.
      value: how it is.
      status: "problem" when the server will not work because of it, "hint" when it could be better.
      advice: what to do, empty when nothing needs to be done.
    """

    name: str
    value: str
    status: Literal["ok", "hint", "problem"] = "ok"
    advice: str = ""

    def as_json(self) -> dict[str, str]:
        return {"name": self.name, "status": self.status, "value": self.value, "advice": self.advice}


def size(num_bytes: float) -> str:
    """A number of bytes for people."""
    for unit, shown in ((GIB, "GiB"), (2**20, "MiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {shown}"
    return f"{num_bytes / 2**10:.1f} KiB"
