"""The rows of the table, as data: what is measured, how often, and with what beside it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from msgspec import Struct

from shoal.errors import InvalidRequest


class Row(Struct, frozen=True, kw_only=True):
    """One thing to measure."""

    name: str
    group: str
    """Rows of a group take turns, operation by operation, so that the machine's drift hits all of them alike."""
    unit: str
    about: str
    count: int
    quick: int
    """Samples of a whole and of a quick run."""
    warm: int = 5
    """Operations before the first that counts: caches fill, images are opened."""
    pause: float = 0.02
    """Seconds before each operation, in which the node makes ready what the last one used up."""
    peer: bool = False
    """Somebody else's way to do the same; measured when asked for."""
    fresh: bool = False
    """Each sample in a process of its own, since what the first leaves in memory would flatter the second."""


ROWS: Final = (
    Row(name="oneshot", group="start", unit="ms", count=200, quick=5, about="create, run true, kill"),
    Row(name="bwrap_oneshot", group="start", unit="ms", count=200, quick=5, peer=True, about="the same by bubblewrap"),
    Row(name="crun_oneshot", group="start", unit="ms", count=100, quick=3, peer=True, about="the same by crun"),
    Row(name="runc_oneshot", group="start", unit="ms", count=100, quick=3, peer=True, about="the same by runc"),
    Row(name="python_floor", group="exec", unit="ms", count=200, quick=5, about="posix_spawn of true, and wait"),
    Row(name="exec", group="exec", unit="ms", count=400, quick=5, about="true in a live sandbox"),
    Row(name="exec_shell", group="exec", unit="ms", count=200, quick=5, about="the same as text, by the shell"),
    Row(name="files_64k", group="exec", unit="ms", count=200, quick=5, about="write and read a file of 64 KiB"),
    Row(
        name="socket_copy", group="bulk", unit="MB/s", count=10, quick=1, warm=1,
        about="200 MB through a Unix socket to Python",
    ),
    Row(name="output_200m", group="bulk", unit="MB/s", count=10, quick=1, warm=1, about="200 MB through on_stdout"),
    Row(name="upload_64m", group="bulk", unit="MB/s", count=10, quick=1, warm=1, about="64 MiB into a sandbox"),
    Row(name="download_64m", group="bulk", unit="MB/s", count=10, quick=1, warm=1, about="64 MiB out of it"),
    Row(
        name="bulk_memory", group="bulk", unit="MiB", count=3, quick=1, warm=0, fresh=True,
        about="growth of the node by all three",
    ),
    Row(
        name="neighbour", group="neighbour", unit="ms", count=200, quick=5,
        about="exec beside a fork bomb, a memory hog and yes",
    ),
    Row(
        name="reap", group="reap", unit="left over", count=1, quick=1, warm=0,
        about="processes of commands that left a child behind",
    ),
    Row(name="oneshot_16", group="rate", unit="per second", count=5, quick=1, warm=1, about="oneshot, 16 at once"),
    Row(name="env_attach", group="env", unit="ms", count=100, quick=3, about="create with an environment less without"),
    Row(
        name="env_attach_unseen", group="env", unit="ms", count=5, quick=2, warm=0,
        about="the same in a slot that never had it",
    ),
    Row(name="env_create", group="env", unit="ms", count=100, quick=3, about="create with an environment"),
    Row(
        name="uv_hardlink", group="env", unit="ms", count=10, quick=1, warm=1, peer=True,
        about="uv installs the same, all cached, by hard links",
    ),
    Row(
        name="tar_unpack", group="env", unit="ms", count=5, quick=1, warm=1, peer=True,
        about="tar unpacks the same",
    ),
    Row(name="create_500", group="many", unit="s", count=3, quick=1, warm=0, fresh=True, about="until all live"),
    Row(name="idle", group="many", unit="MiB", count=3, quick=1, warm=0, fresh=True, about="memory of each of many"),
    Row(
        name="leftovers", group="many", unit="left over", count=1, quick=1, warm=0, fresh=True,
        about="what many at once and many cycles leave",
    ),
)  # fmt: skip


def choose(only: Collection[str] = (), *, peers: bool = False) -> list[Row]:
    """All rows, or those named; peers if asked for in general or by name. InvalidRequest names an unknown one."""
    names = [row.name for row in ROWS]
    if unknown := [name for name in only if name not in names]:
        raise InvalidRequest("only", f"no row {unknown[0]!r}; there are {', '.join(names)}")
    if only:
        return [row for row in ROWS if row.name in only]
    return [row for row in ROWS if peers or not row.peer]


def find(name: str) -> Row:
    return next(row for row in ROWS if row.name == name)


def interleave(counts: Sequence[tuple[str, int]]) -> list[str]:
    """Names, each as often as counted and spread evenly over the whole."""
    places = [((turn + 0.5) / count, name) for name, count in counts for turn in range(count)]
    return [name for _, name in sorted(places, key=lambda place: place[0])]
