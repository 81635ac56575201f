"""Which system calls a sandbox may make, and why: every call that Linux has on x86_64 and aarch64 is in one place here.

Four answers:
- allowed, because programs need it and what it reaches is the sandbox's own;
- refused with EPERM, because it is a power that the sandbox does not have. A program that asks for it is told what a
  user of any machine is told, and shows that as "Operation not permitted";
- absent (ENOSYS), because a program has another way and takes it only when the kernel seems to lack the call. What this
  table does not know (a newer kernel's) is answered so too;
- pretended: success, and nothing is done, where doing it would be felt outside.
Some allowed calls have rules on their arguments.

A call that the library does not know yet has its number here; from 424 on they are the same on every architecture.
"""

from __future__ import annotations

import errno
from typing import Final, Literal

from msgspec import Struct

Answer = Literal["allowed", "refused", "absent", "pretended"]


class Group(Struct, frozen=True):
    """Calls with the same answer for the same reason."""

    answer: Answer
    reason: str
    names: frozenset[str]


class Condition(Struct, frozen=True):
    """On the lower 32 bits of one argument: what is above them the kernel ignores, and the caller may choose."""

    argument: int
    values: tuple[int, ...]
    mask: int = 0xFFFFFFFF
    others: bool = False
    """True for every value but these."""


class Rule(Struct, frozen=True):
    """A call for which all conditions hold is answered with this errno; 0 pretends success."""

    error: int
    conditions: tuple[Condition, ...]


def _group(answer: Answer, reason: str, names: str) -> Group:
    return Group(answer, reason, frozenset(names.split()))


GROUPS: Final = (
    _group(
        "allowed",
        "Files by path or descriptor: the mount namespace, ids and read-only layers decide what they reach.",
        """access chdir chmod chown chroot close close_range copy_file_range creat dup dup2 dup3 faccessat faccessat2
        fallocate fchdir fchmod fchmodat fchmodat2 fchown fchownat fdatasync fgetxattr flistxattr flock
        fremovexattr fsetxattr fstat fstatfs fsync ftruncate futimesat getcwd getdents getdents64 getxattr getxattrat
        lchown lgetxattr link linkat listxattr listxattrat llistxattr lremovexattr lseek lsetxattr lstat mkdir mkdirat
        mknod mknodat newfstatat open openat openat2 pread64 preadv preadv2 pwrite64 pwritev pwritev2 read readahead
        readlink readlinkat readv removexattr removexattrat rename renameat renameat2 rmdir sendfile setxattr
        setxattrat splice stat statfs statx symlink symlinkat sync_file_range syncfs tee truncate umask unlink unlinkat
        utime utimensat utimes vmsplice write writev""",
    ),
    _group(
        "allowed",
        "Waiting and events: accounts by uid, and a sandbox has uids of its own.",
        """epoll_create epoll_create1 epoll_ctl epoll_pwait epoll_pwait2 epoll_wait eventfd eventfd2 inotify_add_watch
        inotify_init inotify_init1 inotify_rm_watch pause pipe pipe2 poll ppoll pselect6 select signalfd signalfd4
        timerfd_create timerfd_gettime timerfd_settime""",
    ),
    _group(
        "allowed",
        "The process's own memory: charged to the sandbox's cgroup.",
        """brk get_mempolicy map_shadow_stack mbind membarrier mincore mlock mlock2 mlockall mprotect mremap
        mseal msync munlock munlockall munmap pkey_alloc pkey_free pkey_mprotect process_madvise process_mrelease
        remap_file_pages set_mempolicy set_mempolicy_home_node""",
    ),
    _group(
        "allowed",
        "Processes and threads: the PID namespace ends at the sandbox, cgroups count them. Flags for namespaces need a "
        "power that nobody inside has, and clone3 has its flags in memory, where no filter can look.",
        """arch_prctl capget capset clone clone3 execve execveat exit exit_group fork futex futex_requeue futex_wait
        futex_waitv futex_wake get_robust_list getcpu getegid geteuid getgid getgroups getpgid getpgrp getpid getppid
        getpriority getresgid getresuid getrlimit getrusage getsid gettid getuid ioprio_get personality restart_syscall
        rseq sched_get_priority_max sched_get_priority_min sched_getaffinity sched_getattr sched_getparam
        sched_getscheduler sched_rr_get_interval sched_yield set_robust_list set_tid_address setfsgid setfsuid setgid
        setgroups setpgid setregid setresgid setresuid setreuid setrlimit setsid setuid sysinfo times uname vfork wait4
        waitid""",
    ),
    _group(
        "allowed",
        "Signals and timers, within the PID namespace.",
        """alarm clock_getres clock_gettime clock_nanosleep getitimer gettimeofday kill nanosleep pidfd_open
        pidfd_send_signal rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo rt_sigreturn rt_sigsuspend
        rt_sigtimedwait rt_tgsigqueueinfo setitimer sigaltstack tgkill time timer_create timer_delete timer_getoverrun
        timer_gettime timer_settime tkill""",
    ),
    _group(
        "allowed",
        "Debuggers and tracers: the PID namespace bounds whom they see, and init is not dumpable.",
        "kcmp pidfd_getfd process_vm_readv process_vm_writev ptrace",
    ),
    _group(
        "allowed",
        "Sockets: `socket` decides which families there are, the network namespace what they reach.",
        """accept accept4 bind connect getpeername getsockname getsockopt listen recvfrom recvmmsg recvmsg sendmmsg
        sendmsg sendto shutdown""",
    ),
    _group(
        "allowed",
        "IPC of System V and POSIX: an IPC namespace of its own, charged to its cgroup.",
        """mq_getsetattr mq_notify mq_open mq_timedreceive mq_timedsend mq_unlink msgctl msgget msgrcv msgsnd semctl
        semget semop semtimedop shmat shmctl shmdt""",
    ),
    _group("allowed", "Randomness.", "getrandom"),
    _group(
        "allowed",
        "Confining oneself further. A ruleset is charged to the cgroup.",
        "landlock_add_rule landlock_create_ruleset landlock_restrict_self",
    ),
    _group(
        "allowed",
        "Rules on their arguments are below.",
        """fadvise64 fcntl ioctl ioprio_set madvise memfd_create migrate_pages mmap move_pages prctl prlimit64
        sched_setaffinity sched_setattr sched_setparam sched_setscheduler seccomp setpriority setsockopt shmget socket
        socketpair""",
    ),
    _group(
        "refused",
        "Mounts. Without CAP_SYS_ADMIN they fail anyway; so they never reach the kernel's parsers.",
        """fsconfig fsmount fsopen fspick mount mount_setattr move_mount open_tree open_tree_attr pivot_root umount2""",
    ),
    _group("refused", "Namespaces.", "setns unshare"),
    _group(
        "refused",
        "Large and young parts of the kernel with a history of holes, which no task of ours needs.",
        "bpf io_uring_enter io_uring_register io_uring_setup perf_event_open userfaultfd",
    ),
    _group("refused", "Keyrings outlive the sandbox and are charged to uids.", "add_key keyctl request_key"),
    _group(
        "refused",
        "The host's kernel.",
        "delete_module finit_module init_module kexec_file_load kexec_load reboot",
    ),
    _group("refused", "Reaches files past the mount namespace.", "name_to_handle_at open_by_handle_at"),
    _group("refused", "Watches whole file systems.", "fanotify_init fanotify_mark"),
    _group("refused", "The host's state.", "acct quotactl quotactl_fd swapoff swapon syslog"),
    _group("refused", "The host's clock.", "adjtimex clock_adjtime clock_settime settimeofday"),
    _group("refused", "The names that we gave it.", "setdomainname sethostname"),
    _group("refused", "Hardware and segments.", "ioperm iopl modify_ldt"),
    _group("refused", "The host's terminals.", "vhangup"),
    _group(
        "absent",
        "aio contexts are one number for the whole machine (fs.aio-max-nr): one sandbox took them from all others. "
        "Databases and servers go on without.",
        "io_cancel io_destroy io_getevents io_pgetevents io_setup io_submit",
    ),
    _group(
        "absent",
        "Takes pages out of the kernel's own map, and so keeps the machine from hibernating.",
        "memfd_secret",
    ),
    _group("absent", "Tells what of a shared layer is in memory, and so what a neighbour has read.", "cachestat"),
    _group(
        "absent",
        "New ways to what /proc and ioctl offer; whoever calls them falls back to those.",
        "file_getattr file_setattr listmount lsm_get_self_attr lsm_list_modules lsm_set_self_attr statmount",
    ),
    _group(
        "absent",
        "Long gone or never there, or for the kernel's own use.",
        """_sysctl afs_syscall create_module epoll_ctl_old epoll_wait_old get_kernel_syms get_thread_area getpmsg
        lookup_dcookie nfsservctl putpmsg query_module security set_thread_area sysfs tuxcall uprobe uretprobe uselib
        ustat vserver""",
    ),
    _group(
        "pretended",
        "Writes out every file system of the machine and waits for them. A sandbox is as safe without.",
        "sync",
    ),
)

LATER_NUMBERS: Final = {
    "cachestat": 451, "fchmodat2": 452, "map_shadow_stack": 453, "futex_wake": 454, "futex_wait": 455,
    "futex_requeue": 456, "statmount": 457, "listmount": 458, "lsm_get_self_attr": 459, "lsm_set_self_attr": 460,
    "lsm_list_modules": 461, "mseal": 462, "setxattrat": 463, "getxattrat": 464, "listxattrat": 465,
    "removexattrat": 466, "open_tree_attr": 467, "file_getattr": 468, "file_setattr": 469,
}  # fmt: skip
"""Of calls that libseccomp 2.5 does not know."""

_INIT: Final = Rule(errno.EPERM, (Condition(0, (1,)),))
"""By pid 1 they would take init down or slow it, and a bad reward would look like a broken platform."""
_UNIX, _INET, _INET6, _NETLINK = 1, 2, 10, 16
_FAMILIES: Final = Rule(errno.EAFNOSUPPORT, (Condition(0, (_UNIX, _INET, _INET6, _NETLINK), others=True),))
"""AF_VSOCK for one is not namespaced: it is a way to the hypervisor."""
_SOL_SOCKET, _SOL_TCP, _TCP_ULP, _SOL_IPV6, _IPV6_FLOWLABEL_MGR = 1, 6, 31, 41, 32
_ATTACH: Final = (26, 50, 51, 52)
"""SO_ATTACH_FILTER, _BPF, _REUSEPORT_CBPF, _REUSEPORT_EBPF."""
_MAP_HUGETLB, _MFD_HUGETLB, _SHM_HUGETLB = 0x40000, 0x4, 0o4000
_TIOCSTI, _TIOCSETD = 0x5412, 0x5423
_PR_SET_SECCOMP, _SECCOMP_FILTER, _PR_SET_MEMORY_MERGE, _MADV_MERGEABLE = 22, 2, 67, 12
_POSIX_FADV_DONTNEED: Final = 4
_F_SETLEASE, _F_NOTIFY, _F_SETDELEG = 1024, 1026, 1040

RULES: Final[dict[str, tuple[Rule, ...]]] = {
    "prlimit64": (_INIT,),
    "sched_setaffinity": (_INIT,),
    "sched_setattr": (_INIT,),
    "sched_setparam": (_INIT,),
    "sched_setscheduler": (_INIT,),
    "migrate_pages": (_INIT,),
    "move_pages": (_INIT,),
    # By user they would hit init too: it is of root's processes.
    "setpriority": (Rule(errno.EPERM, (Condition(1, (1,)),)), Rule(errno.EPERM, (Condition(0, (2,)),))),
    "ioprio_set": (Rule(errno.EPERM, (Condition(1, (1,)),)), Rule(errno.EPERM, (Condition(0, (3,)),))),
    "socket": (
        _FAMILIES,
        # NETLINK_ROUTE and NETLINK_SOCK_DIAG.
        Rule(errno.EPROTONOSUPPORT, (Condition(0, (_NETLINK,)), Condition(2, (0, 4), others=True))),
        # ICMP, TCP, UDP and ICMPv6. Asking for another loads a module: SCTP, DCCP, L2TP, SMC.
        Rule(errno.EPROTONOSUPPORT, (Condition(0, (_INET, _INET6)), Condition(2, (0, 1, 6, 17, 58), others=True))),
    ),
    "socketpair": (_FAMILIES,),
    # The code of a filter is memory that nobody pays for, and the machine has a bounded amount of it
    # (net.core.bpf_jit_limit): without any left no sandbox can be made.
    "setsockopt": (
        Rule(errno.ENOPROTOOPT, (Condition(1, (_SOL_SOCKET,)), Condition(2, _ATTACH))),
        # kTLS: another large part of the kernel; TLS libraries do without.
        Rule(errno.ENOENT, (Condition(1, (_SOL_TCP,)), Condition(2, (_TCP_ULP,)))),
        # Flow labels are one table of 4,096 for all network namespaces.
        Rule(errno.ENOPROTOOPT, (Condition(1, (_SOL_IPV6,)), Condition(2, (_IPV6_FLOWLABEL_MGR,)))),
    ),
    "seccomp": (Rule(errno.EINVAL, (Condition(0, (1,)),)),),
    # Pages of the same content are made one across the machine (KSM): the time of a write then tells what others hold.
    "prctl": (
        Rule(errno.EINVAL, (Condition(0, (_PR_SET_SECCOMP,)), Condition(1, (_SECCOMP_FILTER,)))),
        Rule(errno.EINVAL, (Condition(0, (_PR_SET_MEMORY_MERGE,)),)),
    ),
    "madvise": (Rule(errno.EINVAL, (Condition(2, (_MADV_MERGEABLE,)),)),),
    # Huge pages are a pool of the whole machine, and the memory cgroup does not count them.
    "mmap": (Rule(errno.ENOMEM, (Condition(3, (_MAP_HUGETLB,), mask=_MAP_HUGETLB),)),),
    "memfd_create": (Rule(errno.ENOSYS, (Condition(1, (_MFD_HUGETLB,), mask=_MFD_HUGETLB),)),),
    "shmget": (Rule(errno.EPERM, (Condition(2, (_SHM_HUGETLB,), mask=_SHM_HUGETLB),)),),
    # A line discipline is loaded as a module; a character can be put into a terminal as if it had been typed.
    "ioctl": (Rule(errno.EPERM, (Condition(1, (_TIOCSTI, _TIOCSETD)),)),),
    # A lease on a file that sandboxes share (of /sys, say) holds up whoever opens it for 45 seconds.
    "fcntl": (Rule(errno.EINVAL, (Condition(1, (_F_SETLEASE, _F_NOTIFY, _F_SETDELEG)),)),),
    # It is only advice. Taken, it throws pages of shared layers out of memory, for the neighbours too.
    "fadvise64": (Rule(0, (Condition(3, (_POSIX_FADV_DONTNEED,)),)),),
}


def answers() -> dict[str, Answer]:
    """Call to what becomes of it where no rule says otherwise."""
    return {name: group.answer for group in GROUPS for name in group.names}
