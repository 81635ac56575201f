"""One sandbox of a node: a box with the environment of its commands, its clock and its network."""

from __future__ import annotations

import asyncio
import posixpath
from collections.abc import Mapping
from contextlib import suppress

from shoal.errors import FileExists, InvalidRequest, LimitExceeded, NotFound, SandboxGone
from shoal.node.accounts import ROOT, Account, find_account
from shoal.node.commands import Command, check
from shoal.node.files import Files
from shoal.node.interface import CommandRequest, CreateRequest
from shoal.node.marks import Marks
from shoal.node.networks import SandboxNetwork
from shoal.node.watch import Watch
from shoal.sandbox.channel import Flag, Request
from shoal.sandbox.interface import Box
from shoal.sandbox.values import encode_list
from shoal.types import Result, SandboxInfo

_TERM = {"TERM": "xterm-256color"}
_ACCOUNTS_MAX = 1 << 20
"""Bytes of /etc/passwd and of /etc/group that are read; a sandbox may have made anything of them."""
_NO_ACCOUNTS = (NotFound, FileExists, InvalidRequest, LimitExceeded)


class Sandbox:
    """What the node knows of a live sandbox."""

    def __init__(
        self,
        box: Box,
        info: SandboxInfo,
        request: CreateRequest,
        environment: Mapping[str, str],
        network: SandboxNetwork | None,
    ) -> None:
        """`environment`: of the image and layers, under that of the request."""
        self.box = box
        self.info = info
        self.network = network
        self.clock: asyncio.TimerHandle | None = None
        self.commands: dict[int, Command] = {}
        self.watches: dict[int, Watch] = {}
        self.marks = Marks()
        self._request = request
        self._environment = {**environment, **request.env}
        self._encoded: dict[Account, bytes] = {}
        self._shell = "/bin/bash"

    async def start(self, request: CommandRequest, *, streamed: bool) -> Command:
        """Starts a command; returns when init has it or refuses."""
        check(request)
        account = await self.account(self._request.user if request.user is None else request.user)
        command = Command(request, streamed=streamed)
        command.start(self.box, self._wire(request, account, streamed=streamed))
        if request.stdin is not None:
            feeding = asyncio.get_running_loop().create_task(self._feed(command, request))
            command.process.ended.add_done_callback(lambda _: feeding.cancel())
        return command

    async def _feed(self, command: Command, request: CommandRequest) -> None:
        await command.process.send_input(request.stdin or b"")
        if not request.feed:
            command.process.close_input()

    async def run(self, request: CommandRequest) -> Result:
        """Starts a command and waits for its end. If the caller gives up, all it started is killed."""
        try:
            return await self._run(request)
        except NotFound:
            if not isinstance(request.cmd, str) or self._shell == "/bin/sh" or not await self._lacks_bash():
                raise
        self._shell = "/bin/sh"
        return await self._run(request)

    async def _run(self, request: CommandRequest) -> Result:
        command = await self.start(request, streamed=False)
        try:
            return await command.wait()
        except asyncio.CancelledError:
            command.process.kill(9, tree=True)
            raise

    async def _lacks_bash(self) -> bool:
        return not await self.files(ROOT).exists(self._shell)

    def _wire(self, request: CommandRequest, account: Account, *, streamed: bool) -> Request:
        argv = [self._shell, "-c", request.cmd] if isinstance(request.cmd, str) else list(request.cmd)
        flags = Flag.STDIN if request.stdin is not None or request.feed else Flag.NONE
        cols, rows = request.terminal or (0, 0)
        if request.terminal is not None:
            flags |= Flag.TTY
        if streamed:
            flags |= Flag.REPORT_PID
        cwd = posixpath.join(self._request.cwd, request.cwd or "")
        return Request(
            argv,
            self._env(request, account),
            cwd,
            account.uid,
            account.gid,
            account.groups,
            flags,
            rows,
            cols,
        )

    def _env(self, request: CommandRequest, account: Account) -> bytes:
        """Of the account, the sandbox and the call, in that order; encoded once for calls that add nothing."""
        terminal = _TERM if request.terminal else {}
        if not request.env and not terminal and account in self._encoded:
            return self._encoded[account]
        env = {**account.environment(), **terminal, **self._environment, **request.env}
        encoded = encode_list([f"{name}={value}" for name, value in env.items()])
        if not request.env and not terminal:
            self._encoded = {account: encoded}
        return encoded

    async def account(self, user: str | int | None) -> Account:
        if user is None or user in ("root", 0):
            return ROOT
        if not isinstance(user, (str, int)) or isinstance(user, bool) or user == "":
            raise InvalidRequest("user", f"takes a name or a number, not {user!r}")
        files = self.files(ROOT)
        texts = []
        for path in ("/etc/passwd", "/etc/group"):
            try:
                texts.append(await files.read(path, limit=_ACCOUNTS_MAX))
            except _NO_ACCOUNTS:
                texts.append(b"")
        return find_account(user, *texts)

    def files(self, account: Account) -> Files:
        return Files(self.box, account, self._request.cwd)

    def command(self, id: int) -> Command:
        try:
            return self.commands[id]
        except KeyError:
            raise NotFound(f"sandbox {self.info.id} has no command {id}") from None

    def watch(self, id: int) -> Watch:
        try:
            return self.watches[id]
        except KeyError:
            raise NotFound(f"sandbox {self.info.id} has no watch {id}") from None

    async def close(self) -> None:
        """After its end: what of it is on our side."""
        if self.clock is not None:
            self.clock.cancel()
        self.commands.clear()
        self.watches.clear()
        if self.network is not None:
            with suppress(SandboxGone):
                await self.network.close()
