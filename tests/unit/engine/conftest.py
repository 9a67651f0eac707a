"""The GPU thread that the job tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.engine.job_desk import Desk


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    yield desk
    desk.gpu.stop()
    assert desk.gpu.jobs_running + desk.gpu.jobs_waiting == 0
