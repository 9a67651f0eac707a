"""Every series of the target exists before the first request."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from target_service.metrics import TargetMetrics
from target_service.prefill import PrefillKind
from target_service.timings import Timings

TIMINGS = Timings(
    queue_s=1.0,
    restore_s=2.0,
    protected_prefill_s=0.0,
    sparse_prefill_s=0.0,
    dense_prefill_s=3.0,
    kick_off_s=4.0,
    first_token_s=10.0,
    decode_s=0.0,
    total_s=10.0,
)
STAGES = ("queue", "restore", "kick_off", "decode_step", "first_token", "inter_token")


def test_all_series_start_at_zero() -> None:
    registry = CollectorRegistry()
    TargetMetrics(registry)
    for stage in STAGES:
        assert registry.get_sample_value(f"target_{stage}_seconds_count") == 0
    for kind in ("protected", "sparse", "dense"):
        assert registry.get_sample_value("target_prefill_seconds_count", {"kind": kind}) == 0
    for name, label, values in (
        ("requests", "outcome", ("finished", "cancelled", "refused", "failed")),
        ("replies", "finish_reason", ("end_token", "stop_string", "context_end")),
        ("tokens", "kind", ("protected_executed", "sparse_restored", "generated")),
    ):
        for value in values:
            assert registry.get_sample_value(f"target_{name}_total", {label: value}) == 0


def test_only_the_prefill_that_ran_is_observed() -> None:
    registry = CollectorRegistry()
    TargetMetrics(registry).observe_first_token(TIMINGS, kinds={PrefillKind.DENSE})
    sums = {
        kind: registry.get_sample_value("target_prefill_seconds_sum", {"kind": kind})
        for kind in ("protected", "sparse", "dense")
    }
    assert sums == {"protected": 0, "sparse": 0, "dense": 3.0}
    counts = {
        kind: registry.get_sample_value("target_prefill_seconds_count", {"kind": kind})
        for kind in ("protected", "sparse", "dense")
    }
    assert counts == {"protected": 0, "sparse": 0, "dense": 1}
    assert registry.get_sample_value("target_queue_seconds_sum") == 1.0
