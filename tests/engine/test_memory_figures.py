"""What an engine says of its memory at its start, by the figures of the programs that it runs."""

import logging
import re

import pytest

from tpu_serve.config import ConfigError, EngineConfig
from tpu_serve.device.chip import MIB
from tpu_serve.engine import sizing
from tpu_serve.engine.build import build_engine

CONFIG = EngineConfig.from_options(load_format="dummy", max_num_seqs=2, max_num_batched_tokens=8, num_pages=140)


def test_figures_of_the_programs(caplog, monkeypatch):
    with caplog.at_level(logging.INFO):
        engine = build_engine(CONFIG)
    (said,) = (one.getMessage() for one in caplog.records if one.getMessage().startswith("Memory of each device"))
    assert re.search(r"with 140 pages: weights 0.00\d, caches 0.002, sampler 0.000, temporaries \(compiled\) 0.0", said)
    assert said.endswith("GiB are left")
    bytes_by_kind = engine.memory_bytes()
    (step,) = (
        engine.core.runner.compilation[name] for name in engine.core.runner.compilation.names if "step of 8" in name
    )
    told = step.memory_analysis()
    beside = (
        told.argument_size_in_bytes + told.temp_size_in_bytes + told.output_size_in_bytes - told.alias_size_in_bytes
    )
    beside -= sum(bytes_by_kind[kind] for kind in ("weights", "kv_cache", "recurrent_state", "sampler"))
    assert bytes_by_kind["temporaries"] == beside > 0

    # All that is calculated would fit in so little memory, and what the compiler says would not.
    usable = sum(bytes_by_kind[kind] for kind in ("weights", "kv_cache", "sampler", "temporaries"))
    monkeypatch.setattr(sizing, "usable_bytes", lambda config, chip: usable - 1)
    with pytest.raises(
        ConfigError, match=r"programs do not fit by the compiler's figures.*The step of 8 tokens takes the most"
    ):
        build_engine(CONFIG)
    assert usable < 100 * MIB
