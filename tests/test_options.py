from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrant.options import (
    Choice,
    RecipeError,
    check_options,
    check_type,
    options_of,
    parse_value,
    read_toml,
    split_outside_brackets,
    to_toml_value,
)


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ("ce", "ce", {}),
        (" ce ", "ce", {}),
        ("ce[]", "ce", {}),
        ("cals-alm[margin=6,penalty=p2]", "cals-alm", {"margin": 6, "penalty": "p2"}),
        ("cals-alm[ margin = 6.5 , learned = true ]", "cals-alm", {"margin": 6.5, "learned": True}),
        ("mlp[hidden=[16, 8]]", "mlp", {"hidden": [16, 8]}),
        ("x[adapt=0:epoch/10:100]", "x", {"adapt": "0:epoch/10:100"}),
        ('x[text="a,b"]', "x", {"text": "a,b"}),
        ("""x[text="a\\",b[", other='c,]']""", "x", {"text": 'a",b[', "other": "c,]"}),
        ("x[text=don't,other='yes']", "x", {"text": "don't", "other": "yes"}),
        ("timm:swinv2_tiny[pretrained=false]", "timm:swinv2_tiny", {"pretrained": False}),
    ],
)
def test_choices_are_read(text: str, name: str, options: dict[str, Any]) -> None:
    choice = Choice.parse(text)
    assert choice == Choice(name, options)
    assert Choice.parse(str(choice)) == choice


@pytest.mark.parametrize("text", ["", "[a=1]", "ce[a]", "ce[=1]", "ce[a=1", "ce]a=1[", "ce[a=1]b"])
def test_what_is_no_choice_is_refused(text: str) -> None:
    with pytest.raises(RecipeError, match="cannot read"):
        Choice.parse(text)


values = st.one_of(
    st.booleans(),
    st.integers(-(10**6), 10**6),
    st.floats(allow_nan=False),
    st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=8),
    st.text("ab1 ,[]=\"'\\{}#", max_size=8),
    st.lists(st.integers(0, 9), max_size=3),
)


@given(st.dictionaries(st.from_regex(r"[a-z_]{1,6}", fullmatch=True), values, max_size=3))
@settings(deadline=None, max_examples=50)
def test_any_choice_is_read_back(options: dict[str, Any]) -> None:
    choice = Choice("name", options)
    assert Choice.parse(str(choice)) == choice


def test_none_is_written_as_a_word() -> None:
    assert str(Choice("x", {"a": None, "b": [None]})) == 'x[a=none,b=["none"]]'
    assert Choice.parse("x[a=none]").options == {"a": "none"}  # not None: it may be a text
    assert to_toml_value({"a": None}) == '{ a = "none" }'


def test_brackets_keep_commas_together() -> None:
    assert split_outside_brackets("a[x=1,y=[2,3]],b,,c[]") == ["a[x=1,y=[2,3]]", "b", "c[]"]
    assert split_outside_brackets("") == []


def test_values_are_those_of_toml_or_words() -> None:
    assert [parse_value(text) for text in ("1", "1e-3", "true", "[1]", '"a"', "p2", "0:epoch")] == [
        1,
        1e-3,
        True,
        [1],
        "a",
        "p2",
        "0:epoch",
    ]


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        (3, int, 3),
        (3, float, 3.0),
        ("a", str, "a"),
        (True, bool, True),
        (None, int | None, None),
        (2, int | None, 2),
        ("b", Literal["a", "b"], "b"),
        ([1, 2], tuple[int, ...], (1, 2)),
        ([1, 2], tuple[float, float], (1.0, 2.0)),
        ({"a": 1}, Mapping[str, Any], {"a": 1}),
        ("anything", Any, "anything"),
    ],
)
def test_values_of_a_type(value: Any, hint: Any, expected: Any) -> None:
    found = check_type("key", value, hint)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("value", "hint", "said"),
    [
        (1.5, int, "a whole number"),
        (True, int, "a whole number"),
        (True, float, "a number"),
        ("1", float, "a number"),
        (1, str, "a text"),
        (1, bool, "true or false"),
        ("c", Literal["a", "b"], "one of 'a', 'b'"),
        ("x", int | None, "a whole number"),
        ([1, "a"], tuple[int, ...], "a whole number"),
        ([1, 2, 3], tuple[float, float], "a list of 2: a number, a number"),
        (5, tuple[int, ...], "a list, each a whole number"),
    ],
)
def test_values_of_another_type_are_refused(value: Any, hint: Any, said: str) -> None:
    with pytest.raises(RecipeError, match="key must be ") as caught:
        check_type("key", value, hint)
    assert str(caught.value).startswith(f"key must be {said}, got ")


def function(first: int, *, rate: float, bins: int = 15) -> None: ...


def test_options_are_those_of_the_signature() -> None:
    assert options_of(function) == {"rate": float, "bins": int}
    assert check_options("thing", {"rate": 1}, function) == {"rate": 1.0}
    with pytest.raises(
        RecipeError, match=r"^thing has no option 'bin' \(did you mean 'bins'\?\); its options: rate, bins$"
    ):
        check_options("thing", {"rate": 1, "bin": 3}, function)
    with pytest.raises(RecipeError, match=r"^thing needs the option 'rate'$"):
        check_options("thing", {}, function)
    assert check_options("thing", {}, function, complete=False) == {}
    with pytest.raises(RecipeError, match=r"^thing: bins must be a whole number, got 'x'$"):
        check_options("thing", {"rate": 1, "bins": "x"}, function)


@pytest.mark.parametrize("text", ["[" * 100_000, "9" * 5000, "1" * 5000 + ".0e"])
def test_a_text_that_no_parser_takes_stands_for_itself(text):
    assert parse_value(text) == text


def test_toml_files_that_cannot_be_read(tmp_path):
    (tmp_path / "a.toml").write_bytes(b"name = '\xff'")
    with pytest.raises(RecipeError, match=r"a\.toml has bytes that are not UTF-8"):
        read_toml(tmp_path / "a.toml")
    with (tmp_path / "a.toml").open("wb") as stream:
        stream.truncate(1 << 30)
    with pytest.raises(RecipeError, match=r"a\.toml is larger than 4 MiB"):
        read_toml(tmp_path / "a.toml")
