"""The scorer's own settings."""

import pytest

from scorer_service.settings import ScorerSettings
from serving.settings import SettingsError, load_settings

MODEL = {"SPECPREFILL_SCORER_MODEL_DIR": "models/draft"}


def test_the_model_directory_is_all_that_is_required() -> None:
    settings = load_settings(ScorerSettings, MODEL)
    assert settings.draft_layers is None
    with pytest.raises(SettingsError, match="SPECPREFILL_SCORER_MODEL_DIR is required"):
        load_settings(ScorerSettings, {})


def test_pages_hold_kv_tokens_unless_they_are_given() -> None:
    sizes = {"SPECPREFILL_SCORER_KV_TOKENS": "1000", "SPECPREFILL_SCORER_PAGE_TOKENS": "64"}
    assert load_settings(ScorerSettings, {**MODEL, **sizes}).pages == 16
    given = {**MODEL, **sizes, "SPECPREFILL_SCORER_KV_PAGES": "7"}
    assert load_settings(ScorerSettings, given).pages == 7


def test_a_value_out_of_bounds_stops_the_start() -> None:
    bad = {**MODEL, "SPECPREFILL_SCORER_DRAFT_LAYERS": "0"}
    with pytest.raises(SettingsError, match="SPECPREFILL_SCORER_DRAFT_LAYERS"):
        load_settings(ScorerSettings, bad)
