"""The tables of a chip, read and indexed."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Sequence
from pathlib import Path

from tpu_serve.kernels.fused_moe_v2.config import Config
from tpu_serve.moe_plan.key import KERNEL, Key, config_from_json
from tpu_serve.moe_plan.lookup import Rows
from tpu_serve.moe_plan.portable import portable_rows
from tpu_serve.tuning_tables.files import read_tables
from tpu_serve.tuning_tables.table import Table


def tables_of(chip: str, folders: Sequence[Path] = ()) -> list[Table[Key, Config]]:
    """The fused kernel's tables for a chip, those of `folders` first.

    Raises:
      ConfigError: a file is damaged, or a folder is not there.
    """
    return read_tables(chip, KERNEL, folders, Key, config_from_json)


def rows_of(chip: str, folders: Sequence[Path] = ()) -> Rows:
    """Their rows, for the version of JAX and the host that this is.

    Raises:
      ConfigError: see `tables_of`.
    """
    here = {"jax": importlib.metadata.version("jax"), "host": platform.node()}
    return Rows(tables_of(chip, folders), **here, portable=portable_rows(chip, folders, **here))
