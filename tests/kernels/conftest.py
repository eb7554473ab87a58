import pytest
from fused_moe_sum import sum_plainly


@pytest.fixture
def plain_sums(monkeypatch):
    """For tests of the fused kernel that are not about its final sum."""
    sum_plainly(monkeypatch)
