"""The target's environment."""

from __future__ import annotations

import pytest

from serving.settings import SettingsError, load_settings
from target_service.settings import TargetSettings


def test_pages_default_to_what_holds_the_tokens() -> None:
    chosen = {"SPECPREFILL_TARGET_MODEL_DIR": "m", "SPECPREFILL_TARGET_PAGE_TOKENS": "64"}
    assert load_settings(TargetSettings, chosen).pages == 1024
    uneven = chosen | {"SPECPREFILL_TARGET_KV_TOKENS": "65"}
    assert load_settings(TargetSettings, uneven).pages == 2
    assert load_settings(TargetSettings, uneven | {"SPECPREFILL_TARGET_KV_PAGES": "7"}).pages == 7


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PREFILL_CHUNK_TOKENS", "0"),
        ("DTYPE", "float16"),
        ("JOBS_MAX", "many"),
        ("DRAFT_LAYERS", "2"),
    ],
)
def test_a_bad_value_or_an_unknown_name_is_named(name: str, value: str) -> None:
    variable = f"SPECPREFILL_TARGET_{name}"
    with pytest.raises(SettingsError, match=variable):
        load_settings(TargetSettings, {"SPECPREFILL_TARGET_MODEL_DIR": "m", variable: value})
