"""Client of the gateway, for people and programs. Needs neither torch nor the services' code."""

from client.client import AsyncClient, Client
from client.results import Delta, Event, Explanation, Finished, Progress, Reply, ServerInfo, Started

__all__ = [
    "AsyncClient",
    "Client",
    "Delta",
    "Event",
    "Explanation",
    "Finished",
    "Progress",
    "Reply",
    "ServerInfo",
    "Started",
]
