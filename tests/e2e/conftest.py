"""Three real processes on a tiny random model, and what tests ask of them."""

from __future__ import annotations

import re
import shutil
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from client import Client
from demo.launcher import LaunchPlan, LocalServices, Service
from serving.channel import CLIENT_CHANNEL_OPTIONS
from specprefill.v1 import scorer_pb2, scorer_pb2_grpc, target_pb2, target_pb2_grpc
from tests.tiny_models import write_tiny_model

POSITIONS_MAX = 8192
# Many short steps: a cancel or a deadline always falls into the middle of something.
PREFILL_CHUNK_TOKENS = 32
SETTLE_S = 10.0

MODEL_ENV = {
    "DTYPE": "float32",
    "KV_TOKENS": "32768",
    "PAGE_TOKENS": "16",
    "PREFILL_CHUNK_TOKENS": str(PREFILL_CHUNK_TOKENS),
    "PREFILL_CHUNK_TOKENS_SHARED": str(PREFILL_CHUNK_TOKENS),
    "TORCH_THREADS": "1",
    "GRACE_S": "2",
}
GATEWAY_ENV = {"THRESHOLD_TOKENS": "256", "GRACE_S": "2"}


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(
        tmp_path_factory.mktemp("model") / "tiny-llama", layers=4, positions_max=POSITIONS_MAX
    )


@pytest.fixture(scope="module")
def services(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServices]:
    """All three, for the tests of one module; a test that kills a service starts it again."""
    plan = LaunchPlan(
        target_dir=model_dir,
        draft_dir=model_dir,
        draft_layers=2,
        log_dir=tmp_path_factory.mktemp("logs"),
        scorer_env=MODEL_ENV,
        target_env=MODEL_ENV,
        gateway_env=GATEWAY_ENV,
    )
    with LocalServices(plan) as running:
        yield running


@pytest.fixture
def client(services: LocalServices) -> Iterator[Client]:
    with Client(services.address, timeout_s=60) as opened:
        yield opened


def long_text(words: int) -> str:
    """Text that never repeats itself: numbered sentences."""
    return " ".join(f"sentence {n} tells of harbour number {n * 7}." for n in range(words // 7))


def conversation(words: int = 500) -> list[dict[str, str]]:
    return [
        {"role": "system", "content": "Answer in one short sentence."},
        {"role": "user", "content": long_text(words)},
    ]


def pages_in_use(services: LocalServices) -> dict[str, int]:
    """Pages in use at the scorer and at the target, asked of the services themselves."""
    used = {}
    for name, ask in (("scorer", _scorer_kv), ("target", _target_kv)):
        with grpc.insecure_channel(
            services[name].address, options=list(CLIENT_CHANNEL_OPTIONS)
        ) as channel:
            used[name] = ask(channel)
    return used


def _scorer_kv(channel: grpc.Channel) -> int:
    stub = scorer_pb2_grpc.ScorerStub(channel)
    kv = stub.GetInfo(scorer_pb2.ScorerGetInfoRequest(), timeout=SETTLE_S).kv
    return int(kv.pages_total - kv.pages_free)


def _target_kv(channel: grpc.Channel) -> int:
    stub = target_pb2_grpc.TargetStub(channel)
    kv = stub.GetInfo(target_pb2.TargetGetInfoRequest(), timeout=SETTLE_S).kv
    return int(kv.pages_total - kv.pages_free)


def eventually(is_true: Callable[[], bool], what: str) -> None:
    """Poll with a limit; every poll is a real call, so this does not spin."""
    deadline = time.monotonic() + SETTLE_S
    while not is_true():
        assert time.monotonic() < deadline, f"not within {SETTLE_S} s: {what}"


def scrape(service: Service) -> str:
    with urllib.request.urlopen(service.metrics_url, timeout=SETTLE_S) as response:
        return str(response.read().decode("utf-8"))


def histogram_counts(text: str) -> dict[str, float]:
    """Number of observations of every histogram, summed over its labels."""
    families = re.findall(r"^# TYPE (\S+) histogram$", text, re.MULTILINE)
    counts = dict.fromkeys(families, 0.0)
    for name, value in re.findall(r"^(\S+?)_count(?:\{[^}]*\})? (\S+)$", text, re.MULTILINE):
        if name in counts:
            counts[name] += float(value)
    return counts


@pytest.fixture(scope="session")
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not installed (Debian package prometheus)")
    return found
