"""Shows ckpt-chaos 0.1.8 what it does not see by itself: files that are written with `os.open` and `os.write`.

By itself it counts such files (mode `before`, `term`), but it tears, and takes back what was not fsynced, only where
Python's `open()`, `torch.save` or safetensors' `save_file` wrote. Without this, `torn` and `unsynced` would strike at
no file of a checkpoint and prove nothing. It also follows a directory that is renamed with files in it.
"""

from __future__ import annotations

import os

from ckpt_chaos import inject


def widen():
    """Patches `os` for the rest of the process."""
    state, torn = inject._state, set()
    real_open, real_close, real_rename = os.open, os.close, os.rename

    def open_(path, flags, mode=0o777, *, dir_fd=None):
        if not flags & os.O_CREAT or dir_fd is not None or not inject._under(path):
            return real_open(path, flags, mode, dir_fd=dir_fd)
        is_torn = inject._event("os.open", path, tornable=True)
        if state["unsynced"]:
            inject._note_open_for_write(inject._norm(path))
        with inject._quietly():  # it would count the same file once more
            fd = real_open(path, flags, mode)
        state["fd_path"][fd] = inject._norm(path)
        if is_torn:
            torn.add(fd)
        return fd

    def close(fd):
        path = state["fd_path"].pop(fd, None)
        real_close(fd)
        if fd in torn:
            inject._tear(path)
            os._exit(137)

    def rename(source, target, **keywords):
        real_rename(source, target, **keywords)
        old, new = inject._norm(source), inject._norm(target)
        for path in [path for path in state["dirty"] if path.startswith(old + os.sep)]:
            state["dirty"].discard(path)
            state["dirty"].add(new + path[len(old) :])
            state["zero"].add(new + path[len(old) :])

    os.open, os.close, os.rename = open_, close, rename
