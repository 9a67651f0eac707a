"""/metrics of each process, before and after its first request."""

from __future__ import annotations

import re
import subprocess

import pytest

from client import Client
from demo.launcher import LocalServices
from tests.e2e.conftest import conversation, histogram_counts, scrape

pytestmark = pytest.mark.e2e

# Stages of one sparse turn scored by a tail window; everything else must be exported as zero.
RAN = {
    "gateway": {
        "gateway_time_to_first_token_seconds",
        "gateway_inter_token_latency_seconds",
        "gateway_stage_seconds",
        "gateway_request_seconds",
    },
    "scorer": {
        "scorer_queue_seconds",
        "scorer_restore_seconds",
        "scorer_prefill_seconds",
        "scorer_k_pass_seconds",
        "scorer_select_seconds",
        "scorer_score_seconds",
    },
    "target": {
        "target_queue_seconds",
        "target_restore_seconds",
        "target_prefill_seconds",
        "target_kick_off_seconds",
        "target_first_token_seconds",
    },
}
DID_NOT_RUN = {"gateway": set(), "scorer": {"scorer_lookahead_seconds"}, "target": set()}


def test_every_stage_is_exported_as_zero_until_it_ran(
    client: Client, services: LocalServices
) -> None:
    for name in RAN:
        before = histogram_counts(scrape(services[name]))
        assert RAN[name] | DID_NOT_RUN[name] <= before.keys()
        assert {before[family] for family in RAN[name] | DID_NOT_RUN[name]} == {0}
    reply = client.complete(
        conversation(), query_mode="tail_window", max_tokens=4, ignore_end_tokens=True
    )
    assert reply.decision.path == "SPARSE"
    for name, ran in RAN.items():
        after = histogram_counts(scrape(services[name]))
        assert all(after[family] > 0 for family in ran), after
        assert all(after[family] == 0 for family in DID_NOT_RUN[name]), after


def test_the_kinds_of_prefill_that_did_not_run_stay_zero(services: LocalServices) -> None:
    text = scrape(services["target"])
    counts = dict(
        re.findall(r'^target_prefill_seconds_count\{kind="(\w+)"\} (\S+)$', text, re.MULTILINE)
    )
    assert {kind: float(count) for kind, count in counts.items()} == {
        "protected": 1,
        "sparse": 1,
        "dense": 0,
    }


def test_promtool_finds_nothing_to_say(services: LocalServices, promtool: str) -> None:
    for service in services.services.values():
        checked = subprocess.run(
            [promtool, "check", "metrics"],
            input=scrape(service),
            text=True,
            capture_output=True,
            check=False,
        )
        assert checked.returncode == 0, checked.stdout + checked.stderr
        assert not checked.stderr.strip(), checked.stderr
