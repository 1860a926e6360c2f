"""Compiles the GPU kernels for a GPU that is not there, at sizes at which they would run; launches none.

Triton's interpreter accepts more of Python than its compiler, so kernels that pass interpreted may still fail
to compile. Run by itself, since a process either interprets kernels or compiles them.
"""

from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel

import calibrant
from calibrant.kernels.launch import Launcher
from calibrant.losses import base

TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
    torch.bool: "i1",
}
HOPPER = GPUTarget("cuda", 90, 32)
done: set[str] = set()


def compile_only(self: Launcher, tensors: tuple[Tensor | None, ...], *others: object) -> None:
    """In place of a launch."""
    kernel = self.kernel
    signature, constants, attributes = {}, {}, {}

    def kind(place: tuple[int, ...], argument: object) -> Any:
        if isinstance(argument, tuple):
            return type(argument)(*(kind((*place, number), part) for number, part in enumerate(argument)))
        if isinstance(argument, tl.constexpr):
            constants[place] = argument.value
            return "constexpr"
        if argument is None or (type(argument) is int and argument == 1):
            constants[place] = argument
            return "constexpr"
        if isinstance(argument, Tensor) or (isinstance(argument, int) and argument % 16 == 0):
            attributes[place] = [["tt.divisibility", 16]]
        if isinstance(argument, Tensor):
            return f"*{TYPES[argument.dtype]}"
        return "fp32" if isinstance(argument, float) else "i32"

    for number, (parameter, argument) in enumerate(zip(kernel.params, (*tensors, *others), strict=True)):
        if parameter.is_constexpr:
            signature[parameter.name], constants[(number,)] = "constexpr", argument
        else:
            signature[parameter.name] = kind((number,), argument)
    source = ASTSource(kernel, signature, constants, attributes)
    assert compile_kernel(source, target=HOPPER, options=self.settings).asm["cubin"]
    done.add(kernel.__name__)


def batch(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.empty(shape, dtype=dtype), torch.zeros((shape[0], *shape[2:]), dtype=torch.long)


def main() -> None:
    Launcher.__call__ = compile_only  # type: ignore[method-assign]
    base.can_fuse = lambda logits, target: True
    cases: tuple[tuple[str, dict[str, Any], tuple[int, ...], torch.dtype], ...] = (
        ("cals-alm", {}, (16384, 1000), torch.bfloat16),
        ("cals-alm", {"per": "all"}, (16, 100), torch.float32),
        ("cals-hr", {}, (2, 150, 64, 64), torch.bfloat16),
        ("ada-dual-focal", {}, (2, 21, 64, 64), torch.float32),
        ("calfocal", {"through_gamma": True}, (16, 100), torch.float32),
        ("brier", {}, (30, 10), torch.float32),
        ("ls", {}, (30, 10), torch.float16),
        ("ada-scale", {}, (20, 20_000), torch.float32),
    )
    for name, options, shape, dtype in cases:
        logits, target = batch(*shape, dtype=dtype)
        calibrant.create_loss(name, shape[1], **options)(logits.requires_grad_(), target).backward()
    print(*sorted(done))


if __name__ == "__main__":
    main()
