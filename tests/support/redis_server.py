"""A real Redis server for tests: started, stopped, paused and killed as they like."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time

import pytest

PROGRAM = shutil.which("redis-server") or shutil.which("valkey-server")


class Server:
    """A server on a free port and a Unix socket, with its files in a directory."""

    def __init__(self, path, *options):
        if PROGRAM is None:
            pytest.skip("no redis-server is installed; `make programs` installs Debian's")
        self.path, self._options, self._client = path, options, None
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"unix://{path}/redis.sock"
        self.tcp = f"redis://127.0.0.1:{self.port}/0"
        self.start()

    def start(self):
        quiet = ("--save", "", "--appendonly", "no", "--loglevel", "warning")
        address = ("--port", str(self.port), "--bind", "127.0.0.1")
        place = ("--unixsocket", f"{self.path}/redis.sock", "--dir", str(self.path))
        command = [PROGRAM, *address, *place, *quiet, *self._options]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        for _ in range(200):
            try:
                return self.client().ping()
            except OSError:
                pass
            except Exception as error:
                if "onnection" not in type(error).__name__:
                    raise
            time.sleep(0.05)
        raise RuntimeError("redis-server did not start")

    def client(self):
        """redis-py, as it comes."""
        if self._client is None:
            import redis

            self._client = redis.Redis.from_url(self.url)
        return self._client

    def send(self, number):
        self._process.send_signal(number)

    def kill(self):
        """As if the machine lost its power."""
        self._process.send_signal(signal.SIGCONT)
        self._process.kill()
        self._process.wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()
