"""The network of a sandbox: none, or listeners in its namespace that an egress here answers by policy."""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Sequence
from itertools import groupby

from shoal.network.audit import Event
from shoal.network.egress import Egress
from shoal.network.index import PackageIndex
from shoal.network.namespace import Recipe, filtered, isolated
from shoal.network.policy import Policy, compile_policy
from shoal.sandbox.plan import NONE, Plan
from shoal.types import NetworkPolicy

_AUDIT_MAX = 4096


def network_plans(groups: int) -> dict[str, Plan]:
    """How a namespace of each kind is set up, for a tier whose sandboxes have so many group ids."""
    every = (0, groups - 1)
    return {"isolated": _plan(isolated(every)), "filtered": _plan(filtered(ping_groups=every))}


def _plan(recipe: Recipe) -> Plan:
    plan = Plan()
    folder = len(recipe.listeners) + 1
    for parent, settings in groupby(recipe.sysctls, lambda setting: setting[0].rpartition("/")[0]):
        # Looked up once: the more namespaces live, the longer the kernel takes for a name below /proc/sys/net.
        plan.add("open", folder, NONE, f"/proc/sys/net/{parent}", os.O_PATH | os.O_DIRECTORY)
        for path, value in settings:
            plan.add("write", folder, path.rpartition("/")[2], value)
    for protocol, message, acks in recipe.messages:
        plan.add("netlink", protocol, message, acks)
    for index, listener in enumerate(recipe.listeners):
        kind = socket.SOCK_STREAM if listener.kind == "tcp" else socket.SOCK_DGRAM
        plan.add("listen", index + 1, kind, listener.address, listener.port, listener.backlog)
        plan.add("send", index + 1)
    return plan


class SandboxNetwork:
    """The egress of one sandbox and what it decided."""

    def __init__(self, policy: Policy) -> None:
        self.events: deque[Event] = deque(maxlen=_AUDIT_MAX)
        self._policy = policy
        self._sockets: list[socket.socket] = []
        self._egress: Egress | None = None

    def start(self, listeners: Sequence[int]) -> None:
        """Serves the listeners of a filtered namespace; the descriptors stay the caller's."""
        self._sockets = [socket.socket(fileno=os.dup(listener)) for listener in listeners]
        self._egress = Egress(self._sockets, self._policy, self.events.append)
        self._egress.start()

    async def close(self) -> None:
        if self._egress is not None:
            await self._egress.aclose()
        for sock in self._sockets:
            sock.close()


def sandbox_network(network: str | NetworkPolicy | None, index: PackageIndex) -> SandboxNetwork | None:
    """None for no network at all. InvalidRequest or Unsupported as `compile_policy`."""
    if network is None:
        return None
    return SandboxNetwork(compile_policy(network, index.hosts()))
