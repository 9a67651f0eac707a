"""How many of the lookahead's queries count."""

import pytest

from scorer_service.lookahead import effective_queries

END = frozenset({7, 9})


@pytest.mark.parametrize(
    ("decoded", "queries"),
    [
        ([], 1),  # the last prompt token's own query
        ([1, 2, 3], 4),
        ([7, 2, 3], 1),
        ([1, 2, 9], 3),
        ([1, 9, 7], 2),
    ],
)
def test_if_decoded_token_j_is_an_end_token_j_queries_count(
    decoded: list[int], queries: int
) -> None:
    assert effective_queries(decoded, END) == queries


def test_without_end_tokens_every_query_counts() -> None:
    assert effective_queries([7, 9], frozenset()) == 3
