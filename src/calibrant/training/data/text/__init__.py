"""Text classification data sets: 20 Newsgroups, tables of texts, and Hugging Face data sets."""

from calibrant.training.data.text.encoding import TokenPreparation, WordPreparation
from calibrant.training.data.text.tables import huggingface, text_table
from calibrant.training.data.text.twenty_newsgroups import newsgroups

__all__ = ["TokenPreparation", "WordPreparation", "huggingface", "newsgroups", "text_table"]
