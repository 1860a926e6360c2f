"""Names with options, as recipes and command lines write them: parsing, printing and checking."""

from __future__ import annotations

import json
import re
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from calibrant.arguments import nearest, parameters_of

_LARGEST = 1 << 22  # bytes of a TOML file


class RecipeError(ValueError):
    """A recipe cannot be followed; the message says what is wrong and what was expected."""


@dataclass(frozen=True)
class Choice:
    """A loss, model or data set by name, with options.

    >>> Choice.parse("cals-alm[margin=6, penalty=p2]")
    Choice(name='cals-alm', options={'margin': 6, 'penalty': 'p2'})
    >>> str(Choice("adafocal", {"bins": 20}))
    'adafocal[bins=20]'
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Choice:
        """Parse ``name[option=value, …]``; the brackets are optional."""
        match = re.fullmatch(r"\s*([^\[\]]+?)\s*(?:\[(.*)\])?\s*", text, re.DOTALL)
        if match is None:
            raise RecipeError(f"cannot read {text!r}; expected name or name[option=value,option=value]")
        options = {}
        for part in split_outside_brackets(match[2] or ""):
            key, equals, value = part.partition("=")
            if not equals or not key.strip():
                raise RecipeError(f"cannot read {part!r} in {text!r}; expected option=value")
            if key.strip() in options:
                raise RecipeError(f"{key.strip()} is given twice in {text!r}; expected each option once")
            options[key.strip()] = parse_value(value)
        return cls(match[1], options)

    def __str__(self) -> str:
        inside = ",".join(f"{key}={written(value)}" for key, value in self.options.items())
        return f"{self.name}[{inside}]" if inside else self.name

    def with_options(self, options: Mapping[str, Any]) -> Choice:
        """A copy in which these options replace its own."""
        return Choice(self.name, {**self.options, **options})


def split_outside_brackets(text: str) -> list[str]:
    """Split a text at the commas outside brackets and quotes; empty parts are left out.

    >>> split_outside_brackets("ce, cals-alm[margin=6,penalty=p2]")
    ['ce', 'cals-alm[margin=6,penalty=p2]']
    """
    parts, depth = [""], 0
    # A quote inside a word is an apostrophe.
    for piece in re.findall(r'(?<=[=,\[\s])"(?:\\.|[^"\\])*"|(?<=[=,\[\s])\'[^\']*\'|.', text, re.DOTALL):
        depth += (piece == "[") - (piece == "]")
        if piece == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += piece
    return [part.strip() for part in parts if part.strip()]


def parse_value(text: str) -> Any:
    """Parse a TOML value; a text that is not TOML stands for itself.

    >>> parse_value("0.1"), parse_value("p2")
    (0.1, 'p2')
    """
    text = text.strip()
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):  # not TOML, a number of thousands of digits, or too many brackets
        return text


def read_toml(path: Path) -> str:
    """The text of a TOML file, unless it is not UTF-8 or far too large."""
    if path.stat().st_size > _LARGEST:
        raise RecipeError(f"{path} is larger than {_LARGEST >> 20} MiB; expected a TOML file")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RecipeError(
            f"{path} has bytes that are not UTF-8 ({error.reason}); expected a TOML file"
        ) from None


def written(value: Any) -> str:
    """The inverse of `parse_value`, without quotes around words; None is the word none.

    >>> written("p2"), written((1e-6, 1)), written(None)
    ('p2', '[1e-06, 1]', 'none')
    """
    if value is None:
        return "none"
    if isinstance(value, str) and parse_value(value) == value and not set(value) & set(",[]=\"'"):
        return value
    return to_toml_value(value)


def to_toml_value(value: Any) -> str:
    """The value in TOML, which has no None: that is the text none."""
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        inside = ", ".join(f"{to_toml_key(key)} = {to_toml_value(item)}" for key, item in value.items())
        return f"{{ {inside} }}" if inside else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(to_toml_value, value))}]"
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def to_toml_key(key: str) -> str:
    """The key in TOML."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key, ensure_ascii=False)


def options_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The types of a function's keyword-only parameters, by name.

    >>> def pool(images, *, size: int = 2): ...
    >>> options_of(pool)
    {'size': <class 'int'>}
    """
    hints = _hints_of(function)
    parameters = parameters_of(function).values()
    return {each.name: hints.get(each.name, Any) for each in parameters if each.kind is each.KEYWORD_ONLY}


@lru_cache(maxsize=1024)
def _hints_of(function: Callable[..., Any]) -> Mapping[str, Any]:
    """The types that a function is annotated with, read once."""
    return types.MappingProxyType(typing.get_type_hints(function))


def check_option(where: str, key: str, options: Iterable[str]) -> None:
    """Raise an error for an unknown option, with the most similar known one."""
    options = list(options)
    if key not in options:
        known = ", ".join(options) or "none"
        raise RecipeError(f"{where} has no option {key!r}{nearest(key, options)}; its options: {known}")


def check_options(
    where: str, options: Mapping[str, Any], *functions: Callable[..., Any], complete: bool = True
) -> dict[str, Any]:
    """Check options against the keyword-only parameters of functions, and convert them to their types.

    ``where`` is the thing that the options belong to, for errors. With ``complete``, options without a
    default must be given.
    """
    hints = {key: hint for function in functions for key, hint in options_of(function).items()}
    checked = {}
    for key, value in options.items():
        check_option(where, key, hints)
        checked[key] = check_type(f"{where}: {key}", value, hints[key])
    for function in functions if complete else ():
        for key, parameter in parameters_of(function).items():
            if key in hints and parameter.default is parameter.empty and key not in checked:
                raise RecipeError(f"{where} needs the option {key!r}")
    return checked


def check_type(where: str, value: Any, hint: Any) -> Any:
    """Return a value if it has the annotated type; integers become floats and lists tuples where needed.

    ``where`` is the name of the value, for the error.

    >>> check_type("lr", 1, float), check_type("milestones", [40, 60], tuple[int, ...])
    (1.0, (40, 60))
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        for option in arguments:
            with suppress(RecipeError):
                return check_type(where, value, option)
    elif origin in (tuple, Sequence) and isinstance(value, list | tuple):
        if origin is Sequence or arguments[-1:] == (...,):
            arguments = arguments[:1] * len(value)
        if len(arguments) == len(value):
            return tuple(check_type(where, item, each) for item, each in zip(value, arguments, strict=True))
    elif hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    elif (
        hint is Any
        or type(value) is hint
        or (origin is Literal and value in arguments)
        or (_is_table(hint) and isinstance(value, Mapping))
    ):
        return value
    raise RecipeError(f"{where} must be {_described(hint)}, got {value!r}")


def _is_table(hint: Any) -> bool:
    return hint is dict or get_origin(hint) in (dict, Mapping)


def _described(hint: Any) -> str:
    """A type in words."""
    words = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
    if hint in words:
        return words[hint]
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(map(repr, arguments))
    if origin in (Union, types.UnionType):
        return " or ".join(_described(option) for option in arguments if option is not type(None))
    if origin is Sequence or (origin is tuple and arguments[-1:] == (...,)):
        return f"a list, each {_described(arguments[0])}"
    if origin is tuple:
        return f"a list of {len(arguments)}: {', '.join(map(_described, arguments))}"
    return "a table" if _is_table(hint) else getattr(hint, "__name__", str(hint))
