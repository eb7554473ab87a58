"""A running engine in plain words and numbers, for people who ask the server what it runs."""

from __future__ import annotations

from typing import Any

import jax

from tpu_serve.engine.engine import Engine


def describe_devices(engine: Engine) -> list[dict[str, Any]]:
    """The devices that hold the model's weights; memory is in bytes, as the devices report it, null where they do not."""
    arrays = [
        leaf for leaf in jax.tree.leaves(getattr(engine.core.runner, "params", None)) if isinstance(leaf, jax.Array)
    ]
    devices = sorted(arrays[0].devices(), key=lambda device: device.id) if arrays else []
    described = []
    for device in devices:
        memory = device.memory_stats() or {}
        described.append(
            {
                "id": device.id,
                "kind": device.device_kind,
                "platform": device.platform,
                "memory_limit_bytes": memory.get("bytes_limit"),
                "memory_used_bytes": memory.get("bytes_in_use"),
            }
        )
    return described


def describe_engine(engine: Engine) -> dict[str, Any]:
    """Sizes that the engine runs with, whether they were asked for or computed; those of data-parallel ranks together."""
    scheduler, info = engine.core.scheduler, engine.info
    return {
        "model": info.name,
        "architecture": info.architecture,
        "max_model_len": info.max_model_len,
        "vocab_size": info.vocab_size,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "data_parallel_size": engine.config.parallel.data_parallel_size,
        "max_num_queued_reqs": info.max_num_queued,
        "enable_prefix_caching": scheduler.enable_prefix_caching,
        "page_size": scheduler.cache.page_size,
        "kv_pools": [{"num_pages": pool.num_pages, "window": pool.window} for pool in scheduler.cache.pools],
        "num_programs": engine.core.runner.compile_count,
        "token_buckets": list(engine.buckets),
        "programs": dict(zip(("ready", "all"), engine.programs(), strict=True)),
        "moe_plans": [
            {"path": path, "source": source, "num_buckets": count}
            for (path, source), count in sorted(engine.moe_plans.items())
        ],
        "sampling_defaults": dict(info.default_params),
    }
