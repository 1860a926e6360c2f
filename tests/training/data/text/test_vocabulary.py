"""How texts are split into words."""

import pytest

from calibrant.training.data.text.encoding import tokens


class TestTokens:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("", []),
            (" \n\t", []),
            ("Don't can't", ["do", "n't", "ca", "n't"]),
            ("they've John's I'm", ["they", "'ve", "john", "'s", "i", "'m"]),
            ("1,000.50 v2", ["1,000.50", "v", "2"]),
            ("end. >>>> next", ["end", ".", ">", "next"]),
            ("snake_case ____", ["snake", "_", "case", "_"]),
            ("Éa ü", ["éa", "ü"]),
            ("a-b@c.com", ["a", "-", "b", "@", "c", ".", "com"]),
        ],
    )
    def test_examples(self, text, expected):
        assert tokens(text) == expected

    def test_loses_nothing_but_blanks_and_repeats(self):
        text = "x+y=z; (a|b) ~ 'quoted' 3.14.15"
        assert "".join(tokens(text)) == text.replace(" ", "")
