"""Options of gRPC channels and servers: message limits, keepalive, reconnection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

Options = Sequence[tuple[str, int]]

MESSAGE_BYTES_MAX = 16 * 2**20
KEEPALIVE_INTERVAL_S = 20.0
KEEPALIVE_TIMEOUT_S = 5.0
KEEPALIVE_INTERVAL_MIN_S = 10.0
# The transport's own maximum is two minutes, far longer than a service needs to restart.
RECONNECT_MIN_S = 0.2
RECONNECT_MAX_S = 3.0


class TransportSettings(Protocol):
    """What the options need of a service's settings."""

    @property
    def message_bytes_max(self) -> int: ...
    @property
    def keepalive_interval_s(self) -> float: ...
    @property
    def keepalive_timeout_s(self) -> float: ...
    @property
    def keepalive_interval_min_s(self) -> float: ...


def channel_options(settings: TransportSettings) -> Options:
    """Options of a channel that a service opens to another one."""
    return _client(
        message_bytes_max=settings.message_bytes_max,
        keepalive_interval_s=settings.keepalive_interval_s,
        keepalive_timeout_s=settings.keepalive_timeout_s,
    )


def server_options(settings: TransportSettings) -> Options:
    """Options of a service's server; its pings find clients that died without saying so."""
    return (
        ("grpc.max_receive_message_length", settings.message_bytes_max),
        ("grpc.max_send_message_length", settings.message_bytes_max),
        *_pings(settings.keepalive_interval_s, settings.keepalive_timeout_s),
        # Clients may ping this often. The similar key with "recv" in it does nothing.
        ("grpc.http2.min_ping_interval_without_data_ms", _ms(settings.keepalive_interval_min_s)),
        # Otherwise a second process binds the same port, unnoticed.
        ("grpc.so_reuseport", 0),
    )


def _client(
    *, message_bytes_max: int, keepalive_interval_s: float, keepalive_timeout_s: float
) -> Options:
    return (
        ("grpc.max_receive_message_length", message_bytes_max),
        ("grpc.max_send_message_length", message_bytes_max),
        *_pings(keepalive_interval_s, keepalive_timeout_s),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", _ms(RECONNECT_MIN_S)),
        ("grpc.min_reconnect_backoff_ms", _ms(RECONNECT_MIN_S)),
        ("grpc.max_reconnect_backoff_ms", _ms(RECONNECT_MAX_S)),
    )


def _pings(interval_s: float, timeout_s: float) -> Options:
    """Both timeouts: without ping_timeout a hung peer is found only after a minute."""
    return (
        ("grpc.keepalive_time_ms", _ms(interval_s)),
        ("grpc.keepalive_timeout_ms", _ms(timeout_s)),
        ("grpc.http2.ping_timeout_ms", _ms(timeout_s)),
        ("grpc.keepalive_permit_without_calls", 1),
    )


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


CLIENT_CHANNEL_OPTIONS: Options = _client(
    message_bytes_max=MESSAGE_BYTES_MAX,
    keepalive_interval_s=KEEPALIVE_INTERVAL_S,
    keepalive_timeout_s=KEEPALIVE_TIMEOUT_S,
)
