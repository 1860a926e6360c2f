"""Predictions on disk: files of logits or probabilities with labels, read and written in batches."""

from calibrant.predictions.ensemble import open_ensemble
from calibrant.predictions.file import CHUNK, BadFileError, PredictionFile
from calibrant.predictions.reading import FORMATS, batches_of, open_predictions, read_class_counts
from calibrant.predictions.writing import (
    PROBABILITY_SUFFIXES,
    WRITERS,
    rewrite_table,
    write_predictions,
    write_probabilities,
)

__all__ = [
    "CHUNK",
    "FORMATS",
    "PROBABILITY_SUFFIXES",
    "WRITERS",
    "BadFileError",
    "PredictionFile",
    "batches_of",
    "open_ensemble",
    "open_predictions",
    "read_class_counts",
    "rewrite_table",
    "write_predictions",
    "write_probabilities",
]
