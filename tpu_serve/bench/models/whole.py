"""From programs of a few layers to the whole model: every number is what a program has without layers plus so much for each layer of a kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from tpu_serve.bench.models.cells import Layers


class Extrapolation:
    """Numbers of programs that differ in how many layers of each kind they have.

    Args:
      programs: the layers of each program.
      wanted: those of the whole model.

    Raises:
      ValueError: the programs do not tell the kinds apart.
    """

    def __init__(self, programs: Sequence[Layers], wanted: Layers) -> None:
        self._kinds = list(dict.fromkeys(wanted))
        self._wanted = self._row(wanted)
        self.is_whole = len(programs) == 1 and Counter(programs[0]) == Counter(wanted)
        self._rows = np.array([self._row(layers) for layers in programs], np.float64)
        if not self.is_whole and np.linalg.matrix_rank(self._rows) < len(self._wanted):
            raise ValueError("the programs do not say what a layer of each kind adds")

    def _row(self, layers: Layers) -> list[float]:
        counts = Counter(layers)
        return [1.0, *(float(counts[kind]) for kind in self._kinds)]

    def whole(self, values: Sequence[float]) -> float:
        """Of all layers, from the number of each program."""
        if self.is_whole:
            return values[0]
        return max(0.0, float(np.dot(self._wanted, self._solved(values))))

    def of_layers(self, values: Sequence[float]) -> dict[str, float]:
        """What a layer of each kind adds; empty where only the whole model was compiled."""
        if self.is_whole:
            return {}
        return dict(zip(self._kinds, map(float, self._solved(values)[1:]), strict=True))

    def counters(self, values: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """`whole` of every name; those of which nothing is left are left out."""
        names = dict.fromkeys(name for one in values for name in one)
        found = {name: self.whole([one.get(name, 0.0) for one in values]) for name in names}
        return {name: value for name, value in found.items() if value > 0}

    def _solved(self, values: Sequence[float]) -> np.ndarray:
        return np.linalg.lstsq(self._rows, np.array(values, np.float64), rcond=None)[0]
