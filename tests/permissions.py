"""Files and folders that may not be read or written to, even if root runs the tests."""

import os
from contextlib import contextmanager

NOBODY = 65534


def unreadable(path):
    """Take away all permissions on a path, and those of root."""
    return _restricted(path, 0)


def read_only(path):
    """Take away the permission to write to a path, and those of root."""
    return _restricted(path, 0o555)


@contextmanager
def _restricted(path, permissions):
    mode, user = path.stat().st_mode, os.geteuid()
    path.chmod(permissions)
    if user == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(user)
        path.chmod(mode)
