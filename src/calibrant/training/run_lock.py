"""Waits while another program trains the same recipe in a folder; refuses a folder of another recipe."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

from calibrant.distributed import gather, together
from calibrant.options import RecipeError
from calibrant.training import run_folder
from calibrant.training.fabric import Fabric
from calibrant.training.lock import FolderLock
from calibrant.training.recipe import Recipe
from calibrant.warning import warn

_SECONDS_BETWEEN_ATTEMPTS = 0.5
"""The pause between two attempts to lock a folder that another process works in."""


def check_free(folder: Path, recipe: Recipe) -> None:
    """Refuse a folder that holds a run of another recipe; name the process that works on that run."""
    try:
        run_folder.check_folder(folder, recipe)
    except RecipeError:
        if holder := FolderLock(folder).holder():
            raise _in_use(folder, holder) from None
        raise


def _in_use(folder: Path, holder: str) -> RecipeError:
    return RecipeError(f"{folder} is in use by {holder} for another recipe; choose another output folder")


def lock_of(folder: Path, recipe: Recipe) -> FolderLock:
    """The lock for a run of this recipe. Its purpose is a hash of the recipe, and what it is in words."""
    mark = hashlib.sha256(recipe.to_toml().encode()).hexdigest()[:12]
    return FolderLock(folder, f"recipe {mark}: {recipe.name}, {recipe.loss}, seed {recipe.seed}")


def wait_for(lock: FolderLock, fabric: Fabric) -> None:
    """Lock a folder in the first process. All wait while another program trains the same recipe there."""
    holder = said = ""
    mark = lock.purpose.partition(":")[0]  # not all of it: a long name may be cut off in the lock file

    def attempt() -> str:
        if not fabric.is_global_zero or lock.acquire():
            return ""
        found = lock.holder()
        # Seen twice: before a new holder has written its name, the file may have that of an earlier one.
        if found and found == holder and f"({mark}:" not in found:
            raise _in_use(lock.folder, found)
        return found or "a process that has just ended"

    # The processes ask together, again and again: a single long wait would exceed the time-out of the others.
    while found := gather(together(attempt, "locking the output folder"))[0]:
        if found == holder != said and fabric.is_global_zero:
            said = holder
            warn(f"{lock.folder} is in use by {holder} for the same recipe; waiting until it ends")
        holder = found
        time.sleep(_SECONDS_BETWEEN_ATTEMPTS)
