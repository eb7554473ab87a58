"""A layer on simulated devices that is planned as on a TPU, and a clock that says what it is told."""

import jax
import jax.numpy as jnp
import numpy as np

from tpu_serve.config import MoEOptions
from tpu_serve.device.chip import TPU_CHIPS
from tpu_serve.device.mesh import make_mesh
from tpu_serve.engine.warm_up import WarmUp
from tpu_serve.layers.moe.backends import choose_backend
from tpu_serve.layers.moe.routing import MoEConfig
from tpu_serve.layers.moe.timing import Timing
from tpu_serve.moe_plan.rows import rows_of

V6E = TPU_CHIPS["v6e"]
JAX = jax.__version__
CONFIG = MoEConfig(num_experts=6, top_k=2, hidden=384, intermediate=256, renormalise=True)
SERVED = (64, 128, 300, 512)
"""By rule the kernel runs all of them but 300."""


def options(*folders):
    return MoEOptions(warm_up_measure=True, moe_tuning_dir=tuple(map(str, folders)))


def layer(moe, chip=V6E, num_devices=2, config=CONFIG):
    """The layer as a start of the server has it, with the tables that are there now."""
    mesh = make_mesh(jax.devices()[:num_devices])
    return choose_backend(moe, config, chip, mesh, "bfloat16", rows_of(chip.name, moe.tuning_folders))


class Clock:
    """Microseconds by (path, tokens), or what is raised; 100 for the kernel and 200 for XLA where nothing is said."""

    def __init__(self, times=None):
        self.times, self.asked = times or {}, []

    def __call__(self, way, arguments):
        x, routing, _ = arguments
        assert x.shape == (way.plan.num_tokens, CONFIG.hidden)
        assert routing.expert_ids.shape == (way.plan.num_tokens, CONFIG.top_k)
        self.asked.append((way.plan.path, way.plan.num_tokens))
        found = self.times.get(self.asked[-1], 100.0 if way.plan.path == "fused" else 200.0)
        if isinstance(found, Exception):
            raise found
        return Timing(found, 0.0123456, 80)


def params(num_devices=2):
    """Weights of a model whose first layer has no experts, as the loader pads and places them."""
    mesh = make_mesh(jax.devices()[:num_devices])
    by_expert = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(("data", "model")))
    random = np.random.default_rng(0)

    def weights(*shape):
        values = random.normal(0, 0.05, shape).astype(jnp.bfloat16)
        return jax.device_put(values, by_expert)

    experts = {"gate_up": weights(6, 2, 384, 256), "down": weights(6, 256, 384)}
    return {"layers": [{"mlp": {}}, {"experts": experts}, {"experts": {"gate_up": None, "down": None}}]}


def start(moe, clock, buckets=SERVED, **changes):
    """The layer that a server with these options runs."""
    return WarmUp(moe, layer(moe, **changes), buckets, clock).run(params())
