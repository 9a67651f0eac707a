"""Settings from an environment: what is taken, what is refused, and what the refusal says."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import Field, SecretStr, ValidationError
from pydantic_settings import SettingsConfigDict

from serving.settings import (
    ServiceSettings,
    SettingsError,
    describe,
    load_settings,
    load_settings_or_exit,
)


class DemoSettings(ServiceSettings):
    model_config = SettingsConfigDict(env_prefix="SPECPREFILL_DEMO_")

    model_dir: Path = Path("models")
    draft_layers: int | None = Field(default=None, ge=1, le=512)
    keep_basis_points: int = Field(default=2000, ge=1, le=10000)
    token: SecretStr | None = Field(default=None, min_length=8)


class StrictSettings(ServiceSettings):
    model_config = SettingsConfigDict(env_prefix="SPECPREFILL_STRICT_")

    model_dir: Path


def refusal(environ: dict[str, str]) -> str:
    with pytest.raises(SettingsError) as caught:
        load_settings(DemoSettings, environ)
    return str(caught.value)


def test_values_come_from_the_given_environment_and_are_typed() -> None:
    settings = load_settings(
        DemoSettings,
        {
            "SPECPREFILL_DEMO_PORT": "7001",
            "SPECPREFILL_DEMO_MODEL_DIR": "some/dir",
            "SPECPREFILL_DEMO_DRAFT_LAYERS": "12",
            "SPECPREFILL_DEMO_REFLECTION": "false",
            "SPECPREFILL_DEMO_GRACE_S": "1.5",
        },
    )
    assert (settings.port, settings.model_dir, settings.draft_layers) == (
        7001,
        Path("some/dir"),
        12,
    )
    assert (settings.reflection, settings.grace_s) == (False, 1.5)


def test_an_empty_environment_gives_the_defaults() -> None:
    settings = load_settings(DemoSettings, {})
    assert (settings.host, settings.port, settings.metrics_port) == ("127.0.0.1", 0, 0)
    assert settings == DemoSettings()


def test_the_process_environment_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECPREFILL_DEMO_PORT", "7001")
    assert DemoSettings().port == load_settings(DemoSettings, {}).port == 0


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError):
        DemoSettings().port = 1


def test_an_unknown_name_with_the_prefix_is_refused_with_the_likely_one() -> None:
    message = refusal({"SPECPREFILL_DEMO_KEEP_BASIS_POINT": "3000"})
    assert "SPECPREFILL_DEMO_KEEP_BASIS_POINT is not a setting" in message
    assert "did you mean SPECPREFILL_DEMO_KEEP_BASIS_POINTS?" in message


def test_names_of_other_services_and_programs_are_ignored() -> None:
    load_settings(DemoSettings, {"SPECPREFILL_OTHER_X": "1", "PATH": "x", "SPECPREFILL_DEMO": "y"})


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("PORT", "65536", "allowed: >= 0 and <= 65535"),
        ("PORT", "http", "valid integer"),
        ("KEEP_BASIS_POINTS", "0", "allowed: >= 1 and <= 10000"),
        ("DRAFT_LAYERS", "0", "allowed: >= 1 and <= 512"),
        ("DRAFT_LAYERS", "", "valid integer"),
        ("GRACE_S", "nan", "finite"),
        ("GRACE_S", "inf", "finite"),
        ("GRACE_S", "-1", "allowed: >= 0 and <= 3600"),
        ("LOG_LEVEL", "loud", "'debug', 'info', 'warning' or 'error'"),
        ("REFLECTION", "perhaps", "valid boolean"),
        ("CONCURRENT_RPCS_MAX", "0", "allowed: >= 1"),
    ],
)
def test_a_bad_value_is_refused_in_one_line_with_name_value_and_range(
    name: str, value: str, says: str
) -> None:
    message = refusal({f"SPECPREFILL_DEMO_{name}": value})
    assert message.startswith(f"SPECPREFILL_DEMO_{name} is {value!r}: ")
    assert says in message
    assert "\n" not in message


def test_several_mistakes_are_named_together() -> None:
    message = refusal({"SPECPREFILL_DEMO_PORT": "-1", "SPECPREFILL_DEMO_DRAIN_S": "x"})
    assert "SPECPREFILL_DEMO_PORT" in message
    assert "SPECPREFILL_DEMO_DRAIN_S" in message


def test_a_missing_value_is_named() -> None:
    with pytest.raises(SettingsError, match=r"^SPECPREFILL_STRICT_MODEL_DIR is required$"):
        load_settings(StrictSettings, {})


@pytest.mark.parametrize("name", ["HOST", "METRICS_HOST"])
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]", "10.0.0.7", "example.com"])
def test_a_host_that_others_reach_must_be_a_decision(name: str, host: str) -> None:
    environ = {f"SPECPREFILL_DEMO_{name}": host}
    message = refusal(environ)
    assert message.startswith(f"SPECPREFILL_DEMO_{name} '{host}' is reachable")
    assert "set SPECPREFILL_DEMO_ALLOW_UNAUTHENTICATED_NETWORK" in message
    load_settings(DemoSettings, environ | {"SPECPREFILL_DEMO_ALLOW_UNAUTHENTICATED_NETWORK": "1"})


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost", "::1", "[::1]"])
def test_loopback_hosts_need_no_decision(host: str) -> None:
    assert load_settings(DemoSettings, {"SPECPREFILL_DEMO_HOST": host}).host == host


def test_secrets_are_masked_where_settings_are_shown() -> None:
    settings = load_settings(DemoSettings, {"SPECPREFILL_DEMO_TOKEN": "hunter2hunter2"})
    shown = describe(settings)
    assert "hunter2" not in str(shown)
    assert shown["keep_basis_points"] == 2000
    assert shown["model_dir"] == "models"
    assert "hunter2" not in refusal({"SPECPREFILL_DEMO_TOKEN": "hunter2"})


def test_a_main_exits_with_2_and_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load_settings_or_exit(DemoSettings, {"SPECPREFILL_DEMO_PORT": "many"})
    assert caught.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
