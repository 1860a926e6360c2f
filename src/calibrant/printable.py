"""Text to print: names from files made safe, lists and tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

# Control characters, with which a text can move the cursor or retitle the window; separators of lines; marks
# that change the direction of writing, with which a name can look like another; and surrogates, which stand
# for undecodable bytes of file names and cannot be encoded.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")

NOT_INDEPENDENT = "the pixels of an image or the tokens of a text are not independent"
"""Why intervals and tests over all elements of inputs with many elements do not hold."""


def printable(text: str) -> str:
    r"""The text in one line, with every control character replaced by its escape sequence.

    >>> print(printable("a\x1b[31mb\nc"))
    a\x1b[31mb\nc
    """
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def is_unicode(text: str) -> bool:
    r"""Whether a text can be encoded: False for the name of a file whose bytes are not UTF-8.

    >>> is_unicode("\u00fc"), is_unicode(b"\xfc".decode(errors="surrogateescape"))
    (True, False)
    """
    return not re.search("[\ud800-\udfff]", text)


def first_few(values: Iterable[object], most: int = 5) -> str:
    """The first values of a list, separated by commas.

    >>> first_few(range(3)), first_few(range(9), 2)
    ('0, 1, 2', '0, 1, …')
    """
    texts = [str(value) for value in islice(values, most + 1)]
    return ", ".join([*texts[:most], *["…"] * (len(texts) > most)])


def counted(number: int, one: str, several: str = "") -> str:
    """A number with its noun; ``several`` is the plural, if it is not ``one`` with an s.

    >>> counted(1, "class", "classes"), counted(2000, "element")
    ('1 class', '2,000 elements')
    """
    return f"{number:,} {one if number == 1 else several or f'{one}s'}"


def row_of(file: Path, index: int) -> str:
    """A row of a file, for messages: the first has the index 0 and is called row 1.

    >>> row_of(Path("a.npz"), 2), row_of(Path("a.csv"), 0)
    ('row 3 (counted from 1)', 'row 1 (counted from 1 after the heading)')
    """
    heading = " after the heading" if file.suffix.lower() in (".csv", ".tsv") else ""
    return f"row {index + 1} (counted from 1{heading})"


def wrapped(text: str, width: int, longest_word: int = 0) -> str:
    """The text in lines of at most ``width``, broken after spaces, commas, slashes, ``[`` and ``+``.

    A word of up to ``longest_word`` letters stays whole and makes the lines wider; longer ones are cut.

    >>> print(wrapped("cals-alm[penalty=p2,rate=0.5]", 20))
    cals-alm[penalty=p2,
    rate=0.5]
    >>> print(wrapped("runs/digits/test.npz", 5, longest_word=28))
    runs/
    digits/
    test.npz
    """
    # Not in 1e+05, nor before a non-breaking space.
    words = re.split(r"(?<=[ ,/\[+])(?<!\de\+)(?!\u00a0)", text)
    width = max(width, min(longest_word, max(len(word.rstrip()) for word in words)))
    lines = [""]
    for word in words:
        if lines[-1] and len((lines[-1] + word).rstrip()) > width:
            lines.append("")
        lines[-1] += word
        while len(lines[-1].rstrip()) > width:
            lines[-1:] = [lines[-1][:width], lines[-1][width:]]
    return "\n".join(line.rstrip() for line in lines)


def text_table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table as plain text. The first column is aligned to the left, the others to the right.

    >>> print(text_table("Results", ["metric", "value"], [("ECE", "4.20 %"), ("Accuracy", "91.50 %")]))
    Results
    metric      value
    -----------------
    ECE        4.20 %
    Accuracy  91.50 %
    """
    lines = [[printable(cell) for cell in cells] for cells in (headings, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    first, *others = [
        "  ".join([cells[0].ljust(widths[0]), *map(str.rjust, cells[1:], widths[1:])]).rstrip()
        for cells in lines
    ]
    rule = "-" * (sum(widths) + 2 * len(widths) - 2)
    return "\n".join([printable(title), first, rule, *others])


def one_line(text: str, length: int = 2000) -> str:
    r"""A message in one printable line: white space becomes a single space; a long text loses its middle.

    >>> one_line("cannot read:\n  'a\x07b'")
    "cannot read: 'a\\x07b'"
    """
    line = printable(" ".join(text.split()))
    return line if len(line) <= length else f"{line[: length // 2]} … {line[-length // 2 :]}"
