"""The load of the server in a response header, for gateways that route by it (the ORCA convention)."""

from __future__ import annotations

import json

from starlette.datastructures import Headers

from tpu_serve.server.service import Service


def load_report(headers: Headers, service: Service) -> dict[str, str]:
    """The header that `endpoint-load-metrics-format: text` or `json` asks for; none for any other value."""
    form = headers.get("endpoint-load-metrics-format", "").strip().lower()
    if form not in ("text", "json"):
        return {}
    reading = service.frontend.engine.reading()
    metrics = {
        "kv_cache_usage_perc": round(reading.cache_usage, 4),
        "num_requests_waiting": reading.num_waiting,
    }
    if form == "json":
        return {"endpoint-load-metrics": f"JSON {json.dumps({'named_metrics': metrics})}"}
    listed = ", ".join(f"named_metrics.{name}={value}" for name, value in metrics.items())
    return {"endpoint-load-metrics": f"TEXT {listed}"}
