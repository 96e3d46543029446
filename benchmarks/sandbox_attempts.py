"""What hostile programs try in the sandbox, as data: programs that call `out()` if they succeed.

They see `SECRET`, a file outside, `RESULTS`, the descriptor that results go to, and what stands for
`PORT`, on which a server listens, and `PARENT`, the process that runs the sandbox.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

PRELUDE = """
import ctypes, os, platform, socket, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
ARM = platform.machine() == "aarch64"
def out(why=""):
    global ESCAPED
    ESCAPED = True
    print("OUT", why, flush=True)
def done(result):  # of a C function
    if result is not None and result >= 0:
        out(result)
def call(x86, arm, *args):
    done(libc.syscall(ctypes.c_long(arm if ARM else x86), *args))
def pipe():
    return os.pipe()[0]
def is_open(d):
    try:
        return bool(os.fstat(d))
    except OSError:
        return False
RESULTS = next(filter(is_open, range(3, 256)))
"""

_NETWORK = {
    f"socket {family} {kind}": f"socket.socket(socket.{family}, socket.{kind}); out()"
    for family in ("AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK", "AF_PACKET", "AF_VSOCK")
    for kind in ("SOCK_STREAM", "SOCK_DGRAM")
} | {
    "raw socket": "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1); out()",
    "connect to a server of the host": "socket.create_connection(('127.0.0.1', PORT), 1); out()",
    "fetch a page": (
        "import urllib.request\nurllib.request.urlopen('http://127.0.0.1:PORT', timeout=1); out()"
    ),
    "resolve a name": "socket.getaddrinfo('localhost', 80, socket.AF_INET); out()",
    "listen": "socket.create_server(('127.0.0.1', 0)); out()",
    "pair of datagram sockets": "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM); out()",
    "pair of packet sockets": "socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET); out()",
    "pair of another family": "socket.socketpair(socket.AF_INET, socket.SOCK_STREAM); out()",
    "datagram to the system's log": (
        "a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
        "try:\n    a.sendto(b'x', '/dev/log')\n"
        "except (FileNotFoundError, ConnectionRefusedError):\n    pass\nout()"
    ),
    "address on a pair of streams": (
        "a, b = socket.socketpair()\n"
        "try:\n    a.sendto(b'x', '\\0abstract')\nexcept PermissionError:\n    pass\n"
        "except OSError:\n    out()\nelse:\n    out()"
    ),
    "send a descriptor": "a, b = socket.socketpair(); socket.send_fds(a, [b'x'], [0]); out()",
    "asyncio connection": (
        "import asyncio\nasyncio.run(asyncio.open_connection('127.0.0.1', PORT)); out()"
    ),
}

_FILES = {
    "read a file": "open(SECRET).read(); out()",
    "write a file": "open(SECRET, 'w'); out()",
    "append to a file": "open(SECRET, 'a').write('x'); out()",
    "truncate a file": "os.truncate(SECRET, 0); out()",
    "remove a file": "os.remove(SECRET); out()",
    "rename a file": "os.rename(SECRET, 'mine'); out()",
    "replace a file": "open('own', 'w').close(); os.replace('own', SECRET); out()",
    "link a file": "os.link(SECRET, 'mine'); out()",
    "read through a symbolic link": "os.symlink(SECRET, 'mine'); open('mine').read(); out()",
    "change a mode": "os.chmod(SECRET, 0); out()",
    "change an owner": "os.chown(SECRET, 1, 1); out()",
    "change times": "os.utime(SECRET, (0, 0)); out()",
    "set an attribute": "os.setxattr(SECRET, 'user.x', b'x'); out()",
    "list the folder of a file": "os.listdir(os.path.dirname(SECRET)); out()",
    "watch the folder grow": "os.scandir(os.path.dirname(SECRET)); out()",
    "make a folder outside": "os.mkdir(SECRET + '.d'); out()",
    "make a file outside": "open(SECRET + '.f', 'x'); out()",
    "make a pipe outside": "os.mkfifo(SECRET + '.p'); out()",
    "make a device": "os.mknod('device', 0o20666, os.makedev(1, 1)); open('device', 'rb'); out()",
    "open without reading, then again": (
        "d = os.open(SECRET, os.O_PATH); open(f'/proc/self/fd/{d}').read(); out()"
    ),
    "file without a name outside": "os.open(os.path.dirname(SECRET), os.O_TMPFILE | os.O_RDWR); "
    "out()",
    "SQLite database outside": (
        "import sqlite3\nsqlite3.connect(SECRET + '.db').execute('create table t(x)'); out()"
    ),
    "users": "open('/etc/passwd').read(); out()",
    "passwords": "open('/etc/shadow').read(); out()",
    "name of the host": "open('/etc/hostname').read(); out()",
    "list /proc": "os.listdir('/proc') and out()",
    "list /sys": "os.listdir('/sys') and out()",
    "list /root": "'.bashrc' in os.listdir('/root') and out()",
    "list /home": "os.listdir('/home'); out()",
    "list /etc": "'passwd' in os.listdir('/etc') and out()",
    "list /var": "os.listdir('/var'); out()",
    "list the root": "'var' in os.listdir('/') and out()",
    "write to the root": "open('/new', 'w'); out()",
    "write among libraries": "open('/usr/lib/penstock_escape', 'w'); out()",
    "change Python's library": "open(os.__file__, 'r+'); out()",
    "link a library, then change it": "os.link(os.__file__, 'os'); open('os', 'r+'); out()",
    "execute a library": "os.execv('/lib64/ld-linux-x86-64.so.2', ['x', '/bin/true']); out()",
    "write to /tmp": "open('/tmp/penstock_escape', 'w'); out()",
    "write to /var/tmp": "open('/var/tmp/penstock_escape', 'w'); out()",
    "climb out of the folder": "open('../../../..' + SECRET).read(); out()",
    "file handles": "b = ctypes.create_string_buffer(b'\\x80\\0\\0\\0' + bytes(200))\n"
    "call(303, 264, -100, SECRET.encode(), b, b, 0)",
    "open by handle": "call(304, 265, -100, bytes(136), 0)",
    "change the root": "os.chroot('.'); out()",
    "another working folder": "os.chdir(os.path.dirname(SECRET)); open('secret'); out()",
}

_HIDDEN = {
    "size of a file": "os.stat(SECRET); out()",
    "whether a file is there": "os.access(SECRET, os.F_OK) and out()",
    "where a link leads": "os.readlink(SECRET + '.link'); out()",
    "size of a program": "os.stat('/bin/sh'); out()",
    "times of the users' list": "os.stat('/etc/passwd').st_mtime; out()",
    "processes by their folders": "os.stat('/proc/PARENT'); out()",
    "walk to a file": "os.chdir(os.path.dirname(SECRET)); os.stat('secret'); out()",
    "id of the parent": "os.getppid() > 1 and out()",
    "its own descriptors": "open('/proc/self/fd/0', 'rb'); out()",
    "its own descriptors by device": "open('/dev/fd/0', 'rb'); out()",
}
"""What a mount or process namespace hides and Landlock cannot."""

_PROCESSES = {
    "fork": "os.fork() or os._exit(0); out()",
    "fork a terminal": "os.forkpty()[0] or os._exit(0); out()",
    "double fork": "os.fork() or (os.setsid(), os.fork(), os._exit(0)); out()",
    "vfork": "ARM or call(58, 0)",
    "clone": "call(56, 220, 17, 0, 0, 0, 0)",
    "clone, beside the parent": "call(56, 220, 0x8000 | 17, 0, 0, 0, 0)",
    "clone that shares memory": "call(56, 220, 0x100 | 0x4000 | 17, 0, 0, 0, 0)",
    "clone into a namespace": "call(56, 220, 0x10000000 | 17, 0, 0, 0, 0)",
    "thread with descriptors of its own": "call(56, 220, 0x3d0b00, 0, 0, 0, 0)",
    "thread in a mount namespace": "call(56, 220, 0x3d0f00 | 0x20000, 0, 0, 0, 0)",
    "clone3": "b = ctypes.create_string_buffer(88); b[32] = 17\ncall(435, 435, b, 88)",
    "execute a shell": "os.execv('/bin/sh', ['sh', '-c', 'echo OUT']); out()",
    "execute Python": "os.execv(sys.executable, [sys.executable, '-c', 'print(\"OUT\")']); out()",
    "execute a file of its own": (
        "open('x', 'w').write('#!/bin/sh\\necho OUT')\nos.execv('x', ['x']); out()"
    ),
    "execute a file in memory": "call(322, 281, 0, b'', 0, 0, 0x1000)",
    "spawn": "os.posix_spawn('/bin/true', ['true'], {}); out()",
    "subprocess": "import subprocess\nsubprocess.run(['/bin/true']); out()",
    "shell": "os.system('true') == 0 and out()",
    "multiprocessing": (
        "import multiprocessing as m\np = m.get_context('fork').Process(target=print)\n"
        "p.start(); out()"
    ),
    "own session": "os.setsid(); out()",
    "own process group": "os.setpgid(0, 0); out()",
    "daemon": "done(libc.daemon(1, 1))",
    "personality": "call(135, 92, 0x0040000)",
    "fork bomb": (
        "for _ in range(20000):\n    try:\n        os.fork() or os._exit(0)\n        out()\n"
        "    except OSError:\n        pass"
    ),
}

_SIGNALS = {
    "signal to the parent": "os.kill(PARENT, 0); out()",
    "signal to whoever started it": "os.kill(os.getppid(), 0); out()",
    "signal to all": "os.kill(-1, 0); out()",
    "signal to the group": "os.kill(0, 0); out()",
    "signal to the first process": "os.kill(1, 0); os.getpid() != 1 and out()",
    "signal to a group by number": "os.killpg(PARENT, 0); out()",
    "tgkill": "call(234, 131, PARENT, PARENT, 0)",
    "tkill": "call(200, 130, PARENT, 0)",
    "queue a signal": "call(129, 138, PARENT, 10, bytes(128))",
    "queue a signal to a thread": "call(297, 240, PARENT, PARENT, 10, bytes(128))",
    "descriptor of a process": "call(434, 434, PARENT, 0)",
    "signal by descriptor": "call(424, 424, 0, 0, 0, 0)",
    "descriptor of a descriptor": "call(438, 438, 0, 0, 0)",
    "owner of a pipe": "import fcntl\nfcntl.fcntl(pipe(), fcntl.F_SETOWN, PARENT); out()",
    "owner of a pipe, extended": "import fcntl\n"
    "fcntl.fcntl(pipe(), 15, struct.pack('ii', 1, PARENT)); out()",
    "signal of a pipe": "import fcntl\nfcntl.fcntl(pipe(), 10, 9); out()",
    "owner of a pipe by ioctl": "import fcntl\n"
    "fcntl.ioctl(pipe(), 0x8901, struct.pack('i', PARENT)); out()",
    "owner of a socket by ioctl": "import fcntl\na, b = socket.socketpair()\n"
    "fcntl.ioctl(a, 0x8902, struct.pack('i', PARENT)); out()",
    "notice of changes in a folder": "import fcntl\n"
    "fcntl.fcntl(os.open(os.path.dirname(os.__file__), 0), 1026, 1); out()",
    "lease of a file": "import fcntl\nfcntl.fcntl(os.open(os.__file__, 0), 1024, 0); out()",
    "lock a library": "import fcntl\nfcntl.flock(os.open(os.__file__, 0), fcntl.LOCK_EX); out()",
    "timer that signals a thread": "call(222, 107, 0, 0, ctypes.create_string_buffer(8))",
    "signals as a file": "call(289, 74, -1, bytes(8), 8, 0)",
}

_LOOKING = {
    "trace the parent": "call(101, 117, 16, PARENT, 0, 0)",
    "seize the parent": "call(101, 117, 0x4206, PARENT, 0, 0)",
    "be traced": "call(101, 117, 0, 0, 0, 0)",
    "read another's memory": "call(310, 270, PARENT, 0, 0, 0, 0, 0)",
    "write another's memory": "call(311, 271, PARENT, 0, 0, 0, 0, 0)",
    "compare with another": "call(312, 272, PARENT, PARENT, 0, 0, 0)",
    "advise another's memory": "call(440, 440, 0, 0, 0, 0, 0)",
    "take a dying one's memory": "call(448, 448, 0, 0)",
    "the parent's environment": "open('/proc/PARENT/environ', 'rb').read(); out()",
    "the parent's memory": "open('/proc/PARENT/mem', 'r+b'); out()",
    "the parent's map": "open('/proc/PARENT/maps').read(); out()",
    "the parent's command": "open('/proc/PARENT/cmdline').read(); out()",
    "the parent's descriptors": "os.listdir('/proc/PARENT/fd'); out()",
    "the parent's root": "os.listdir('/proc/PARENT/root'); out()",
    "the first process's root": "os.listdir('/proc/1/root'); out()",
    "its own environment": "open('/proc/self/environ', 'rb').read(); out()",
    "its own memory as a file": "open('/proc/self/mem', 'r+b'); out()",
    "its own urgency for memory": "open('/proc/self/oom_score_adj', 'w').write('-1000'); out()",
    "its control group": "open('/proc/self/cgroup').read(); out()",
    "control groups": "os.listdir('/sys/fs/cgroup'); out()",
    "the kernel's settings": "open('/proc/sys/kernel/core_pattern').read(); out()",
    "the kernel's requests": "open('/proc/sysrq-trigger', 'w'); out()",
    "secrets of the environment": "any('SECRET_KEY' in k for k in os.environ) and out()",
    "secrets of the C environment": "libc.getenv.restype = ctypes.c_char_p\n"
    "libc.getenv(b'SECRET_KEY') and out()",
    "the path of programs": "'PATH' in os.environ and out()",
    "open descriptors": (
        "found = [d for d in range(3, 1024) if is_open(d) and d != RESULTS]\nfound and out(found)"
    ),
    "positions of open descriptors": "os.fstat(0).st_size > 1 << 20 and out()",
    "what is expected": (
        "import gc\nhidden = 'EULAV-DETCEPXE'\n"
        "dicts = [o for o in gc.get_objects() if type(o) is dict]\n"
        "any(hidden[::-1] in str(v) for o in dicts for v in o.values()) and out()"
    ),
}

_OPTIONS = {  # of prctl
    "outlive the parent": (1, 0), "outlive the parent, by a signal": (1, 18), "dumpable": (4, 1),
    "not dumpable": (4, 0), "keep capabilities": (8, 1), "timing": (14, 1), "time stamps": (26, 2),
    "adopt orphans": (36, 1), "memory map": (35, 1), "tracer": (0x59616D61, -1),
    "securebits": (28, 0), "drop from the bounding set": (24, 1), "seccomp, strict": (22, 1),
    "no_new_privs": (38, 1), "ambient capabilities": (47, 4), "slack of timers": (29, 1),
    "huge pages": (41, 1), "speculation": (53, 0), "I/O flusher": (57, 1),
    "core scheduling": (62, 0), "floating point emulation": (10, 1), "unaligned access": (6, 1),
    "machine checks": (33, 0), "performance events": (31, 0), "dispatch of calls": (59, 0),
}  # fmt: skip

_UNDOING = {
    f"prctl, {name}": f"done(libc.prctl({option}, {argument}, 0, 0, 0))"
    for name, (option, argument) in _OPTIONS.items()
} | {
    "another filter": "call(317, 277, 1, 0, struct.pack('HxxxxxxQ', 1, ctypes.addressof("
    "ctypes.create_string_buffer(struct.pack('HBBI', 6, 0, 0, 0x7fff0000)))))",
    "a filter that asks": "call(317, 277, 1, 8, 0)",
    "what filters can do": "call(317, 277, 2, 0, bytes(4))",
    "another Landlock": "call(444, 444, bytes(8), 8, 0)",
    "the version of Landlock": "call(444, 444, 0, 0, 1)",
    "capabilities": "call(126, 91, struct.pack('II', 0x20080522, 0), b'\\xff' * 24)",
    "become root": "os.geteuid() and (os.setuid(0), out())",
    "become somebody else": "os.setresuid(1, 1, 1); out()",
    "another group": "os.setgid(1); out()",
    "other groups": "os.setgroups([0]); out()",
    "x32 calls": "call(0x40000000 + 57, 0x40000000 + 220)",
    "a call of no number": "call(100000, 100000)",
    "local descriptors of segments": "ARM or call(154, 0, 0, bytes(64), 64)",
    "base of segments": "ARM or call(158, 0, 0x1004, ctypes.create_string_buffer(8))",
}

_LIMITS = {
    f"raise {name}": f"import resource\nresource.setrlimit(resource.RLIMIT_{name}, (-1, -1)); out()"
    for name in ("AS", "CPU", "NOFILE", "FSIZE", "CORE", "MEMLOCK", "NPROC", "STACK")
} | {
    "limits of the parent": "import resource\n"
    "resource.prlimit(PARENT, resource.RLIMIT_CPU, (1, 1)); out()",
    "lower a limit of its own": "import resource\n"
    "resource.setrlimit(resource.RLIMIT_NOFILE, (9, 9)); out()",
    "priority": "os.setpriority(os.PRIO_PROCESS, 0, -20); out()",
    "priority of the parent": "os.setpriority(os.PRIO_PROCESS, PARENT, 19); out()",
    "niceness": "os.nice(1); out()",
    "real-time scheduling": "os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1)); out()",
    "idle scheduling of the parent": "os.sched_setscheduler(PARENT, 5, os.sched_param(0)); out()",
    "parameters of scheduling": "os.sched_setparam(0, os.sched_param(0)); out()",
    "attributes of scheduling": "call(314, 274, 0, struct.pack('IIQiIQQQ', 48, 0,0,5,0,0,0,0), 0)",
    "processors": "os.sched_setaffinity(0, {0}); out()",
    "priority of input and output": "call(251, 30, 1, 0, 3 << 13)",
    "lock memory": "done(libc.mlockall(1))",
    "lock a page": "call(149, 228, 0, 4096)",
    "bigger pipes": "import fcntl\nfcntl.fcntl(pipe(), 1031, 1 << 20); out()",
    "memory beyond the limit": "bytearray(2 << 30); out()",
    "mapping beyond the limit": "import mmap\nmmap.mmap(-1, 2 << 30); out()",
    "file beyond the limit": "open('f', 'wb').truncate(1 << 40); out()",
    "descriptors beyond the limit": "x = [os.dup(0) for _ in range(1000)]; out()",
    "output beyond the limit": "os.pwrite(1, b'x', 1 << 30); out()",
    "input made bigger": "os.ftruncate(0, 1 << 40); out()",
}

_CALLS = {  # that none has use for: numbers on x86-64 and 64-bit ARM, arguments
    "unshare users": (272, 97, "0x10000000"), "unshare mounts": (272, 97, "0x20000"),
    "unshare processes": (272, 97, "0x20000000"), "unshare the network": (272, 97, "0x40000000"),
    "unshare descriptors": (272, 97, "0x400"), "unshare names": (272, 97, "0x4000000"),
    "unshare control groups": (272, 97, "0x2000000"), "unshare time": (272, 97, "0x80"),
    "enter a namespace": (308, 268, "0, 0"), "mount": (165, 40, "b'a', b'/', b'tmpfs', 0, 0"),
    "remount": (165, 40, "0, b'/', 0, 0x1020, 0"), "unmount": (166, 39, "b'/', 2"),
    "change the root mount": (155, 41, "b'/', b'/'"), "open a tree": (428, 428, "-100, b'/', 1"),
    "move a mount": (429, 429, "-100, b'/', -100, b'/', 0"),
    "open a type": (430, 430, "b'tmpfs', 0"), "configure a mount": (431, 431, "0, 0, 0, 0, 0"),
    "pick a mount": (433, 433, "-100, b'/', 0"),
    "attributes of a mount": (442, 442, "-100, b'/', 0, bytes(32), 32"),
    "information on mounts": (457, 457, "0, 0, 0, 0"),
    "shared memory": (29, 194, "0, 4096, 0o1600"), "semaphores": (64, 190, "0, 1, 0o1600"),
    "messages": (68, 186, "0, 0o1600"), "message queue": (240, 180, "b'q', 0o102, 0o600, 0"),
    "file in memory": (319, 279, "b'x', 0"), "secret memory": (447, 447, "0"),
    "page faults": (323, 282, "1"), "key": (248, 217, "b'user', b'a', b'b', 1, -3"),
    "ask for a key": (249, 218, "b'user', b'a', 0, -3"), "keyring": (250, 219, "0, -3, 1"),
    "BPF": (321, 280, "0, bytes(128), 128"),
    "performance counters": (298, 241, "bytes(128), 0, -1, -1, 0"),
    "io_uring": (425, 425, "8, ctypes.create_string_buffer(120)"),
    "io_uring, enter": (426, 426, "0, 0, 0, 0, 0, 0"),
    "io_uring, register": (427, 427, "0, 0, 0, 0"),
    "asynchronous I/O": (206, 0, "8, ctypes.create_string_buffer(8)"), "inotify": (294, 26, "0"),
    "fanotify": (300, 262, "0, 0"), "load a module": (175, 105, "b'', 0, b''"),
    "load a module's file": (313, 273, "0, b'', 0"), "unload a module": (176, 106, "b'x', 0"),
    "load a kernel": (246, 104, "0, 0, 0, 0"), "reboot": (169, 142, "0xfee1dead, 0x28121969, 0, 0"),
    "swap": (167, 224, "b'/', 0"), "accounting": (163, 89, "0"),
    "the kernel's log": (103, 116, "10, 0, 0"), "name the host": (170, 161, "b'x', 1"),
    "name the domain": (171, 162, "b'x', 1"), "set the clock": (227, 112, "0, bytes(16)"),
    "set the time": (164, 170, "bytes(16), 0"),
    "adjust the clock": (159, 171, "ctypes.create_string_buffer(208)"),
    "quotas": (179, 60, "0, 0, 0, 0"), "ports of the machine": (173, 0, "0, 1, 1"),
    "level of ports": (172, 0, "3"), "write all disks": (162, 81, ""),
    "write a disk": (306, 267, "0"), "hang up": (153, 58, ""),
    "splice": (275, 76, "0, 0, 1, 0, 1, 0"), "tee": (276, 77, "0, 1, 1, 0"),
    "splice memory": (278, 75, "1, 0, 0, 0"), "copy between files": (326, 285, "0, 0, 1, 0, 1, 0"),
    "reserve space": (285, 47, "1, 0, 0, 4096"), "read ahead": (187, 213, "0, 0, 4096"),
    "move pages": (279, 239, "0, 0, 0, 0, 0, 0"), "migrate pages": (256, 238, "0, 0, 0, 0"),
    "memory policy": (238, 237, "0, 0, 0"), "protection keys": (330, 289, "0, 0"),
    "event": (290, 19, "0, 0"), "timer as a file": (283, 85, "0, 0"),
    "state of a cache": (451, 451, "0, 0, 0, 0"),
    "open beneath": (437, 437, "-100, b'/', bytes(24), 24"),
    "wait on many": (449, 449, "0, 0, 0, 0, 0"), "shadow stack": (453, 453, "0, 4096, 0"),
    "attributes of scheduling, read": (315, 275, "0, ctypes.create_string_buffer(48), 48, 0"),
    "robust list of the parent": (274, 100, "PARENT, *[ctypes.create_string_buffer(8)] * 2"),
    "a terminal's input": (16, 29, "0, 0x5412, b'x'"),
    "controlling terminal": (16, 29, "0, 0x540e, 1"),
    "state of a file system": (137, 43, "b'/', ctypes.create_string_buffer(256)"),
}  # fmt: skip

_KERNEL = {name: f"call({x86}, {arm}, {args})" for name, (x86, arm, args) in _CALLS.items()}

_DEVICES = {
    f"device {name}": f"os.open('/dev/{name}', os.{how}); out()"
    for name, how in {
        "mem": "O_RDONLY", "kmsg": "O_RDONLY", "vda": "O_RDONLY", "sda": "O_RDONLY",
        "tty": "O_RDWR", "ptmx": "O_RDWR", "fuse": "O_RDWR", "kvm": "O_RDWR",
        "net/tun": "O_RDWR", "shm/escape": "O_RDWR | os.O_CREAT", "random": "O_WRONLY",
        "zero": "O_WRONLY", "hwrng": "O_RDONLY", "cpu/0/msr": "O_RDONLY",
    }.items()
} | {
    "shared memory by name": "from multiprocessing import shared_memory\n"
    "shared_memory.SharedMemory('escape', create=True, size=4096); out()",
    "named semaphore": "import _multiprocessing\n"
    "_multiprocessing.SemLock(0, 1, 1, '/escape', False); out()",
}  # fmt: skip

QUICK: Mapping[str, Mapping[str, str]] = {
    "network": _NETWORK,
    "files": _FILES,
    "processes": _PROCESSES,
    "signals": _SIGNALS,
    "looking in": _LOOKING,
    "undoing": _UNDOING,
    "limits": _LIMITS,
    "kernel": _KERNEL,
    "devices": _DEVICES,
}
"""Attempts by what they are after, each over in no time and without trace in its own process."""

HIDDEN = _HIDDEN


@dataclass(frozen=True)
class Flood:
    """A program that goes on until it is stopped."""

    program: str
    needs_folder: bool = False
    """Whether it is about the folder that only namespaces have."""
    timed_out: bool | None = None
    """Whether the clock must have ended it; None where something else may come first."""


_HELD = "held > 100 << 20 and out(held)\n"

FLOODS: Mapping[str, Flood] = {
    "endless loop": Flood("while True: pass", timed_out=True),
    "sleep": Flood("import time\ntime.sleep(60)", timed_out=True),
    "stopped by itself": Flood(
        "os.kill(os.getpid(), 19)\nimport time\ntime.sleep(9)", timed_out=True
    ),
    "deaf to signals": Flood(
        "import signal\nfor s in range(1, 65):\n    try:\n        signal.signal(s, 1)\n"
        "    except (OSError, ValueError):\n        pass\n"
        "signal.pthread_sigmask(0, range(1, 65))\nwhile True: pass",
        timed_out=True,
    ),
    "deaf to its parent's death": Flood(
        "libc.prctl(1, 0, 0, 0, 0)\ntry:\n    os.setsid()\nexcept OSError:\n    pass\n"
        "x = bytearray(320 << 20)\nimport time\ntime.sleep(60)",
        timed_out=True,
    ),
    "a C call that keeps Python's lock": Flood(
        "import re\nre.match('(a+)+$', 'a' * 60 + 'b')", timed_out=True
    ),
    "a number without end": Flood("x = 3 ** (10 ** 9)"),
    "threads that sleep": Flood(
        "import threading, time\nthreading.stack_size(32 << 10)\nn = 0\n"
        "while True:\n    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
        "    n += 1\n    n > 5000 and out(n)\n"
    ),
    "threads by hand": Flood(
        "import _thread, time\n_thread.stack_size(32 << 10)\nn = 0\n"
        "while True:\n    _thread.start_new_thread(time.sleep, (60,))\n"
        "    n += 1\n    n > 5000 and out(n)\n"
    ),
    "memory": Flood(
        "x = []\nwhile True:\n    x.append(bytearray(1 << 20))\n    len(x) > 600 and out()"
    ),
    "maps of memory": Flood(
        "import mmap\nx = []\nwhile True:\n    x.append(mmap.mmap(-1, 1 << 20))\n"
        "    x[-1][0] = 1\n    len(x) > 600 and out()"
    ),
    "output": Flood("while True: print('x' * 10000)"),
    "errors": Flood("while True: sys.stderr.write('x' * 10000)"),
    "output by hand": Flood(
        "held = 0\nwhile True:\n    held += os.write(1, b'OU' * 50000)\n    " + _HELD
    ),
    "input": Flood("held = 0\nwhile True:\n    held += os.write(0, bytes(1 << 20))\n    " + _HELD),
    "results": Flood("while True:\n    os.write(RESULTS, b'{}\\n' * 100000)"),
    "nested results": Flood("while True:\n    os.write(RESULTS, b'[' * 100000)"),
    "one long result": Flood(
        "os.write(RESULTS, b'{\"value\": [')\nwhile True:\n    os.write(RESULTS, b'[],' * 100000)"
    ),
    "forged beginning of the results": Flood(
        'os.pwrite(RESULTS, b\'{"unconfined": "x"}\\n\' * 3, 0)\nos._exit(0)'
    ),
    "forged results": Flood(
        'os.write(RESULTS, b\'{"value": true, "token": "guess"}\\n\' * 100)\nos._exit(0)'
    ),
    "pipes": Flood(
        "x = []\nheld = 0\nwhile True:\n    x.append(os.pipe())\n"
        "    os.set_blocking(x[-1][1], False)\n    held += os.write(x[-1][1], bytes(1 << 20))\n    "
        + _HELD
    ),
    "socket buffers": Flood(
        "x = []\nheld = 0\nwhile True:\n    x.append(socket.socketpair())\n"
        "    x[-1][0].setblocking(False)\n    held += x[-1][0].send(bytes(1 << 20))\n    " + _HELD
    ),
    "fill, map, unlink, again": Flood(
        "import mmap\nx = []\nheld = 0\nwhile True:\n    f = open('f', 'w+b')\n"
        "    os.posix_fallocate(f.fileno(), 0, 8 << 20)\n"
        "    x.append(mmap.mmap(f.fileno(), 4096))\n    f.close()\n    os.unlink('f')\n"
        "    held += 8 << 20\n    " + _HELD,
    ),
    "write, map, unlink, again": Flood(
        "import mmap\nx = []\nheld = 0\nwhile True:\n    f = open('f', 'w+b')\n"
        "    f.write(bytes(8 << 20))\n    f.flush()\n"
        "    x.append(mmap.mmap(f.fileno(), 4096))\n    f.close()\n    os.unlink('f')\n"
        "    held += 8 << 20\n    " + _HELD,
    ),
    "unlinked files held open": Flood(
        "x = []\nheld = 0\nwhile True:\n    x.append(open('f', 'wb', 0))\n    os.unlink('f')\n"
        "    held += x[-1].write(bytes(8 << 20))\n    " + _HELD,
    ),
    "files": Flood(
        "held = 0\nwhile True:\n    held += open(str(held), 'wb', 0).write(bytes(1 << 20))\n    "
        + _HELD,
    ),
    "empty files": Flood(
        "n = 0\nwhile True:\n    n += 1\n    open(str(n), 'w').close()\n    n > 20000 and out()",
    ),
    "links": Flood(
        "open('f', 'w').close()\nn = 0\nwhile True:\n    n += 1\n    os.link('f', str(n))\n"
        "    n > 20000 and out()",
    ),
    "symbolic links": Flood(
        "n = 0\nwhile True:\n    n += 1\n    os.symlink('x' * 4000, str(n))\n"
        "    n > 20000 and out()",
    ),
    "nested folders": Flood(
        "n = 0\nwhile n < 20001:\n    n += 1\n    os.mkdir('d')\n    os.chdir('d')\n"
        "    n > 20000 and out()",
    ),
    "1200 nested folders": Flood(
        "for _ in range(1200):\n    os.mkdir('d')\n    os.chdir('d')\nprint('made')",
        needs_folder=True,
        timed_out=False,
    ),
    "folders": Flood(
        "n = 0\nwhile True:\n    n += 1\n    os.mkdir(str(n))\n    n > 20000 and out()",
    ),
}


def program_of(code: str, *, secret: str, port: int, parent: int) -> str:
    """The program of one attempt, which prints OUT if it gets out."""
    code = code.replace("PORT", str(port)).replace("PARENT", str(parent))
    body = "".join(f"    {line}\n" for line in code.splitlines())
    return (
        f"{PRELUDE}SECRET = {secret!r}\ntry:\n{body}except Exception as e:\n    print('held', e)\n"
    )
