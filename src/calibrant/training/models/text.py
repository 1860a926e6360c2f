"""Networks for texts: the convolutional one of the calibration papers, and the average of word vectors."""

from __future__ import annotations

from torch import Tensor, nn

from calibrant.arguments import in_range

SHORTEST_TEXT = 21
"""The shortest text, in positions, that passes through the convolutions and pools of `TextCNN`."""


class TextCNN(nn.Module):
    """Three convolutions over embedded words, the largest value over all positions, two linear layers."""

    def __init__(self, num_classes: int, words: nn.Embedding, dropout: float) -> None:
        super().__init__()
        self.words = words
        layers: list[nn.Module] = []
        for channels in (words.embedding_dim, 128, 128):
            layers += [nn.Conv1d(channels, 128, 5), nn.ReLU(), nn.MaxPool1d(5, stride=1)]
        self.layers = nn.Sequential(*layers[:-1])  # the largest value over all positions follows
        dropped = [nn.Dropout(dropout)] if dropout > 0 else []
        self.head = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), *dropped, nn.Linear(128, num_classes))

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.shape[1] < SHORTEST_TEXT:
            raise ValueError(
                f"text-cnn needs texts of at least {SHORTEST_TEXT} positions, got {tokens.shape[1]}: "
                "pad them to a greater length"
            )
        logits: Tensor = self.head(self.layers(self.words(tokens).transpose(1, 2)).amax(2))
        return logits


def text_cnn(
    num_classes: int,
    *,
    embedding: Tensor | None = None,
    vocabulary_size: int | None = None,
    dimension: int = 100,
    frozen: bool = True,
    dropout: float = 0.0,
) -> TextCNN:
    """The global-pooling CNN that the papers train on 20 Newsgroups.

    As in their releases, all weights start with the values that PyTorch draws by default.

    Args:
        num_classes: K.
        embedding: word vectors ``(V, d)``; by default they are drawn at random and trained.
        vocabulary_size: V, if no embedding is given.
        dimension: d, if no embedding is given.
        frozen: keep a given embedding fixed; False trains it.
        dropout: the probability of dropout before the last layer.

    >>> import torch
    >>> network = text_cnn(20, embedding=torch.zeros(5000, 100))
    >>> sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)
    247316
    """
    in_range("dropout", dropout, 0, 1)
    return TextCNN(num_classes, _words("text-cnn", embedding, vocabulary_size, dimension, frozen), dropout)


class TextBag(nn.Module):
    """A linear layer on the average of the vectors of the words of a text."""

    def __init__(self, num_classes: int, words: nn.Embedding, dropout: float) -> None:
        super().__init__()
        self.words = words
        self.head = nn.Sequential(nn.Dropout(dropout), nn.Linear(words.embedding_dim, num_classes))

    def forward(self, tokens: Tensor) -> Tensor:
        present = (tokens > 0).unsqueeze(2).to(self.words.weight.dtype)  # word 0 fills short texts
        average = (self.words(tokens) * present).sum(1) / present.sum(1).clamp_min(1)
        logits: Tensor = self.head(average)
        return logits


def text_bag(
    num_classes: int,
    *,
    embedding: Tensor | None = None,
    vocabulary_size: int | None = None,
    dimension: int = 100,
    frozen: bool = True,
    dropout: float = 0.0,
) -> TextBag:
    """A linear classifier of the average word vector, as in fastText (Joulin et al., EACL 2017).

    It learns from a few hundred texts, where `text_cnn` without given word vectors learns nothing. Arguments
    as there; ``dropout`` applies to the average.

    >>> import torch
    >>> network = text_bag(2, vocabulary_size=50).eval()
    >>> torch.allclose(network(torch.tensor([[7, 3, 0]])), network(torch.tensor([[3, 7, 0]])))
    True
    """
    in_range("dropout", dropout, 0, 1)
    words = _words("text-bag", embedding, vocabulary_size, dimension, frozen)
    if embedding is None:
        nn.init.normal_(words.weight, std=0.1)  # with a deviation of 1, random words outweigh learned ones
    return TextBag(num_classes, words, dropout)


def _words(
    model: str, embedding: Tensor | None, vocabulary_size: int | None, dimension: int, frozen: bool
) -> nn.Embedding:
    """The layer of word vectors, given or drawn at random."""
    if embedding is None:
        if vocabulary_size is None:
            raise ValueError(f"{model} needs embedding or vocabulary_size, got neither")
        return nn.Embedding(vocabulary_size, dimension)
    if embedding.ndim != 2:
        raise ValueError(f"embedding must have shape (V, d), got {tuple(embedding.shape)}")
    if vocabulary_size not in (None, len(embedding)):
        raise ValueError(f"embedding has {len(embedding)} words and vocabulary_size is {vocabulary_size}")
    words = nn.Embedding(*embedding.shape)
    words.weight = nn.Parameter(embedding.detach().clone().float(), requires_grad=not frozen)
    return words
