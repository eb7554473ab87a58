"""How the kernel runs a problem: the tuned choice. Plain Python: tables and plans read and write it.

Which configs are legal is decided in `legality.py`, which are sensible in `heuristic.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from tpu_serve.kernels.fused_moe_v2.problem import Problem

MODES = ("D", "G")
DISPATCHES = ("xla_ag", "push_ag", "dedup_push")
COMBINES = ("push", "rs")


@dataclass(frozen=True, slots=True)
class Config:
    """A mode and its tiles.

    Attributes:
      mode: "D" every token through every active expert, or "G" rows gathered by expert.
      tile_columns: columns of the intermediate dimension in a weight tile, F.
      ring_slots: weight tiles that are in VMEM or on their way.
      block_rows: (G) rows of one expert that are resident at a time, M.
      tile_rows: (G) rows of one product.
      dispatch: (G) how tokens come to the experts' devices: gathered by XLA beforehand, pushed whole, or pushed only where wanted.
      combine: (G) finished rows pushed to their owners, or summed on the experts' device and reduce-scattered by XLA.
      rounds: (G with pushes) parts of the group, nearest first, whose tokens are worked on as they come. Each round reads the weights.
      combine_tokens: (G) tokens of a step of the final sum.
      resident: (G) all tokens of the group lie in VMEM, where gathering a row takes a few loads instead of a copy of its own.
      compact_rows: (D) rows of one product, picked out of the group's tokens for each expert; 0 for products with all of them.
    """

    mode: str
    tile_columns: int
    ring_slots: int = 3
    block_rows: int = 128
    tile_rows: int = 128
    dispatch: str = "xla_ag"
    combine: str = "push"
    rounds: int = 1
    combine_tokens: int = 16
    resident: bool = False
    compact_rows: int = 0

    def tiles_per_expert(self, problem: Problem) -> int:
        return problem.padded_intermediate // self.tile_columns

    def keeps_experts(self, problem: Problem) -> bool:
        """All tiles of an expert stay in the ring while its visits last, instead of being read again for each."""
        return self.ring_slots >= self.tiles_per_expert(problem)
