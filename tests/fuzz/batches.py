"""Random batches of logits and labels, of every shape, size, type and layout that the library accepts."""

from dataclasses import dataclass

import torch
from hypothesis import note
from hypothesis import strategies as st
from torch import Tensor

SEEDS = st.integers(0, 2**32 - 1)
SCALES = st.one_of(st.sampled_from([1.0, 4.0]), st.floats(-3, 4).map(lambda power: 10.0**power))
EPSILON = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-24}
"""The rounding of one operation in the type that each type of logits is computed in."""


@dataclass
class Batch:
    """A batch as the library gets it, and the same as a plain list of elements.

    Attributes:
        logits: ``(B, K, *S)`` in any type and layout.
        target: labels ``(B, *S)``.
        ignore_index: the label of the elements that do not count.
    """

    logits: Tensor
    target: Tensor
    ignore_index: int = -100

    @property
    def rows(self) -> Tensor:
        """The logits as float64 ``(N, K)``, ignored elements included."""
        return as_rows(self.logits).double()

    @property
    def labels(self) -> Tensor:
        """The labels ``(N,)``, ignored elements included."""
        return self.target.reshape(-1)

    @property
    def valid(self) -> Tensor:
        """Which elements count, ``(N,)``."""
        return self.labels != self.ignore_index

    @property
    def epsilon(self) -> float:
        """The rounding of one operation."""
        return EPSILON[self.logits.dtype]

    def ignore(self, which: Tensor) -> None:
        """Ignore further elements, ``(N,)``."""
        self.target = self.target.masked_fill(which.view(self.target.shape), self.ignore_index)

    def show(self) -> None:
        """Print the batch if its test fails."""
        note(f"logits = torch.tensor({self.logits.tolist()}, dtype={self.logits.dtype})")
        note(f"target = torch.tensor({self.target.tolist()})  # ignore_index={self.ignore_index}")
        note(f"strides = {self.logits.stride()}")


def as_rows(images: Tensor) -> Tensor:
    """From ``(B, K, *S)`` to ``(N, K)``."""
    return images.movedim(1, -1).reshape(-1, images.shape[1])


def as_images(rows: Tensor, shape: torch.Size) -> Tensor:
    """From ``(N, K)`` to ``(B, K, *S)``, contiguous."""
    return rows.view(shape[0], *shape[2:], shape[1]).movedim(-1, 1).contiguous()


def laid_out(images: Tensor, layout: str) -> Tensor:
    """The same numbers with other strides."""
    if layout == "classes last":
        return images.movedim(1, -1).contiguous().movedim(-1, 1)
    if layout == "every second":
        wider = torch.zeros(*images.shape[:-1], 2 * images.shape[-1], dtype=images.dtype)
        wider[..., ::2] = images
        return wider[..., ::2]
    if layout == "reversed axes":
        axes = list(range(images.ndim))
        return images.permute(axes[::-1]).contiguous().permute(axes[::-1])
    return images


@st.composite
def batches(
    draw: st.DrawFn,
    *,
    most: int = 64,
    most_classes: int = 50,
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float64, torch.bfloat16),
    ruled_out: bool = False,
    kinds: tuple[str, ...] = ("plain", "ties", "offset", "equal rows", "certain"),
    flat: bool = False,
) -> Batch:
    """Batches of up to ``most`` elements.

    Args:
        draw: the source of choices.
        most: the most elements.
        most_classes: the most classes.
        dtypes: types of the logits.
        ruled_out: whether some logits may be -inf, never those of the true class.
        kinds: what the logits may look like.
        flat: whether there are no spatial axes.
    """
    classes, size = draw(st.integers(2, most_classes)), draw(st.integers(1, most))
    width = draw(st.sampled_from([n for n in (1, 2, 3, 5) if size % n == 0]))
    spatial = () if flat else draw(st.sampled_from([(), (width,), (1, width)]))
    rows = size // width if spatial else size
    kind, scale = draw(st.sampled_from(kinds)), draw(SCALES)
    dtype = draw(st.sampled_from(dtypes))
    generator = torch.Generator().manual_seed(draw(SEEDS))

    # Drawn for the largest batch and cut: smaller batches have the same numbers, so failures can be reduced.
    logits = torch.randn(most, most_classes, generator=generator, dtype=torch.float64)[:size, :classes]
    guess = torch.randint(2**40, (most,), generator=generator)[:size] % classes
    chances = torch.rand(3, most, generator=generator)[:, :size]
    if kind == "ties":
        logits = logits.mul(2).round()
    logits = logits * scale
    if kind == "offset":
        logits = logits + draw(st.sampled_from([1e3, -1e6, 1e6]))
    if kind == "equal rows":
        logits = logits[torch.arange(size) % max(1, size // 4)]
    if kind == "certain":
        logits = logits.scatter_add(1, guess[:, None], logits.new_full((size, 1), 40 * scale))
    logits = logits.to(dtype)

    right = chances[0] < draw(st.sampled_from([0.0, 0.5, 0.9, 1.0]))
    target = torch.where(right, logits.double().argmax(1), guess.flip(0))
    if draw(st.booleans()) and draw(st.booleans()):
        target = target[:1].expand(size).clone()  # a single class
    if ruled_out and draw(st.booleans()):
        out = logits.double() < logits.double().mean(1, keepdim=True)
        out &= chances[1][:, None] < 0.5
        out.scatter_(1, target[:, None], False)
        logits = logits.masked_fill(out, -torch.inf)
    ignore_index = draw(st.sampled_from([-100, 255]))
    if draw(st.booleans()):
        target = target.masked_fill(chances[2] < 0.3, ignore_index)

    shape = torch.Size([rows, classes, *spatial])
    layout = draw(st.sampled_from(["as is", "classes last", "every second", "reversed axes"]))
    images = laid_out(as_images(logits, shape), layout)
    batch = Batch(images, target.view(rows, *spatial), ignore_index)
    batch.show()
    return batch
