"""Every error that Shoal raises, as one tree.

    ShoalError
    ├── InvalidRequest          the call itself is wrong; `field` names the argument
    ├── NotFound                a path, layer, command or sandbox that is not there
    ├── PermissionDenied        refused by the sandbox's file system or a policy
    ├── FileExists              something is there already, or of another kind (a directory for a file)
    ├── CapacityError           no room now; `retry_after` seconds
    ├── SandboxGone             the sandbox has ended; `reason` says why
    ├── CommandFailed           `check=True` and the command did not exit with 0; carries `result`
    ├── LimitExceeded           what a sandbox holds goes past what the caller is ready to take; `limit` names it
    ├── OutputLost              output asked for too late is not kept any more; `available` says where it goes on
    ├── SessionClosed           the shell of a session has ended; `reason` says how
    ├── Interrupted             a process or a limit of the sandbox ended or stopped an operation in it
    ├── Unsupported             this tier, kernel or version can't do it; the message names the way out
    ├── BuildFailed             an environment or image could not be built; carries the whole `log`
    └── PlatformError           Shoal or the machine failed, not the code in the sandbox
        ├── SetupFailed         a step of a sandbox's set-up failed; names the step, its arguments and errno
        ├── DigestMismatch      bytes that are not what their name promises
        └── StorageFull         no bytes or no inodes left where Shoal keeps its data

`code` is stable: it is what stands on the wire and in logs.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from shoal.types import Result


class ShoalError(Exception):
    """The root. `code` is a stable, machine-readable name."""

    code: ClassVar[str] = "error"


class InvalidRequest(ShoalError):
    """An argument is wrong. `field` names it as the caller wrote it."""

    code = "invalid_request"

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class NotFound(ShoalError):
    """What was named does not exist."""

    code = "not_found"


class PermissionDenied(ShoalError):
    """The sandbox's file system, or a policy, refuses."""

    code = "permission_denied"


class FileExists(ShoalError):
    """Something is in the way: it exists already, or is of another kind than the call needs."""

    code = "file_exists"


class CapacityError(ShoalError):
    """No room at the moment. Try again after `retry_after` seconds."""

    code = "capacity"

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class SandboxGone(ShoalError):
    """The sandbox has ended. `reason`: "killed", "lease_expired", "lost", "init_died", "audit_lost" or
    "node_closed"."""

    code = "sandbox_gone"

    def __init__(self, sandbox: str, reason: str) -> None:
        super().__init__(f"sandbox {sandbox} is gone: {reason}")
        self.sandbox = sandbox
        self.reason = reason


class CommandFailed(ShoalError):
    """A command run with `check=True` did not exit with 0."""

    code = "command_failed"

    def __init__(self, result: Result) -> None:
        how = f"signal {result.signal}" if result.exit_code is None else f"exit code {result.exit_code}"
        tail = result.stderr[-2000:].strip()
        super().__init__(f"command ended with {how}" + (f": {tail}" if tail else ""))
        self.result = result


class LimitExceeded(ShoalError):
    """What a sandbox holds or sends is more than its caller takes. `limit` is the number that was passed."""

    code = "limit_exceeded"

    def __init__(self, what: str, limit: int) -> None:
        super().__init__(f"{what}: more than {limit}")
        self.limit = limit


class OutputLost(ShoalError):
    """The output at `offset` is not kept any more; what is starts at `available`."""

    code = "output_lost"

    def __init__(self, offset: int, available: int) -> None:
        super().__init__(f"output from {offset} on was asked for too late: kept is what starts at {available}")
        self.offset = offset
        self.available = available


class SessionClosed(ShoalError):
    """The shell of a session has ended: by itself (`exit`), by a signal, or because it stopped to answer."""

    code = "session_closed"

    def __init__(self, reason: str) -> None:
        super().__init__(f"the session's shell has ended: {reason}; `box.shell()` starts another")
        self.reason = reason


class Interrupted(ShoalError):
    """Something we did inside was killed or stopped by what runs there, or by a limit. No fault of the platform."""

    code = "interrupted"


class Unsupported(ShoalError):
    """Not possible with this tier, kernel, privilege or version of Shoal."""

    code = "unsupported"


class BuildFailed(ShoalError):
    """An environment or image could not be built. `log` is everything the build printed."""

    code = "build_failed"

    def __init__(self, message: str, log: str) -> None:
        super().__init__(message)
        self.log = log


class PlatformError(ShoalError):
    """Shoal or the machine failed; what ran in the sandbox is not to blame."""

    code = "platform_error"


class SetupFailed(PlatformError):
    """One step of a plan failed. Nothing of the sandbox is left."""

    code = "setup_failed"

    def __init__(self, step: str, errno: int, detail: str = "") -> None:
        super().__init__(f"{step}: {os.strerror(errno)}" + (f" ({detail})" if detail else ""))
        self.step = step
        self.errno = errno
        self.detail = detail


class DigestMismatch(PlatformError):
    """Bytes that are not what their digest promises. They were refused."""

    code = "digest_mismatch"

    def __init__(self, what: str, expected: str, found: str) -> None:
        super().__init__(f"{what}: expected sha256 {expected}, found {found}")
        self.what = what
        self.expected = expected
        self.found = found


class StorageFull(PlatformError):
    """No bytes or inodes left on the file system that holds Shoal's data."""

    code = "storage_full"
