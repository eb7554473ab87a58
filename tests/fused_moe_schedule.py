"""What mode G of the fused kernel must do with which row, told in plain Python loops: the yardstick for its tables."""

from dataclasses import dataclass

import numpy as np

from tpu_serve.kernels.fused_moe_v2.config import Config
from tpu_serve.kernels.fused_moe_v2.problem import Problem


@dataclass(frozen=True)
class Slot:
    """A choice of a token that names an expert. `token` counts within its owner's; `place` among its owner's slots by expert."""

    owner: int
    token: int
    choice: int
    expert: int
    place: int


@dataclass(frozen=True)
class Visit:
    """Rows that are multiplied together."""

    round: int
    expert: int
    slots: tuple[Slot, ...]


def slots_of(problem: Problem, owner: int, expert_ids: np.ndarray) -> list[Slot]:
    """A device's slots in the order in which its rows come back: by expert, then as they stand in its tokens."""
    own = expert_ids[owner * problem.local_tokens : (owner + 1) * problem.local_tokens].tolist()
    found = [
        (expert, token, choice) for token, ids in enumerate(own) for choice, expert in enumerate(ids) if expert >= 0
    ]
    return [Slot(owner, token, choice, expert, place) for place, (expert, token, choice) in enumerate(sorted(found))]


def round_of(problem: Problem, config: Config, device: int, owner: int) -> int:
    """When a device works on an owner's tokens: the own ones first, then those of the device before it, and so on."""
    return (device - owner) % problem.num_devices * config.rounds // problem.num_devices


def experts_of(problem: Problem, device: int) -> range:
    return range(device * problem.local_experts, min((device + 1) * problem.local_experts, problem.num_experts))


def visits_of(problem: Problem, config: Config, device: int, expert_ids: np.ndarray) -> list[Visit]:
    """A device's visits in order.

    Args:
      expert_ids: int[G, K] of the whole group.
    """
    everyone = [slots_of(problem, owner, expert_ids) for owner in range(problem.num_devices)]
    visits = []
    for number in range(config.rounds):
        owners = [owner for owner in range(problem.num_devices) if round_of(problem, config, device, owner) == number]
        for expert in experts_of(problem, device):
            rows = [slot for owner in owners for slot in everyone[owner] if slot.expert == expert]
            for first in range(0, len(rows), config.block_rows):
                visits.append(Visit(number, expert, tuple(rows[first : first + config.block_rows])))
    return visits


def wanted_tokens(problem: Problem, owner: int, device: int, expert_ids: np.ndarray) -> list[int]:
    """Tokens of an owner that a device has experts for, counted within the owner's."""
    own = expert_ids[owner * problem.local_tokens : (owner + 1) * problem.local_tokens]
    return [token for token, ids in enumerate(own) if any(expert in experts_of(problem, device) for expert in ids)]
