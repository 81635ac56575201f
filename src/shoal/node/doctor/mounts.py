"""Probes of the mount interface, overlayfs, id-mapped mounts and what else can be mounted."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from shoal.node.doctor import calls, namespaces
from shoal.node.doctor.finding import Probe, Scene, Shortfall

MAPPED = 1000000


def tmpfs() -> int:
    """The root of a new tmpfs that is attached nowhere."""
    context = calls.fsopen("tmpfs")
    calls.set_string(context, "size", "256k")
    mounted = calls.fsmount(context)
    os.close(context)
    return mounted


def put(folder: int, name: str, content: bytes) -> None:
    descriptor = os.open(name, os.O_WRONLY | os.O_CREAT, 0o644, dir_fd=folder)
    os.write(descriptor, content)
    os.close(descriptor)


def content(folder: int, name: str) -> bytes:
    descriptor = os.open(name, os.O_RDONLY, dir_fd=folder)
    try:
        return os.read(descriptor, 64)
    finally:
        os.close(descriptor)


def listed(folder: int) -> list[str]:
    """Names in a folder. The descriptor of a detached mount is O_PATH and cannot be read itself."""
    descriptor = os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=folder)
    try:
        return os.listdir(descriptor)
    finally:
        os.close(descriptor)


def stage() -> None:
    """A mount namespace of one's own with an empty tmpfs on /tmp."""
    namespaces.enter(calls.NEWNS)
    calls.private_mounts()
    calls.mount("tmpfs", "/tmp", "tmpfs", data="size=256k")


def mount_interface(_: Scene) -> str:
    stage()
    Path("/tmp/a").mkdir()
    tree = tmpfs()
    put(tree, "file", b"shoal")
    calls.move_mount(tree, "/tmp/a")
    copy = calls.open_tree("/tmp/a")
    calls.mount_setattr(copy, calls.ATTR_RDONLY)
    try:
        put(copy, "other", b"")
    except OSError as error:
        if error.errno == errno.EROFS:
            return "fsopen, fsconfig, fsmount, move_mount, open_tree and mount_setattr work"
    raise Shortfall("mount_setattr made a mount read-only and it can still be written")


def overlay_by_name(_: Scene) -> str:
    stage()
    for name in ("lower", "upper", "work", "root"):
        Path("/tmp", name).mkdir()
    Path("/tmp/lower/file").write_bytes(b"shoal")
    layers = "lowerdir=/tmp/lower,upperdir=/tmp/upper,workdir=/tmp/work,userxattr"
    calls.mount("overlay", "/tmp/root", "overlay", data=layers)
    root = os.open("/tmp/root", os.O_RDONLY)
    return _written_over(root)


def overlay_by_descriptor(_: Scene) -> str:
    namespaces.enter(calls.NEWNS)
    lower, upper, context = tmpfs(), tmpfs(), calls.fsopen("overlay")
    put(lower, "file", b"shoal")
    calls.set_flag(context, "userxattr")
    calls.set_fd(context, "lowerdir+", lower)
    for name in ("upper", "work"):
        os.mkdir(name, dir_fd=upper)
        calls.set_fd(context, f"{name}dir", os.open(name, os.O_PATH, dir_fd=upper))
    return _written_over(calls.fsmount(context)) + ", all of it detached"


def detached_copy(_: Scene) -> str:
    namespaces.enter(calls.NEWNS)
    folder = tmpfs()
    put(folder, "file", b"shoal")
    copy = calls.copy_tree(folder)
    if content(copy, "file") != b"shoal":
        raise Shortfall("a copy of a detached mount is empty")
    return "a detached mount can be copied"


def _written_over(root: int) -> str:
    """Reads through to the lower layer, deletes there, and writes."""
    if os.fstatvfs(root).f_flag & os.ST_RDONLY:
        raise Shortfall("the overlay was mounted, but read-only")
    if content(root, "file") != b"shoal":
        raise Shortfall("the overlay does not show its lower layer")
    os.unlink("file", dir_fd=root)
    put(root, "new", b"x")
    if (names := listed(root)) != ["new"]:
        raise Shortfall(f"after a removal and a write the overlay shows {names}")
    return "reads, removes and writes over a lower layer"


def tmpfs_attributes(_: Scene) -> str:
    namespaces.enter(calls.NEWNS)
    folder = tmpfs()
    os.mkdir("upper", dir_fd=folder)
    upper = os.open("upper", os.O_RDONLY, dir_fd=folder)
    os.setxattr(upper, "user.overlay.opaque", b"y")
    if os.getxattr(upper, "user.overlay.opaque") != b"y":
        raise Shortfall("an attribute was set and reads differently")
    return "user.overlay.* can be set on a tmpfs"


def idmapped(path: str) -> str:
    """Maps the mount at `path` and looks whether the owner of that folder shows as mapped."""
    owner = os.stat(path).st_uid
    _require_root()
    if (shown := _owner_through(calls.open_tree(path), owner)) != MAPPED:
        raise Shortfall(f"the owner of {path} shows as {shown} through a mount mapped to {MAPPED}")
    return f"{path}: owner {owner} shows as {MAPPED}"


def _owner_through(tree: int, owner: int) -> int:
    with namespaces.child(calls.NEWUSER) as pid:
        Path(f"/proc/{pid}/uid_map").write_text(f"{owner} {MAPPED} 1\n")
        Path(f"/proc/{pid}/gid_map").write_text("0 1000000 65536\n")
        namespace = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY)
        calls.mount_setattr(tree, calls.ATTR_IDMAP, namespace)
    return os.fstat(tree).st_uid


def _require_root() -> None:
    if os.geteuid() != 0:
        raise Shortfall("only root can map the ids of a host mount", fix=ROOT_FIX)


def idmapped_data(scene: Scene) -> str:
    return idmapped(str(scene.folder))


def idmapped_usr(_: Scene) -> str:
    return idmapped("/usr")


def idmapped_tmpfs(_: Scene) -> str:
    _require_root()
    folder = tmpfs()
    if (shown := _owner_through(folder, 0)) != MAPPED:
        raise Shortfall(f"root shows as {shown} through a tmpfs mapped to {MAPPED}")
    return f"tmpfs: owner 0 shows as {MAPPED}"


def fuse(_: Scene) -> str:
    device = os.open("/dev/fuse", os.O_RDWR)
    stage()
    # Nobody answers on the device: the mount succeeds and must not be looked into.
    data = f"fd={device},rootmode=40000,user_id={os.geteuid()},group_id={os.getegid()}"
    calls.mount("probe", "/tmp", "fuse", data=data)
    calls.detach("/tmp")
    return "/dev/fuse opens and mounts"


OVERLAY_FIX = "Use Linux 6.13 or newer with CONFIG_OVERLAY_FS (sudo modprobe overlay), outside of another container."
IDMAP_FIX = "Use Linux 5.19 or newer; for the data folder: ext4, XFS or btrfs."
ROOT_FIX = "Run Shoal as root; as an ordinary user all sandboxes see files under that user's one id."

PROBES = (
    Probe(
        id="kernel.mount_api",
        title="new mount interface",
        run=mount_interface,
        missing="fail",
        why="Layers are held as detached mounts and handed over by descriptor: no mount is ever in the host's table.",
        fix="Use Linux 5.12 or newer; in a container, run it with --security-opt seccomp=unconfined.",
    ),
    Probe(
        id="kernel.overlayfs",
        title="overlayfs with userxattr",
        run=overlay_by_name,
        missing="fail",
        why="A sandbox's root is an overlay: read-only layers below, its own writable layer above.",
        fix=OVERLAY_FIX,
    ),
    Probe(
        id="kernel.overlayfs_descriptors",
        title="overlayfs layers by descriptor",
        run=overlay_by_descriptor,
        missing="fail",
        why="Hundreds of layers fit in one root, and none of them has to be mounted where anyone can see it.",
        fix=OVERLAY_FIX,
    ),
    Probe(
        id="kernel.detached_copies",
        title="copies of detached mounts",
        run=detached_copy,
        missing="fail",
        why="Every sandbox gets copies of its layers, mapped to its own ids; no layer is mounted where it shows.",
        fix="Use Linux 6.15 or newer.",
    ),
    Probe(
        id="kernel.overlayfs_unprivileged",
        title="overlayfs as an ordinary user",
        run=overlay_by_descriptor,
        as_user=True,
        why="Lets sandboxes have a writable root without root on the host. Root does not need it.",
        fix=OVERLAY_FIX,
    ),
    Probe(
        id="kernel.tmpfs_xattr",
        title="user attributes on tmpfs",
        run=tmpfs_attributes,
        missing="fail",
        why="An overlay marks replaced folders by them; without, deleted files come back.",
        fix="Use Linux 6.6 or newer with CONFIG_TMPFS_XATTR.",
    ),
    Probe(
        id="layers.idmap_data",
        title="id-mapped mounts of the data folder",
        run=idmapped_data,
        why="Files of a layer belong to root inside, whatever id range the sandbox has, without a copy.",
        fix=IDMAP_FIX,
    ),
    Probe(
        id="layers.idmap_usr",
        title="id-mapped mounts of /usr",
        run=idmapped_usr,
        why="The image `host` shows the machine's own /usr; unmapped, its files belong to nobody inside.",
        fix=IDMAP_FIX,
    ),
    Probe(
        id="layers.idmap_tmpfs",
        title="id-mapped mounts of tmpfs",
        run=idmapped_tmpfs,
        why="The writable layer then holds ids from 0 and can be frozen as it is.",
        fix="Use Linux 6.3 or newer, and run as root.",
    ),
    Probe(
        id="kernel.fuse",
        title="FUSE",
        run=fuse,
        missing="absent",
        why="Layers whose bytes are fetched only when they are read will come through it.",
        fix="sudo modprobe fuse; in a container, run it with --device /dev/fuse.",
    ),
)
