"""Starts of the job that cost a fork each: importing torch and Lightning takes longer than the job itself.

`python server.py ARGUMENTS…` is what ckpt-chaos calls. It hands its arguments, environment and output over to `serve`,
which forks a process that arms ckpt-chaos as its `sitecustomize` would, and trains; and it ends as that process ends.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

SOCKET = "CHAOS_SERVER"  # environment variable: where the server listens


def ask():
    """Has the job done by the server; returns its exit status."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ[SOCKET])
        request = json.dumps({"arguments": sys.argv[1:], "environment": dict(os.environ)}).encode()
        socket.send_fds(connection, [request], [1, 2])
        connection.shutdown(socket.SHUT_WR)
        return int(connection.recv(16) or 1)


def serve(path, main):
    """Forks a process that listens; returns its id when it does. Each request calls `main` in a process of its own."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    pid = os.fork()
    if pid:
        listener.close()
        return pid
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who wait
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            worker = os.fork()
            if worker == 0:
                work(connection, main)
            status = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
            connection.sendall(str(status if status >= 0 else 128 - status).encode())
            os._exit(0)
        connection.close()


def work(connection, main):
    """Becomes the process that was asked for."""
    status = 1
    try:
        request, outputs, _, _ = socket.recv_fds(connection, 2**20, 2)
        while part := connection.recv(2**20):
            request += part
        for number, output in enumerate(outputs, start=1):
            os.dup2(output, number)
        asked = json.loads(request)
        os.environ.clear()
        os.environ.update(asked["environment"])
        sys.argv[1:] = asked["arguments"]
        if "CKPT_CHAOS_WATCH" in os.environ:
            from ckpt_chaos.targets.common import arm_from_env

            arm_from_env(0, lazy=True)
        status = main()
        sys.stdout.flush()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status or 0)


if __name__ == "__main__":
    sys.exit(ask())
