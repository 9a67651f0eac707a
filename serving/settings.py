"""Settings of a service: frozen, bounded, read once from variables with the service's prefix."""

from __future__ import annotations

import difflib
import ipaddress
import sys
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, SecretBytes, SecretStr, ValidationError, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from serving import channel

EXIT_BAD_SETTINGS = 2
VALUE_CHARS_MAX = 80

Port = Annotated[int, Field(ge=0, le=65535)]


class ServiceSettings(BaseSettings):
    """What every service has. A service's class adds its fields and the prefix:

        class ScorerSettings(ServiceSettings):
            model_config = SettingsConfigDict(env_prefix="SPECPREFILL_SCORER_")
            model_dir: Path
            lookahead_tokens_max: int = Field(default=64, ge=1, le=1024)

    Port 0 lets the operating system choose; the chosen ports are in the log's "serving" event.
    Constructing the class reads no environment: load_settings does.
    """

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        allow_inf_nan=False,
        # Fields may be called model_dir.
        protected_namespaces=(),
    )

    host: str = Field(default="127.0.0.1", min_length=1)
    port: Port = 0
    metrics_host: str = Field(default="127.0.0.1", min_length=1)
    metrics_port: Port = 0
    # Nothing here authenticates callers yet, so a host that others can reach is a decision.
    allow_unauthenticated_network: bool = False
    reflection: bool = True
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    message_bytes_max: int = Field(default=channel.MESSAGE_BYTES_MAX, ge=4096, le=2**30)
    # Requests in work or waiting; health checks are not counted.
    concurrent_rpcs_max: int = Field(default=256, ge=1, le=65536)
    keepalive_interval_s: float = Field(default=channel.KEEPALIVE_INTERVAL_S, ge=0.1, le=7200)
    keepalive_timeout_s: float = Field(default=channel.KEEPALIVE_TIMEOUT_S, ge=0.1, le=600)
    # How often clients may ping; their interval must not be shorter.
    keepalive_interval_min_s: float = Field(
        default=channel.KEEPALIVE_INTERVAL_MIN_S, ge=0.05, le=7200
    )

    # From SIGTERM to the closed listener: the time a load balancer needs to see NOT_SERVING.
    drain_s: float = Field(default=0.0, ge=0, le=600)
    # After that, the time running requests have to finish.
    grace_s: float = Field(default=30.0, ge=0, le=3600)
    # And at last, the time for closing the model and the channels.
    stop_s: float = Field(default=10.0, ge=0.1, le=600)

    @model_validator(mode="after")
    def _network_is_a_decision(self) -> Self:
        for name in ("host", "metrics_host"):
            if not self.allow_unauthenticated_network and not _is_loopback(getattr(self, name)):
                raise ValueError(
                    f"{name} {getattr(self, name)!r} is reachable from the network and callers are"
                    " not authenticated: set allow_unauthenticated_network to accept that"
                )
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)


class SettingsError(ValueError):
    """One line: the name, its value and what is allowed."""


S = TypeVar("S", bound=ServiceSettings)


def load_settings(cls: type[S], environ: Mapping[str, str]) -> S:
    """Settings from the variables of `environ` that start with the class's prefix.

    Raises SettingsError for an unknown name with the prefix, a missing or a bad value.
    """
    prefix = _prefix(cls)
    given = {name: value for name, value in environ.items() if name.startswith(prefix)}
    known = {_variable(cls, field): field for field in cls.model_fields}
    unknown = [_unknown(name, known) for name in sorted(given) if name not in known]
    if unknown:
        raise SettingsError("; ".join(unknown))
    try:
        return cls.model_validate({known[name]: value for name, value in given.items()})
    except ValidationError as error:
        raise SettingsError("; ".join(_lines(cls, error))) from None


def load_settings_or_exit(cls: type[S], environ: Mapping[str, str]) -> S:
    """load_settings for a __main__: a refusal is one line on stderr and exit code 2."""
    try:
        return load_settings(cls, environ)
    except SettingsError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(EXIT_BAD_SETTINGS) from None


def describe(settings: ServiceSettings) -> dict[str, Any]:
    """Every setting with its value, ready for JSON; secrets are masked."""
    return settings.model_dump(mode="json")


def _prefix(cls: type[ServiceSettings]) -> str:
    prefix = cls.model_config.get("env_prefix")
    assert prefix, f"{cls.__name__} has no env_prefix"
    return prefix


def _variable(cls: type[ServiceSettings], field: str) -> str:
    return _prefix(cls) + field.upper()


def _unknown(name: str, known: Mapping[str, str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f", did you mean {close[0]}?" if close else ""
    return f"{name} is not a setting of this service{hint}"


def _lines(cls: type[ServiceSettings], error: ValidationError) -> list[str]:
    return [
        _line(cls, problem) for problem in error.errors(include_url=False, include_context=False)
    ]


def _line(cls: type[ServiceSettings], problem: Mapping[str, Any]) -> str:
    message = problem["msg"].removeprefix("Value error, ")
    location = problem["loc"]
    if not location:
        return _with_variables(cls, message)
    name, field = _variable(cls, str(location[0])), cls.model_fields[str(location[0])]
    if problem["type"] == "missing":
        return f"{name} is required"
    shown = (
        "a secret"
        if _is_secret(field.annotation)
        else repr(str(problem["input"])[:VALUE_CHARS_MAX])
    )
    allowed = _allowed(field.metadata)
    return f"{name} is {shown}: {message}" + (f" (allowed: {allowed})" if allowed else "")


def _with_variables(cls: type[ServiceSettings], message: str) -> str:
    """A rule over several fields names fields; the reader sets variables."""
    words = (
        _variable(cls, word) if word in cls.model_fields else word for word in message.split(" ")
    )
    return " ".join(words)


def _allowed(metadata: list[Any]) -> str:
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    bounds = [
        f"{sign} {getattr(bound, name)}"
        for bound in metadata
        for name, sign in signs.items()
        if getattr(bound, name, None) is not None
    ]
    return " and ".join(bounds)


def _is_secret(annotation: Any) -> bool:
    return any(secret.__name__ in str(annotation) for secret in (SecretStr, SecretBytes))


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
