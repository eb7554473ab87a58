"""One start of an engine, timed: `python -m tpu_serve.bench.startup_child OPTIONS SPAWNED`.

OPTIONS is a JSON object of engine options, SPAWNED the time at which the process was made, in seconds since the epoch. The last line of standard
output is a JSON object: seconds by phase of `tpu_serve.bench.startup.PHASES`, or `error`.
"""

from __future__ import annotations

import json
import sys
import time


def main(options: str, spawned: str) -> int:
    """Starts, generates one token, prints; returns the exit code."""
    from tpu_serve.bench.driver import Driver
    from tpu_serve.config import ConfigError, EngineConfig
    from tpu_serve.engine.build import build_engine

    start = float(spawned)
    marks: list[tuple[str, float]] = [("import", start)]

    def on_phase(name: str, share: float) -> None:
        if marks[-1][0] != name:
            marks.append((name, time.time()))

    try:
        engine = build_engine(EngineConfig.from_options(**json.loads(options)), on_phase)
    except ConfigError as error:
        print(json.dumps({"error": str(error)}))
        return 2
    ready = time.time()
    ends = [at for _, at in marks[1:]] + [ready]
    found = {name: end - at for (name, at), end in zip(marks, ends, strict=True)}
    seconds = Driver(engine.core, engine.info.vocab_size).run(1, 1, 1).seconds
    print(json.dumps({**found, "ready": ready - start, "first_token": seconds}))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
