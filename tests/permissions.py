"""Files and folders that may not be read, even if root runs the tests."""

import os
from contextlib import contextmanager

NOBODY = 65534


@contextmanager
def unreadable(path):
    """Take away all permissions on a path, and those of root."""
    mode, user = path.stat().st_mode, os.geteuid()
    path.chmod(0)
    if user == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(user)
        path.chmod(mode)
