"""docs/metrics.md says what /metrics says."""

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_is_what_the_registry_declares():
    spec = importlib.util.spec_from_file_location("make_metrics_page", ROOT / "scripts" / "make_metrics_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert page == module.page(), "run scripts/make_metrics_page.py"
    names = re.findall(r"^\| `(\S+)` \|", page, re.MULTILINE)
    assert len(names) == len(set(names))
    # Some that must be there, by the names that people query.
    for name in (
        "vllm:num_requests_running",
        "vllm:request_success_total",
        "vllm:time_to_first_token_seconds",
        "tpu_serve:compile_total",
        "http_requests_total",
        "process_resident_memory_bytes",
    ):
        assert name in names
