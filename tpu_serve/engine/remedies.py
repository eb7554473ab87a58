"""Which options, changed, would make a model fit: found by trying them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tpu_serve.config import ConfigError, EngineConfig
from tpu_serve.config.parallel import MESH_AXES
from tpu_serve.device.chip import slice_sizes
from tpu_serve.engine.design import Design

Designer = Callable[[EngineConfig], Design]
"""Makes the design that some options ask for; raises ConfigError where that is impossible."""

GIVEN_SIZES = ("num_pages", "kv_cache_memory_bytes", "num_state_snapshots", "device_memory_utilization", "page_size")
"""Options that decide sizes, and without which something that fits is chosen where there is any."""


HOST_DEVICES = 8
"""Hosts of TPUs rarely have more devices."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """Options that would fit.

    Attributes:
      options: what to change; None means to leave the option out.
      factor: by how much something becomes less, or more: sequences, their tokens or a step's, bits of a value, devices. 1 for an option that is left out.
      num_devices: how many it takes, 0 for as many as before.
    """

    options: dict[str, Any]
    factor: float
    num_devices: int = 0

    @property
    def flags(self) -> str:
        """As on a command line."""
        return " ".join(
            f"without --{name.replace('_', '-')}" if value is None else f"--{name.replace('_', '-')} {value}"
            for name, value in self.options.items()
        )

    @property
    def note(self) -> str:
        """What else it takes; empty for nothing."""
        if self.num_devices <= HOST_DEVICES:
            return ""
        return "all on one host: several hosts are not supported yet"


def find_remedies(config: EngineConfig, design: Design, make_design: Designer) -> list[Remedy]:
    """Changes each of which suffices, the smallest first; some are two at a time where none does alone that one host could make.

    Args:
      config: options with which the design does not fit.
      make_design: of other options.
    """
    search = _Search(config, design, make_design)
    found = list(search.single())
    if all(one.note for one in found):
        found += [one for one in search.pairs() if not (found and one.note)]
    return sorted(found, key=lambda one: one.factor)


class _Search:
    def __init__(self, config: EngineConfig, design: Design, make_design: Designer):
        self._config, self._design, self._make_design = config, design, make_design
        self._tried: dict[str, Design | None] = {}

    def single(self) -> Iterator[Remedy]:
        for name in GIVEN_SIZES:
            if name in self._config.non_default() and self._fits({name: None}, self._design):
                yield Remedy({name: None}, 1)
        yield from self._fewer({}, self._design)
        for change in self._narrower():
            if self._fits(change.options):
                yield change
        yield from self._more_devices({})

    def pairs(self) -> Iterator[Remedy]:
        """A narrower type with something else."""
        for change in self._narrower():
            design = self._try_design(change.options)
            if design is not None:
                for other in (*self._fewer(change.options, design), *self._more_devices(change.options)):
                    yield Remedy(other.options, change.factor * other.factor, other.num_devices)

    def _fewer(self, options: dict[str, Any], design: Design) -> Iterator[Remedy]:
        """Fewer sequences, or shorter ones, or fewer tokens in a step: as many as fit."""
        chip, limit, options_now = design.placement.chip, design.model.max_position, self._config.scheduler
        for name, low, now in (
            ("max_num_seqs", 1, options_now.max_num_seqs or chip.max_num_seqs),
            ("max_model_len", 2, min(limit + 1, self._config.model.max_model_len or limit)),
            # A step has a token for each sequence.
            (
                "max_num_batched_tokens",
                options_now.max_num_seqs or 1,
                options_now.max_num_batched_tokens or chip.max_num_batched_tokens,
            ),
        ):
            most = self._most(options, design, name, low, now - 1)
            if most is not None:
                yield Remedy({**options, name: most}, now / most)

    def _most(self, options: dict[str, Any], design: Design, name: str, low: int, high: int) -> int | None:
        """The largest value that fits, None if the lowest does not. What fits goes on fitting as the value falls."""
        if low > high or not self._fits({**options, name: low}, design):
            return None
        while low < high:
            middle = (low + high + 1) // 2
            if self._fits({**options, name: middle}, design):
                low = middle
            else:
                high = middle - 1
        return low

    def _narrower(self) -> Iterator[Remedy]:
        """Types with fewer bits than those that the options ask for, whether or not they would help."""
        model, item_bytes = self._config.model, self._design.dtype.itemsize
        if item_bytes == 4:
            yield Remedy({"dtype": "bfloat16"}, 2)
        if self._config.cache.stored_type is None:
            yield Remedy({"kv_cache_dtype": "fp8"}, item_bytes)
        if model.quantization == "none":
            yield Remedy({"quantization": "int8"}, item_bytes)
            yield Remedy({"quantization": "fp8"}, item_bytes)
        if model.requantize == "off":
            yield Remedy({"requantize": None}, 2)

    def _more_devices(self, options: dict[str, Any]) -> Iterator[Remedy]:
        """The next slice that fits, with as many data ranks."""
        chip, parallel = self._design.placement.chip, self._config.parallel
        now, ranks = parallel.num_devices, parallel.data_parallel_size
        for size in slice_sizes(chip) if chip.is_tpu else ():
            if size > now and size % ranks == 0:
                wider = size // ranks
                change = {"mesh": f"data={ranks},model={wider}"} if parallel.mesh else {"tensor_parallel_size": wider}
                if self._fits(change := {**options, **change}):
                    yield Remedy(change, size / now, size)
                    return

    def _fits(self, options: dict[str, Any], design: Design | None = None) -> bool:
        """Whether there is a plan.

        Args:
          design: of these options, as far as they are not about sizes; made when left out.
        """
        design = design or self._try_design(options)
        if design is None:
            return False
        try:
            design.plan(self._with(options))
        except ConfigError:
            return False
        return True

    def _try_design(self, options: dict[str, Any]) -> Design | None:
        key = repr(sorted(options.items()))
        if key not in self._tried:
            try:
                self._tried[key] = self._make_design(self._with(options))
            except ConfigError:
                self._tried[key] = None
        return self._tried[key]

    def _with(self, options: dict[str, Any]) -> EngineConfig:
        both = {**self._config.non_default(), **options}
        if "mesh" in options:  # says itself what these say
            both |= dict.fromkeys(MESH_AXES.values())
        return EngineConfig.from_options(**{name: value for name, value in both.items() if value is not None})
