"""Tokenizers of the package transformers."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from calibrant.training.data.safe_readers import MissingDataError
from calibrant.training.data.split import Inputs

# A tokenizer keeps even the truncated tokens of a call in memory, so it gets this many texts at once.
BATCH = 1000


def tokenize(
    root: Path, texts: Sequence[list[str]], lengths: Sequence[int], name: str
) -> tuple[list[Inputs], int]:
    """Convert the texts of each part to ``input_ids`` and ``attention_mask``.

    Args:
        root: the data folder.
        texts: the texts of each part.
        lengths: for each part, how many tokens of a text to keep.
        name: a folder in ``root``, or a name that ``AutoTokenizer.from_pretrained`` understands.

    Returns:
        The inputs of each part, and the size of the vocabulary.
    """
    library = optional_package("transformers")
    source = str(root / name) if (root / name).is_dir() else name
    try:
        tokenizer = library.AutoTokenizer.from_pretrained(source)
    except OSError as error:
        download = f"the tokenizer {name!r} with transformers.AutoTokenizer.from_pretrained from its hub"
        raise MissingDataError(root / name, download, root / name, "save_pretrained") from error
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ValueError(
                f"the tokenizer {name!r} has no padding token: expected one, or an end-of-text token"
            )
        tokenizer.pad_token = tokenizer.eos_token
    options = {"truncation": True, "padding": "max_length", "return_attention_mask": True}
    inputs: list[Inputs] = []
    for part, length in zip(texts, lengths, strict=True):
        keys = ("input_ids", "attention_mask")
        tensors = {key: torch.empty(len(part), length, dtype=torch.long) for key in keys}
        for start in range(0, len(part), BATCH):
            batch = tokenizer(part[start : start + BATCH], max_length=length, **options)
            for key, tensor in tensors.items():
                tensor[start : start + BATCH] = torch.tensor(batch[key])
        inputs.append(tensors)
    return inputs, len(tokenizer)


def optional_package(package: str) -> Any:
    """Import an optional package, or say how to install it."""
    try:
        return import_module(package)
    except ImportError as error:
        raise ImportError(f"this needs the package {package}: pip install {package}") from error
