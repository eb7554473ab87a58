"""Barrier numbers of the kernels that talk to other devices: two kernels with one number would take each other's signals."""

from __future__ import annotations

from enum import IntEnum


class CollectiveId(IntEnum):
    """One per kernel body."""

    FUSED_MOE_D = 1
    FUSED_MOE_G = 2
    FUSED_MOE_FIRST = 3
    FUSED_MOE_SECOND = 4
