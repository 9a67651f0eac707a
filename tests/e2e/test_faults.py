"""What happens when a process dies, a client leaves or a deadline passes; nothing may be lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from client import Client, Delta, Progress
from demo.launcher import LocalServices
from serving.errors import DeadlineExceeded, Unavailable
from tests.e2e.conftest import conversation, eventually, pages_in_use

pytestmark = pytest.mark.e2e

ENDLESS = {"max_tokens": 2000, "ignore_end_tokens": True}


@pytest.fixture(autouse=True)
def _everything_is_given_back(services: LocalServices) -> Iterator[None]:
    yield
    for name in ("scorer", "target"):
        if not services[name].is_running:
            services.start(name)
    eventually(lambda: set(pages_in_use(services).values()) == {0}, "no page in use")


def test_without_the_scorer_a_prompt_goes_dense(client: Client, services: LocalServices) -> None:
    before = client.complete(conversation(), mode="dense", max_tokens=8)
    services.kill("scorer")
    reply = client.complete(conversation(), max_tokens=8)
    assert (reply.decision.path, reply.decision.reason) == ("DENSE", "SCORER_UNAVAILABLE")
    assert reply.token_ids == before.token_ids
    services.start("scorer")
    eventually(
        lambda: client.complete(conversation(), max_tokens=1).decision.path == "SPARSE",
        "sparse again after the scorer came back",
    )


def test_a_scorer_that_dies_while_scoring_costs_nothing_but_time(
    client: Client, services: LocalServices
) -> None:
    events = client.generate(conversation(1600), max_tokens=4)
    for event in events:
        if isinstance(event, Progress) and event.phase == "SCORE_PREFILL":
            services.kill("scorer")
            break
    finished = list(events)[-1]
    assert (finished.decision.path, finished.decision.reason) == ("DENSE", "SCORER_UNAVAILABLE")


def test_a_target_that_dies_mid_stream_is_unavailable_within_a_second(
    client: Client, services: LocalServices
) -> None:
    events = client.generate(conversation(), **ENDLESS)
    next(event for event in events if isinstance(event, Delta))
    services.kill("target")
    killed = time.monotonic()
    with pytest.raises(Unavailable) as caught:
        for _ in events:
            pass
    assert time.monotonic() - killed < 1.0
    assert caught.value.reason == "STREAM_INTERRUPTED"
    services.start("target")
    eventually(lambda: _answers(client), "an answer after the target came back")


def _answers(client: Client) -> bool:
    try:
        return client.complete(conversation(), max_tokens=1).finish_reason == "MAX_TOKENS"
    except Unavailable:
        return False


@pytest.mark.parametrize(
    "phase",
    ["SCORE_PREFILL", "SCORE_QUERIES", "SCORE_K_PASS", "PROTECTED_PREFILL", "SPARSE_PREFILL"],
)
def test_a_cancel_in_any_phase_before_the_first_token_frees_everything(
    client: Client, services: LocalServices, phase: str
) -> None:
    events = client.generate(conversation(1600), query_mode="lookahead", **ENDLESS)
    for event in events:
        assert not isinstance(event, Delta), f"the first token came before {phase}"
        if isinstance(event, Progress) and event.phase == phase:
            break
    events.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("mode", ["dense", "sparse"])
def test_a_cancel_while_decoding_frees_everything(
    client: Client, services: LocalServices, mode: str
) -> None:
    events = client.generate(conversation(), mode=mode, **ENDLESS)
    next(event for event in events if isinstance(event, Delta))
    events.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("timeout_s", [0.05, 0.2, 0.6])
def test_a_deadline_that_passes_is_deadline_exceeded(
    client: Client, services: LocalServices, timeout_s: float
) -> None:
    with pytest.raises(DeadlineExceeded):
        client.complete(conversation(1600), timeout_s=timeout_s, **ENDLESS)


def test_many_turns_at_once_give_what_they_give_alone(
    client: Client, services: LocalServices
) -> None:
    prompts = [conversation(300 + 70 * n) for n in range(4)]
    options = {"max_tokens": 12, "ignore_end_tokens": True}
    alone = [client.complete(prompt, **options).token_ids for prompt in prompts]
    together: dict[int, tuple[int, ...]] = {}

    def ask(number: int) -> None:
        together[number] = client.complete(prompts[number], **options).token_ids

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [together[n] for n in range(len(prompts))] == alone
