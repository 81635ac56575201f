"""One sandbox of a node: a box with the environment of its commands, its clock and its network."""

from __future__ import annotations

import asyncio
import functools
import posixpath
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import TypeVar

from shoal.errors import FileExists, InvalidRequest, LimitExceeded, NotFound, PermissionDenied, SandboxGone
from shoal.node import dialects
from shoal.node.accounts import ROOT, Account, find_account
from shoal.node.commands import Command, check
from shoal.node.files import Files
from shoal.node.interface import CommandRequest, CreateRequest, ShellRequest
from shoal.node.marks import Marks
from shoal.node.networks import SandboxNetwork
from shoal.node.register import Register
from shoal.node.shells import Shell, open_shell
from shoal.node.watch import Watch
from shoal.sandbox.channel import Exit, Flag, Request
from shoal.sandbox.interface import Box
from shoal.sandbox.values import encode_list
from shoal.types import Layer, Result, SandboxInfo

R = TypeVar("R")
T = TypeVar("T")

_TERM = {"TERM": "xterm-256color"}
_ENDED_SHELLS = 1024
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
        self.access = request.access
        """The policy in force."""
        self.clock: asyncio.TimerHandle | None = None
        self.layers: tuple[Layer, ...] = ()
        """Those that it holds in the store."""
        self.commands = Register()
        self._shells: dict[int, Shell] = {}
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
        command = Command(request, streamed=streamed, output=self.info.profile.output)
        wire = self._wire(request, account, streamed=streamed)
        command.start(self.box, wire)
        if self.access is not None:
            command.process.ended.add_done_callback(functools.partial(self._note, str(wire.argv[0])))
        if request.stdin is not None:
            feeding = asyncio.get_running_loop().create_task(self._feed(command, request))
            command.process.ended.add_done_callback(lambda _: feeding.cancel())
        return command

    def _note(self, program: str, ended: asyncio.Future[Exit]) -> None:
        error = None if ended.cancelled() else ended.exception()
        if isinstance(error, PermissionDenied):
            self.box.audit.add(time.time(), "denied", 0, program, str(error), allowed=False)

    async def _feed(self, command: Command, request: CommandRequest) -> None:
        await command.process.send_input(request.stdin or b"")
        if not request.feed:
            command.process.close_input()

    async def run(self, request: CommandRequest) -> Result:
        """Starts a command and waits for its end. If the caller gives up, all it started is killed."""
        if isinstance(request.cmd, str):
            return await self._by_shell(self._run, request)
        return await self._run(request)

    async def start_in_background(self, request: CommandRequest) -> Command:
        """Returns when it has become the program. If the caller gives up before, all it started is killed."""
        by_shell = isinstance(request.cmd, str)
        command = await (self._by_shell(self._start, request) if by_shell else self._start(request))
        self.commands.add(command)
        return command

    async def _start(self, request: CommandRequest) -> Command:
        command = await self.start(request, streamed=True)
        try:
            await asyncio.shield(command.process.pid)
        except asyncio.CancelledError:
            command.process.kill(9, tree=True)
            raise
        return command

    async def _run(self, request: CommandRequest) -> Result:
        command = await self.start(request, streamed=False)
        try:
            return await command.wait()
        except asyncio.CancelledError:
            command.process.kill(9, tree=True)
            raise

    async def _by_shell(self, step: Callable[[R], Awaitable[T]], request: R) -> T:
        """A step that starts the shell: once more where there is no bash, with sh."""
        try:
            return await step(request)
        except NotFound:
            if not await self._turns_to_sh():
                raise
        return await step(request)

    async def _turns_to_sh(self) -> bool:
        """Once, where there is no bash."""
        if self._shell == "/bin/sh" or await self.files(ROOT).exists(self._shell):
            return False
        self._shell = "/bin/sh"
        return True

    async def open_shell(self, request: ShellRequest) -> tuple[int, int]:
        """(id, pid of the shell)."""
        shell = await self._by_shell(self._open_shell, request)
        self._shells[shell.id] = shell
        self._forget_shells()
        return shell.id, shell.pid

    def _forget_shells(self) -> None:
        """The oldest of those that have ended."""
        ended = [id for id, shell in self._shells.items() if shell.closed is not None]
        for id in ended[:-_ENDED_SHELLS]:
            del self._shells[id]

    async def _open_shell(self, request: ShellRequest) -> Shell:
        startup = {**self._environment, **request.env}.get("BASH_ENV", "")
        # What bash reads at its start would run with the session's socket as its stdin; it is read as a first command.
        env = {**request.env, **({"BASH_ENV": ""} if startup else {})}
        command = CommandRequest(cmd=dialects.argv(self._shell), env=env, cwd=request.cwd, user=request.user)
        check(command)
        account = await self.account(self._request.user if request.user is None else request.user)
        wire = self._wire(command, account, streamed=True)
        return await open_shell(self.box, wire._replace(flags=wire.flags | Flag.SESSION), startup)

    def shell(self, id: int) -> Shell:
        try:
            return self._shells[id]
        except KeyError:
            raise NotFound(f"sandbox {self.info.id} has no session {id}") from None

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
        if (command := self.commands.find(id)) is None:
            raise NotFound(f"sandbox {self.info.id} has no command {id}, or it ended long ago")
        return command

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
