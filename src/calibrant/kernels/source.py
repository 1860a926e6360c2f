"""Triton functions in files that can be imported without Triton.

Importing Triton takes half a second, and many machines have none. A file that holds the GPU form of a loss
beside the loss therefore only marks its functions; Triton is imported and they are handed to it when the
first kernel is launched.
"""

from __future__ import annotations

from threading import Lock
from types import FunctionType
from typing import TYPE_CHECKING, Any

__all__ = ["device_function", "jitted"]

_marked: list[Any] = []
_jitted: dict[Any, Any] = {}
_lock = Lock()

if TYPE_CHECKING:  # Triton's language has no types that a checker could follow
    from typing import no_type_check as device_function
else:

    def device_function(function):
        """Mark a module-level function as Triton source.

        Its body may use ``tl`` (``triton.language``) and other marked functions, imported ones included.
        The module needs ``from __future__ import annotations``, since ``tl`` does not exist at import.

        >>> @device_function
        ... def halved(x):
        ...     return x * 0.5
        >>> halved(4)  # plain Python until a kernel is launched
        2.0
        """
        _marked.append(function)
        return function


def jitted(function: Any) -> Any:
    """A marked function after ``triton.jit``; a function that its author jitted, or None, as it is."""
    with _lock:
        if _marked:
            _hand_over()
    found = _jitted.get(function, function)
    if found is None and function is not None:
        raise RuntimeError(f"Triton cannot read the source of {function.__qualname__}: write it into a file")
    return found


def _hand_over() -> None:
    """Replace every marked function, wherever a module refers to it, by its Triton form."""
    import triton
    import triton.language

    while _marked:
        function = _marked.pop()
        try:
            _jitted[function] = triton.jit(function)
        except OSError:  # typed at a prompt: an error for whoever needs it, not for all
            _jitted[function] = None
    for function in list(_jitted):
        names = function.__globals__
        names["tl"] = triton.language
        for name, value in list(names.items()):
            if isinstance(value, FunctionType) and _jitted.get(value) is not None:
                names[name] = _jitted[value]
