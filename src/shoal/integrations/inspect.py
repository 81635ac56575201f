"""A sandbox for inspect_ai: `sandbox="shoal"` in a task. Each sample has a fresh one, that ends with the sample."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any, Final, Literal, Self, overload

import yaml
from inspect_ai.util import (
    ExecResult,
    OutputLimitExceededError,
    SandboxEnvironment,
    SandboxEnvironmentConfigType,
    SandboxEnvironmentLimits,
    SandboxUnavailableError,
    SandboxUserUnsupportedError,
    sandboxenv,
)
from pydantic import BaseModel, ConfigDict

from shoal.errors import (
    FileExists,
    Interrupted,
    InvalidRequest,
    LimitExceeded,
    NotFound,
    PermissionDenied,
    PlatformError,
    SandboxGone,
    ShoalError,
)
from shoal.sdk import AsyncSandbox
from shoal.types import NetworkPolicy, Result

_SANDBOXES_FOR_A_PROCESSOR: Final = 4
_NO_PROGRAM: Final = 127
_NOT_RUN: Final = 126
"""Exit codes of a shell for a program that is not there, and one that cannot be run."""


class ShoalConfig(BaseModel):
    """What a task's sandboxes are made of; as in `shoal.Sandbox.create`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    image: str = "host"
    layers: tuple[str, ...] = ()
    workspace: str | None = None
    profile: str = "basic"
    network: str | None = None
    allow: tuple[str, ...] = ()
    """Names that may be reached, in place of a `network` with a name of its own."""
    env: dict[str, str] = {}
    cwd: str = "/workspace"
    user: str | None = None
    """Who runs commands and reads and writes files. None: "user", and root where the node can't have other users."""
    tier: str = "namespace"

    def __hash__(self) -> int:
        """inspect_ai groups samples by it."""
        return hash(self.model_dump_json())

    @classmethod
    def read(cls, config: SandboxEnvironmentConfigType | None) -> Self:
        """From what a task gives: nothing, an object of this class, or the path of a YAML file."""
        if config is None:
            return cls()
        if isinstance(config, str):
            return cls.model_validate(yaml.safe_load(Path(config).read_text()) or {})
        return cls.model_validate(config.model_dump())


@sandboxenv(name="shoal")
class ShoalSandboxEnvironment(SandboxEnvironment):
    """One sandbox. `exec` runs a command once: a time limit that was reached is not tried again."""

    def __init__(self, box: AsyncSandbox, user: str) -> None:
        super().__init__()
        self._box = box
        self._user = user

    @classmethod
    async def sample_init(
        cls,
        task_name: str,
        config: SandboxEnvironmentConfigType | None,
        metadata: dict[str, str],  # noqa: ARG003
    ) -> dict[str, SandboxEnvironment]:
        wanted = ShoalConfig.read(config)
        box = await AsyncSandbox.create(
            image=wanted.image,
            layers=wanted.layers,
            workspace=wanted.workspace,
            profile=wanted.profile,
            network=NetworkPolicy(allow=wanted.allow) if wanted.allow else wanted.network,
            env=wanted.env,
            cwd=wanted.cwd,
            tier=wanted.tier,
            ttl=None,  # it ends with the sample, which may take as long as it likes, and with this process
            metadata={"inspect.task": task_name},
        )
        try:
            return {"default": cls(box, wanted.user or await _usual_user(box))}
        except BaseException:
            await box.kill()
            raise

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,  # noqa: ARG003
        config: SandboxEnvironmentConfigType | None,  # noqa: ARG003
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,  # noqa: ARG003
    ) -> None:
        for environment in environments.values():
            await environment.as_type(cls).kill()

    @classmethod
    def default_concurrency(cls) -> int | None:
        return _SANDBOXES_FOR_A_PROCESSOR * (os.cpu_count() or 1)

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> BaseModel:
        return ShoalConfig.model_validate(config)

    async def kill(self) -> None:
        await self._box.kill()

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,  # noqa: ARG002
        concurrency: bool = True,  # noqa: ARG002
    ) -> ExecResult[str]:
        try:
            result = await self._box.commands.run(
                cmd,
                stdin=input,
                cwd=cwd,
                env=env,
                user=user or self._user,
                timeout=timeout,
                output_limit=SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE,
            )
        except (NotFound, InvalidRequest, Interrupted) as error:
            return _not_run(error)
        except ShoalError as error:
            raise _translated(error, cmd[0]) from error
        return _plain(result, cmd)

    async def write_file(self, file: str, contents: str | bytes) -> None:
        try:
            await self._box.files.write(file, contents, user=self._user)
        except ShoalError as error:
            raise _translated(error, file) from error

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...
    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...

    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        limit = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE
        try:
            data = await self._box.files.read(file, "bytes", limit=limit, user=self._user)
        except LimitExceeded as error:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None) from error
        except ShoalError as error:
            raise _translated(error, file) from error
        return data.decode() if text else data


async def _usual_user(box: AsyncSandbox) -> str:
    """Not root where it can be helped: what a file's mode forbids is then forbidden."""
    try:
        await box.commands.run(["true"], user="user")
    except InvalidRequest:
        return "root"
    return "user"


def _plain(result: Result, cmd: list[str]) -> ExecResult[str]:
    if result.limit == "timeout":
        raise TimeoutError(f"{cmd[0]}: ended after {result.duration:.1f} s, its time limit")
    if result.truncated:
        raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR, result.stdout)
    code = 128 + (result.signal or 0) if result.exit_code is None else result.exit_code
    return ExecResult(code == 0, code, result.stdout, result.stderr)


def _not_run(error: NotFound | InvalidRequest | Interrupted) -> ExecResult[str]:
    """What a shell would say of a command that could not be started."""
    if isinstance(error, InvalidRequest) and error.field == "user":
        raise SandboxUserUnsupportedError(str(error)) from error
    return ExecResult(False, _NO_PROGRAM if isinstance(error, NotFound) else _NOT_RUN, "", f"{error}\n")


def _translated(error: ShoalError, name: str) -> Exception:
    """The error that inspect_ai wants for it."""
    match error:
        case NotFound():
            return FileNotFoundError(errno.ENOENT, str(error), name)
        case FileExists():
            return IsADirectoryError(errno.EISDIR, str(error), name)
        case PermissionDenied():
            return PermissionError(errno.EACCES, str(error), name)
        case SandboxGone() | PlatformError():
            return SandboxUnavailableError(str(error))
        case InvalidRequest():
            return OSError(errno.EINVAL, str(error), name)
    return error
