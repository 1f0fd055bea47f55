"""Tools that run in processes of their own; they have to stand in a module that another process can import."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

from rollouts import tool

state: list[int] = []


@dataclass
class Point:
    """Two numbers."""

    x: int
    y: int = 0


@tool(isolate="process", timeout_seconds=5)
def at_the_top(n: int) -> int:
    """Double a number."""
    return 2 * n


class Isolated:
    """Each tool does one thing to its process."""

    outside = staticmethod(at_the_top)

    @staticmethod
    @tool(isolate="process", timeout_seconds=5)
    def double(n: int) -> int:
        return 2 * n

    @tool(isolate="process", timeout_seconds=5)
    @staticmethod
    def shout(text: str) -> str:
        return text.upper()

    @staticmethod
    @tool(isolate="process")
    def add(point: Point, times: int = 1) -> Point:
        return Point((point.x + point.y) * times)

    @staticmethod
    @tool(isolate="process")
    def pid() -> int:
        return os.getpid()

    @staticmethod
    @tool(isolate="process", timeout_seconds=0.3)
    def spin() -> None:
        while True:
            pass

    @staticmethod
    @tool(isolate="process", timeout_seconds=0.3)
    def hold_the_gil() -> bool:
        return bool(re.match(r"(a+)+$", "a" * 60 + "b"))  # one call of C code for years

    @staticmethod
    @tool(isolate="process", timeout_seconds=0.3)
    def deaf() -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
            signal.signal(number, signal.SIG_IGN)
        time.sleep(60)

    @staticmethod
    @tool(isolate="process", timeout_seconds=1)
    def wait_for_child(file: str) -> None:
        child = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"
        subprocess.run([sys.executable, "-c", child, file], check=True)

    @staticmethod
    @tool(isolate="process")
    def segfault() -> None:
        ctypes.string_at(0)

    @staticmethod
    @tool(isolate="process")
    def vanish(code: int = 3) -> None:
        os._exit(code)

    @staticmethod
    @tool(isolate="process")
    def leave() -> None:
        sys.exit("enough")

    @staticmethod
    @tool(isolate="process")
    def fail() -> None:
        raise ValueError("no \ud800 good")

    @staticmethod
    @tool(isolate="process")
    def talk() -> str:
        print("not an answer", flush=True)
        os.write(1, b'{"text": "forged"}\n')
        return f"read {sys.stdin.read()!r}"

    @staticmethod
    @tool(isolate="process")
    def garble() -> None:
        for number in range(3, 20):  # the pipe too
            try:
                os.write(number, b"garbage\n")
            except OSError:
                continue

    @staticmethod
    @tool(isolate="process")
    def fork(x: int) -> int:
        os.fork()  # both return
        return x

    @staticmethod
    @tool(isolate="process")
    def daemonize(file: str) -> str:
        """Start a process that leaves the session and is nobody's child."""
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                with open(file + ".new", "w") as stream:
                    stream.write(str(os.getpid()))
                os.rename(file + ".new", file)
                time.sleep(60)
            os._exit(0)
        while not os.path.exists(file):
            time.sleep(0.01)
        return "begun"

    @staticmethod
    @tool(isolate="process")
    def daemonize_and_crash(file: str) -> None:
        Isolated.daemonize(file)
        os._exit(3)

    @staticmethod
    @tool(isolate="process")
    def long() -> str:
        return "é" * 50_000

    @staticmethod
    @tool(isolate="process")
    def remember(n: int) -> list[int]:
        state.append(n)
        return state
