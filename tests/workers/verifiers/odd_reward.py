"""A verifier that does what a call says, good or bad, and the processes that it leaves."""

from __future__ import annotations

from collections.abc import Callable

import psutil
from penstock.workers.verifiers.pool import VerifierPool

REWARD = '''
import ctypes, os, signal, subprocess, sys, time

def make():
    return act

def make_twice():
    os.fork()
    return act

def make_and_exit():
    sys.exit(0)

def make_and_leave():
    os._exit(0)

def make_slowly():
    time.sleep(600)

def make_later():
    mark = os.environ["LINGER"]
    if not os.path.exists(mark):
        open(mark, "w").close()
        time.sleep(600)
    return act

def fail():
    raise RuntimeError("no license")

def pipes():
    """Descriptors of this process that can be written to, but for the standard ones."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            mode = open(f"/proc/self/fdinfo/{name}").read().split()[3]
        except OSError:
            continue
        if int(name) > 2 and int(mode, 8) & 3 == os.O_WRONLY:
            found.append(int(name))
    return found

def write(data, times=1):
    for _ in range(times):
        for number in pipes():
            os.write(number, data)

class Loud(Exception):
    def __str__(self):
        raise SystemExit(0)

def act(what, value=None):
    if what == "return":
        return value
    if what == "fork and return":
        return value if os.fork() else -value
    if what == "fork and answer":
        parent = os.getpid()
        if not os.fork():
            os.getpid = lambda: parent
        return value
    if what == "write":
        write(value.encode())
        return 1
    if what == "write and loop":
        write(value.encode())
        while True:
            pass
    if what == "drip":
        while True:
            write(b"x")
            time.sleep(0.01)
    if what == "flood":
        write(b"x" * 60_000, 10_000)
        return 1
    if what == "late":
        if not os.fork():
            time.sleep(0.3)
            write(value.encode())
            os._exit(0)
        return 1
    if what == "close":
        for number in pipes():
            os.close(number)
        time.sleep(600)
    if what == "sleep":
        time.sleep(value)
        return 1
    if what == "long":
        raise ValueError("begin" + "x" * value + "end")
    if what == "strange":
        raise ValueError("\\ud800\\x00\\U0001f600" * value)
    if what == "huge":
        return 10**400
    if what == "loud":
        raise Loud()
    if what == "interrupt":
        raise KeyboardInterrupt
    if what == "generator":
        raise GeneratorExit
    if what == "leave":
        os._exit(value)
    if what == "hide":
        code = f"import os, time; os.setsid(); os.fork() and os._exit(0); {value!r}; time.sleep(99)"
        for _ in range(3):
            subprocess.Popen([sys.executable, "-c", code])
        time.sleep(0.5)
        return 1
    if what == "hide and leave":
        act("hide", value)
        os._exit(0)
    if what == "hide and loop":
        act("hide", value)
        while True:
            pass
    if what == "breed":
        if not os.fork():
            os.setsid()
            until = time.time() + 20
            while time.time() < until:
                open(value, "a").write("x")
                if os.fork():
                    break
            os._exit(0)
        time.sleep(0.2)
        return 1
    if what == "forge":
        frame = sys._getframe()
        while "call" not in frame.f_locals or "answer_to" not in frame.f_locals:
            frame = frame.f_back
        nonce = frame.f_locals["call"]["nonce"].encode()
        reply = b'{"nonce": "%s", "value": %s}\\n' % (nonce, value.encode())
        os.write(frame.f_locals["replies"], reply)
        os.kill(os.getpid(), signal.SIGSTOP)
    if what == "length":
        return len(value)
    if what == "loop":
        while True:
            pass
    if what in ("spawn and loop", "spawn and hold the lock"):
        subprocess.Popen([sys.executable, "-c", f"import time; {value!r}; time.sleep(600)"])
        while what == "spawn and loop":
            pass
        ctypes.PyDLL(None).sleep(600)
    if what == "raise":
        raise ValueError(value)
    if what == "exit":
        sys.exit(value)
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "print":
        print("noise " * 10_000)
        return 1
    if what == "modules":
        return "torch" in sys.modules or "numpy" in sys.modules
    if what == "linger":
        if not os.path.exists(value):
            open(value, "w").close()
            time.sleep(600)
        return 0.5
'''

MakePool = Callable[..., VerifierPool]


def with_mark(mark: str) -> list[int]:
    """Processes that have this text among their arguments."""
    return [
        process.pid
        for process in psutil.process_iter(["cmdline", "status"])
        if any(mark in word for word in process.info["cmdline"] or ())
        and process.info["status"] != psutil.STATUS_ZOMBIE
    ]
