"""PID 1: nobody inside looks into it, slows it, stops it or takes it down."""

from __future__ import annotations

import time

import pytest

import shoal
from shoal.node.interface import CommandRequest

from .intruder import SMALL, USERS, compiled, host_ids, init_pid, python, still_works, within, x86_64

pytestmark = pytest.mark.root

READ_ALL = """
found = {}
for name in ("mem", "environ", "maps", "smaps", "auxv", "io", "stack", "syscall", "personality", "pagemap", "map_files",
             "fd", "fdinfo", "timers"):
    path = f"/proc/1/{name}"
    if not os.path.lexists(path): continue
    def look():
        if os.path.isdir(path): os.listdir(path)
        else:
            with open(path, "rb", buffering=0) as file: file.read(16)
    found[name] = tried(look)
for name in ("exe", "root", "cwd", "ns/mnt", "ns/user", "ns/net", "ns/pid"):
    found[name] = tried(os.readlink, f"/proc/1/{name}"), tried(os.stat, f"/proc/1/{name}")
answer(found)
"""


@pytest.mark.parametrize("user", USERS)
def test_its_memory_files_and_namespaces_are_closed(calm: shoal.Sandbox, user: str) -> None:
    found = python(calm, READ_ALL, user)
    assert {"mem", "environ", "maps", "fd", "exe", "root", "cwd", "ns/mnt"} <= found.keys()
    refused = {"EACCES", "EPERM", "ENOENT"}
    allowed = {name: how for name, how in found.items() if not refused >= set([how] if isinstance(how, str) else how)}
    assert allowed == {}


@pytest.mark.parametrize("user", USERS)
def test_nothing_of_it_can_be_written(calm: shoal.Sandbox, user: str) -> None:
    code = """
    found = {}
    def write(path):  # a file of mode 0666 asks who writes, and not who opens
        with open(path, "wb", buffering=0) as file: file.write(b"1")
    for folder in ("/proc/1", "/proc/1/task/1", "/proc/1/attr"):
        for name in os.listdir(folder) if os.path.isdir(folder) else ():
            path = f"{folder}/{name}"
            if os.path.isfile(path) and not os.path.islink(path):
                found[path] = tried(write, path)
    answer(found)
    """
    found = python(calm, code, user)
    assert len(found) > 40
    assert {path for path, how in found.items() if how not in ("EACCES", "EPERM")} == set()


@x86_64
@pytest.mark.parametrize("user", USERS)
def test_it_cannot_be_traced_or_robbed(calm: shoal.Sandbox, user: str) -> None:
    code = """
    buffer = ctypes.create_string_buffer(16)
    class Vector(ctypes.Structure): _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
    mine, theirs = Vector(ctypes.addressof(buffer), 16), Vector(0x400000, 16)
    pidfd = os.pidfd_open(1)
    answer({
        "attach": call(101, 16, 1, 0, 0),
        "seize": call(101, 0x4206, 1, 0, 0),
        "process_vm_readv": call(310, 1, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0),
        "process_vm_writev": call(311, 1, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0),
        "pidfd_getfd": [call(438, pidfd, number, 0) for number in range(16)],
        "kcmp": call(312, 1, os.getpid(), 0, 0, 0),
        "process_madvise": call(440, pidfd, ctypes.byref(theirs), 1, 21, 0),
        "setns": [call(308, pidfd, flag) for flag in (0, 0x20000, 0x10000000, 0x40000000, 0x20000000)],
    })
    """
    found = python(calm, code, user)
    numbers = {how for group in found.values() for how in ([group] if isinstance(group, str) else group)}
    assert numbers <= {"EPERM", "EACCES", "EINVAL", "EBADF"}
    assert "EBADF" not in found["pidfd_getfd"], "it tells which descriptors there are"


@x86_64
def test_its_limits_and_priorities_stay(small: shoal.Sandbox) -> None:
    """Garbage in the upper half of an argument, which the kernel ignores, changes nothing."""
    code = """
    low, high, found = 1, (1 << 32) | 1, {}
    none = struct.pack("QQ", 0, 1)
    text = ctypes.create_string_buffer(64)
    for pid in (low, high):
        for kind in range(16):
            found[f"prlimit {kind} {pid}"] = call(302, pid, kind, none, 0)
        found[f"scheduler idle {pid}"] = call(144, pid, 5, struct.pack("i", 0))
        found[f"scheduler batch {pid}"] = call(144, pid, 3, struct.pack("i", 0))
        found[f"setparam {pid}"] = call(142, pid, struct.pack("i", 0))
        found[f"setattr {pid}"] = call(314, pid, struct.pack("IIQiIQQQ", 48, 5, 0, 19, 0, 0, 0, 0), 0)
        found[f"affinity {pid}"] = call(203, pid, 8, struct.pack("Q", 1))
        found[f"setpriority process {pid}"] = call(141, 0, pid, 19)
        found[f"ioprio process {pid}"] = call(251, 1, pid, 3 << 13)
        found[f"migrate_pages {pid}"] = call(256, pid, 8, text, text)
        found[f"move_pages {pid}"] = call(279, pid, 1, text, 0, text, 0)
    for top in (0, 1 << 32):
        found[f"setpriority user {top}"] = call(141, top | 2, 0, 19)
        found[f"ioprio user {top}"] = call(251, top | 3, 0, 3 << 13)
    answer(found)
    """
    pid = init_pid(small)
    before = _scheduling(pid)
    found = python(small, code)
    assert {what: how for what, how in found.items() if how != "EPERM"} == {}
    assert _scheduling(pid) == before
    still_works(small)


def _scheduling(pid: int) -> tuple[str, ...]:
    """What can be changed in a process from outside: its limits, nice value, policy and processors."""
    with (
        open(f"/proc/{pid}/stat") as stat,
        open(f"/proc/{pid}/limits") as limits,
        open(f"/proc/{pid}/status") as status,
    ):
        fields = stat.read().rpartition(")")[2].split()
        allowed = next(line for line in status if line.startswith("Cpus_allowed:"))
        return (fields[15], fields[16], fields[37], fields[38], allowed, limits.read())


@pytest.mark.parametrize("user", USERS)
def test_signals_do_not_reach_it(small: shoal.Sandbox, user: str) -> None:
    code = """
    for number in range(1, 65):
        if number not in (32, 33):
            tried(os.kill, 1, number)
    answer("done")
    """
    python(small, code, user)
    small.commands.run(["/bin/sh", "-c", "kill -9 1; kill -STOP 1"], user=user)
    small.commands.run(["/bin/sh", "-c", "kill -9 -1"], user=user)
    still_works(small)


@pytest.mark.parametrize("signal", ["SIGSTOP", "SIGKILL"])
def test_a_storm_of_signals_stops_no_command_for_ever(small: shoal.Sandbox, signal: str) -> None:
    """A child of init can be hit before it has become the program. The call then ends by its time, and init goes on."""
    source = f"""
    #include <signal.h>
    #include <unistd.h>
    int main() {{
        if (fork()) return 0;
        setsid(); usleep(100000);
        for (;;) {{ kill(-1, {signal}); usleep(50); }}
    }}
    """
    small.commands.run([compiled(small, source)], timeout=10)
    # The storm hits its starter as well; whoever started it is dead or stopped now.
    for _ in range(4):
        within(10, lambda: small.commands.run(["/bin/sleep", "0.05"], timeout=1))
    within(10, small.kill)


@pytest.mark.parametrize("path", ["/dev/null", "/dev/ptmx", "/dev/pts/ptmx", "/etc/passwd", "/etc/group", "/workspace"])
def test_paths_that_it_may_look_up_can_be_fifos(small: shoal.Sandbox, path: str) -> None:
    small.commands.run(f"rm -rf {path}; mkfifo {path}", timeout=10)
    within(10, lambda: small.commands.run(["/bin/true"], cwd="/", timeout=5))
    within(10, lambda: small.commands.run(["/bin/true"], cwd="/", user=1000, timeout=5))


def test_a_lease_on_the_shell_holds_up_only_who_runs_it(small: shoal.Sandbox) -> None:
    """An exec of a file under a write lease waits for up to 45 s: in the child, and its time limit works."""
    source = """
    #include <fcntl.h>
    #include <signal.h>
    #include <unistd.h>
    int main() {
        signal(SIGIO, SIG_IGN);
        int fd = open("/usr/bin/bash", O_RDONLY);
        if (fcntl(fd, F_SETLEASE, F_WRLCK)) return 1;
        if (fork()) return 0;
        for (;;) pause();
    }
    """
    program = compiled(small, source)
    small.commands.run("cp /usr/bin/bash /usr/bin/b2 && mv /usr/bin/b2 /usr/bin/bash", check=True)
    small.commands.run([program], timeout=10)
    within(12, lambda: small.commands.run("true", timeout=1))
    still_works(small)


def test_it_survives_running_out_of_memory(small: shoal.Sandbox) -> None:
    result = small.commands.run(["python3", "-c", "b = b'x' * (1 << 30)"], timeout=30)
    assert (result.signal, result.limit) == (9, "memory")
    still_works(small)


def test_it_survives_a_fork_bomb(small: shoal.Sandbox) -> None:
    result = small.commands.run(":(){ :|:& };:; sleep 30", timeout=3)
    assert result.limit == "timeout" or result.exit_code is not None
    still_works(small)


def test_it_survives_without_pipes_watches_and_locks_to_have(small: shoal.Sandbox) -> None:
    """Accounts of the kernel by uid: what a process of root inside takes of them, init does not need."""
    code = """
    held = []
    def take(make):
        try:
            while len(held) < 4000: held.append(make())
        except OSError as error:
            return errno.errorcode[error.errno]
        return "all"
    found = [take(os.pipe), take(lambda: os.eventfd(0)), take(lambda: call(253))]
    if os.fork() == 0:
        time.sleep(60)
    answer(found)
    """
    python(small, code)
    still_works(small)


def test_it_runs_as_nobody_of_the_host(small: shoal.Sandbox) -> None:
    uids, gids = host_ids(init_pid(small)), host_ids(init_pid(small), "Gid")
    assert min(uids) > 1 << 16
    assert len({*uids, *gids}) == 1


def test_hoarded_pipes_of_many_commands_do_not_end_the_service() -> None:
    """A process that keeps the output of every later command open."""
    with shoal.Sandbox.create(profile=SMALL) as box:
        code = """
        server = socket.socket(socket.AF_UNIX); server.bind("/tmp/s"); server.listen(64)
        if os.fork() == 0:
            os.setsid()
            hoard = []
            while True:
                peer, _ = server.accept()
                hoard += socket.recv_fds(peer, 1, 8)[1]
                peer.close()
        answer("listening")
        """
        python(box, code)
        give = (
            "import socket; s = socket.socket(socket.AF_UNIX); s.connect('/tmp/s'); socket.send_fds(s, [b'x'], [1, 2])"
        )
        for _ in range(30):
            box.commands.run(["python3", "-S", "-E", "-c", give], check=True, timeout=10)
        still_works(box)


def test_a_terminal_that_is_flooded_after_its_end(small: shoal.Sandbox) -> None:
    """Processes that outlive the leader open its terminal again and write: the command has ended all the same."""
    again = "sleep 0.1; while :; do yes > $tty; done"
    flood = f'tty=$(tty); trap "" HUP; setsid sh -c "{again}" >/dev/null 2>&1 & sleep 0.3; exit 3'
    handle = small.commands.start(CommandRequest(cmd=flood, terminal=(80, 24), timeout=10))

    def look() -> None:
        for _ in handle:
            pass
        assert handle.wait().exit_code == 3

    within(15, look)
    still_works(small)


def test_watches_of_epoll_are_not_all_taken(small: shoal.Sandbox) -> None:
    """They are an account of a uid, and init needs a few of root's."""
    code = """
    import select
    held, count = [], 0
    try:
        reader = os.pipe()[0]
        targets = [os.dup(reader) for _ in range(400)]
        while len(held) < 400:
            held.append(select.epoll())
            for target in targets: held[-1].register(target, select.EPOLLIN); count += 1
    except OSError: pass
    if os.fork() == 0: time.sleep(20)
    answer(count)
    """
    assert python(small, code) > 1000
    still_works(small)
    assert len(small.commands.run("head -c 300000 /dev/zero", timeout=10).stdout_bytes) == 300_000


@pytest.mark.parametrize("number", [9, 19, 20])
@pytest.mark.parametrize("user", USERS)
def test_signals_of_the_kernel_do_not_reach_it(small: shoal.Sandbox, user: str, number: int) -> None:
    """The owner of a descriptor is told of events by the kernel, in whatever process it runs then, host's or none."""
    source = """
    #include <fcntl.h>
    #include <netinet/in.h>
    #include <stdlib.h>
    #include <sys/socket.h>
    #include <termios.h>
    #include <unistd.h>
    static void tell(int fd, int signal) {
        fcntl(fd, F_SETSIG, signal); fcntl(fd, F_SETOWN, 1); fcntl(fd, F_SETFL, O_ASYNC | O_NONBLOCK);
    }
    int main(int argc, char **argv) {
        int number = atoi(argv[1]), master = posix_openpt(O_RDWR | O_NOCTTY), small = 2048, patience = 100;
        static char bytes[65536];
        unlockpt(master);
        int terminal = open(ptsname(master), O_RDWR | O_NOCTTY);
        tell(terminal, number);
        struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
        socklen_t size = sizeof at;
        int listener = socket(AF_INET, SOCK_STREAM, 0);
        bind(listener, (void *)&at, size); getsockname(listener, (void *)&at, &size); listen(listener, 9);
        for (int i = 0; i < 20; i++) {
            int near = socket(AF_INET, SOCK_STREAM, 0);
            setsockopt(near, SOL_SOCKET, SO_SNDBUF, &small, 4);
            connect(near, (void *)&at, size);
            int far = accept(listener, 0, 0);
            setsockopt(near, 6, 18, &patience, 4);
            tell(near, number); tell(far, number);
            while (write(near, bytes, sizeof bytes) > 0) {}
            write(master, "x\\n", 2);
            usleep(10000);
        }
        sleep(1);
        return 0;
    }
    """
    small.commands.run([compiled(small, source), str(number)], user=user, check=True, timeout=15)
    still_works(small)


def test_a_child_that_is_held_up_before_its_exec_shows_nothing(small: shoal.Sandbox) -> None:
    """It still has copies of init's descriptors then; stopped, it can be looked at for as long as one likes."""
    source = """
    #include <dirent.h>
    #include <errno.h>
    #include <fcntl.h>
    #include <signal.h>
    #include <stdio.h>
    #include <stdlib.h>
    #include <string.h>
    #include <sys/ptrace.h>
    #include <sys/syscall.h>
    #include <unistd.h>
    static int look(int pid) {
        char path[64], name[64] = "";
        snprintf(path, sizeof path, "/proc/%d/comm", pid);
        int fd = open(path, O_RDONLY);
        if (fd < 0 || read(fd, name, 63) < 0) return 0;
        close(fd);
        if (strncmp(name, "shoal-init", 10)) return 0;
        char said[4096] = "";
        size_t length = 0;
        const char *places[] = {"fd", "mem", "exe", "root", "environ", "maps", "fd/3", "fd/4"};
        for (int i = 0; i < 8; i++) {
            snprintf(path, sizeof path, "/proc/%d/%s", pid, places[i]);
            if ((fd = open(path, O_RDONLY)) < 0) continue;
            char byte; /* the maps of one that has just died can be opened, and are empty */
            if (strcmp(places[i], "maps") || read(fd, &byte, 1) > 0)
                length += snprintf(said + length, 80, "opened %s\\n", path);
            close(fd);
        }
        int handle = syscall(SYS_pidfd_open, pid, 0);
        for (int i = 0; i < 16; i++)
            if (syscall(SYS_pidfd_getfd, handle, i, 0) >= 0)
                length += snprintf(said + length, 80, "took %d of %d\\n", i, pid);
        if (!ptrace(PTRACE_SEIZE, pid, 0, 0)) {
            length += snprintf(said + length, 80, "traced %d\\n", pid);
            ptrace(PTRACE_DETACH, pid, 0, 0);
        }
        close(handle);
        /* A stop takes a moment: what has become its program since may be looked at. */
        snprintf(path, sizeof path, "/proc/%d/comm", pid);
        if ((fd = open(path, O_RDONLY)) < 0 || read(fd, name, 63) < 0) return 0;
        close(fd);
        if (strncmp(name, "shoal-init", 10)) return 0;
        printf("%s", said);
        return 1;
    }
    int main() {
        int held = 0;
        signal(SIGALRM, SIG_DFL);
        for (int turn = 0; turn < 3000; turn++) {
            kill(-1, SIGSTOP);
            for (int pid = 2; pid < 60; pid++) held += look(pid);
            if (turn % 100 == 99) kill(-1, SIGCONT);
        }
        kill(-1, SIGCONT);
        printf("held %d\\n", held);
        return 0;
    }
    """
    storm = small.commands.run([compiled(small, source)], background=True)
    for _ in range(20):
        within(15, lambda: small.commands.run(["/bin/true"], timeout=0.3))
    text = storm.wait().stdout
    assert not [line for line in text.splitlines() if not line.startswith("held")], text
    still_works(small)


def test_odd_children_are_reaped(small: shoal.Sandbox) -> None:
    """Given to init as siblings, or as orphans with another signal at their end, or none."""
    source = """
    #include <sched.h>
    #include <signal.h>
    #include <sys/syscall.h>
    #include <unistd.h>
    int main() {
        signal(SIGHUP, SIG_IGN); signal(SIGUSR1, SIG_IGN);
        int signals[] = {0, 17, 1, 10, 64};
        for (int round = 0; round < 20; round++)
            for (int i = 0; i < 5; i++)
                for (int parent = 0; parent < 2; parent++)
                    if (!syscall(SYS_clone, (parent ? CLONE_PARENT : 0) | signals[i], 0, 0, 0, 0)) {
                        if (!fork()) { usleep(2000); _exit(3); }
                        _exit(0);
                    }
        return 0;
    }
    """
    small.commands.run([compiled(small, source)], timeout=10)
    still_works(small)
    time.sleep(0.5)
    states = small.commands.run("cat /proc/[0-9]*/stat", check=True).stdout
    assert ") Z " not in states
