"""How many devices, and what is shared out over them."""

from __future__ import annotations

import os
from dataclasses import dataclass

from tpu_serve.option import ConfigError, check_at_least, check_types, option

MESH_AXES = {"data": "data_parallel_size", "model": "tensor_parallel_size"}
"""The axes that --mesh names, and the options that say the same."""
MOST_DEVICES = 18_432
"""JAX devices of the largest slice of TPUs there is."""


@dataclass(frozen=True)
class ParallelOptions:
    """How many devices of this host the model is split over.

    Sizes are numbers once this is made, whichever option they come from.
    """

    tensor_parallel_size: int = option(
        None,
        "devices that share the work on each sequence, over which heads are split; on CPU they are simulated; 1 when left out",
        aliases=("-tp", "--tp-size"),
        metavar="N",
    )
    data_parallel_size: int = option(
        None,
        "groups of so many devices, each with sequences and a KV cache of its own; experts are split over the devices of all groups; "
        "1 when left out",
        aliases=("-dp", "--dp-size"),
        metavar="N",
    )
    enable_expert_parallel: bool = option(
        True, "give each device whole experts; nothing else is supported with more than one device"
    )
    mesh: str | None = option(
        None,
        "both sizes in one, as in data=2,model=4: --data-parallel-size 2 --tensor-parallel-size 4",
        metavar="AXIS=N,...",
    )

    def __post_init__(self) -> None:
        named = _mesh_sizes(self.mesh)
        for axis, name in MESH_AXES.items():
            given, size = getattr(self, name), named.get(axis)
            if None not in (given, size) and given != size:
                raise ConfigError(
                    f"--mesh {self.mesh} and --{name.replace('_', '-')} {given} contradict each other; leave one of them out."
                )
            object.__setattr__(self, name, given if given is not None else size if size is not None else 1)
        check_types(self)
        check_at_least(self, 1, *MESH_AXES.values())
        if self.num_devices > MOST_DEVICES:
            raise ConfigError(
                f"{self.devices_asked} is {self.num_devices} devices in all, more than the {MOST_DEVICES} of the largest slice."
            )
        if self.num_devices > 1 and not self.enable_expert_parallel:
            raise ConfigError(
                f"--no-enable-expert-parallel cannot be used with {self.devices_asked}: splitting inside an expert is not supported; "
                f"leave it out, and each device gets whole experts."
            )

    @property
    def num_devices(self) -> int:
        """All of them; experts are split over so many."""
        return self.data_parallel_size * self.tensor_parallel_size

    @property
    def devices_asked(self) -> str:
        """The options that say how many devices, for messages."""
        ranks = f"--data-parallel-size {self.data_parallel_size} "
        return f"{ranks if self.data_parallel_size > 1 else ''}--tensor-parallel-size {self.tensor_parallel_size}"

    @property
    def num_host_threads(self) -> int:
        """What NPROC, by which XLA sizes its pools of host threads, must be. Simulated devices wait for each other in such threads, and
        wait forever where there are too few; a larger number that is set already stays."""
        given = os.environ.get("NPROC", "")
        return max(
            2 * self.num_devices + 8,
            int(given) if given.isdecimal() and given.isascii() else os.cpu_count() or 1,
        )


def _mesh_sizes(text: str | None) -> dict[str, int]:
    """Sizes by axis of what --mesh says."""
    sizes: dict[str, int] = {}
    for part in text.split(",") if isinstance(text, str) else ():
        axis, _, size = part.partition("=")
        if axis not in MESH_AXES or axis in sizes or not (size.isascii() and size.isdigit() and int(size)):
            raise ConfigError(
                f"--mesh {text!r} is not understood: it names the axes {' and '.join(MESH_AXES)}, each once, as in data=2,model=4; "
                f"--data-parallel-size and --tensor-parallel-size say the same."
            )
        sizes[axis] = int(size)
    return sizes
