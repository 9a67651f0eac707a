"""What calls about kept states share: how long a state is leased, and which handles are released.

Messages are taken as they come (any object with those fields), as in serving/wire.py.
"""

from __future__ import annotations

import math
from typing import Any

from serving.errors import InvalidRequest
from serving.limits import check_identifier, check_range


def lease_s_of(message: Any, *, lease_s_max: float) -> float:
    """The lease a message asks for, in seconds; the longest where it names none.

    Raises InvalidRequest.
    """
    if not message.HasField("lease_s"):
        return lease_s_max
    lease_s: float = message.lease_s
    if not math.isfinite(lease_s) or not 0.0 < lease_s <= lease_s_max:
        raise InvalidRequest(
            f"lease_s is {lease_s}, it must be above 0 and at most {lease_s_max}",
            field="lease_s",
            metadata={"limit": str(lease_s_max), "got": str(lease_s)},
        )
    return lease_s


def released_handles(message: Any, *, handles_max: int) -> tuple[str, ...]:
    """The handles of a Release request, which names its instance. Raises InvalidRequest."""
    check_identifier(message.instance_id, field="instance_id")
    check_range(
        len(message.handles),
        low=0,
        high=handles_max,
        field="handles",
        name="the number of handles",
    )
    return tuple(message.handles)
