"""Where a turn's time went: the parts on the way to the first token add up to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from gateway.ports import ScoreTimes, TargetTimes

# In the order of the turn.
STAGES = (
    "queue",
    "tokenise",
    "look_up",
    "plan",
    "score_restore",
    "score_prefill",
    "score_queries",
    "score_k_pass",
    "score_select",
    "target_restore",
    "protected_prefill",
    "sparse_prefill",
    "dense_prefill",
    "kick_off",
    "rpc",
    "other",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Seconds. The stages, other_s included, add up to time_to_first_token_s.

    queue_s: in the gateway and in both services. rpc_s: what calls took beyond what the services
    report.
    """

    queue_s: float = 0.0
    tokenise_s: float = 0.0
    look_up_s: float = 0.0
    plan_s: float = 0.0
    score_restore_s: float = 0.0
    score_prefill_s: float = 0.0
    score_queries_s: float = 0.0
    score_k_pass_s: float = 0.0
    score_select_s: float = 0.0
    target_restore_s: float = 0.0
    protected_prefill_s: float = 0.0
    sparse_prefill_s: float = 0.0
    dense_prefill_s: float = 0.0
    kick_off_s: float = 0.0
    rpc_s: float = 0.0
    other_s: float = 0.0
    time_to_first_token_s: float = 0.0
    decode_s: float = 0.0
    total_s: float = 0.0
    overlapped_s: float = 0.0

    def stages(self) -> Mapping[str, float]:
        """Seconds by stage, in the order of the turn."""
        return {stage: getattr(self, f"{stage}_s") for stage in STAGES}


@dataclass(frozen=True, slots=True, kw_only=True)
class Walls:
    """What the gateway's own clock measured, in seconds.

    score_s: the score call, failed or not; 0 without one. target_s: from the target call to its
    first token. first_token_s and total_s: from the request's arrival.
    """

    queue_s: float = 0.0
    tokenise_s: float = 0.0
    plan_s: float = 0.0
    score_s: float = 0.0
    target_s: float = 0.0
    first_token_s: float
    total_s: float


def assemble(walls: Walls, score: ScoreTimes | None, target: TargetTimes | None) -> Timings:
    """All timings of a turn. score, target: what the services report; None where one was not asked.

    A service's clock may run a little ahead of ours: then rpc_s is 0 and other_s takes the
    difference.
    """
    score = score or ScoreTimes()
    target = target or TargetTimes()
    stages = {
        "queue_s": walls.queue_s + score.queue_s + target.queue_s,
        "tokenise_s": walls.tokenise_s,
        "plan_s": walls.plan_s,
        "score_restore_s": score.restore_s,
        "score_prefill_s": score.prefill_s,
        "score_queries_s": score.queries_s,
        "score_k_pass_s": score.k_pass_s,
        "score_select_s": score.select_s,
        "target_restore_s": target.restore_s,
        "protected_prefill_s": target.protected_prefill_s,
        "sparse_prefill_s": target.sparse_prefill_s,
        "dense_prefill_s": target.dense_prefill_s,
        "kick_off_s": target.kick_off_s,
        "rpc_s": max(walls.score_s - score.total_s, 0.0)
        + max(walls.target_s - target.first_token_s, 0.0),
    }
    return Timings(
        **stages,
        other_s=walls.first_token_s - sum(stages.values()),
        time_to_first_token_s=walls.first_token_s,
        decode_s=walls.total_s - walls.first_token_s,
        total_s=walls.total_s,
    )


assert {f"{stage}_s" for stage in STAGES} <= {field.name for field in fields(Timings)}
