"""Compiles the GPU kernels for a GPU that is not there, at sizes at which they would run; launches none.

What Triton interprets it need not be able to compile: it takes less of Python then. Run by itself, since a
process either interprets kernels or compiles them.
"""

import re
from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel

import calibrant
from calibrant.kernels import Fused, fused, gap_sums, margin_sums, native, outcomes, top_classes
from calibrant.layout import arrange

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


def compile_only(self: fused.Starter, *arguments: object) -> None:
    """In place of a launch."""
    kernel = self.kernel
    signature, constants, attributes = {}, {}, {}
    for number, (parameter, argument) in enumerate(zip(kernel.params, arguments, strict=True)):
        name = parameter.name
        if parameter.is_constexpr or (isinstance(argument, int) and argument == 1):
            signature[name], constants[(number,)] = "constexpr", argument
            continue
        if isinstance(argument, Tensor):
            signature[name] = f"*{TYPES[argument.dtype]}"
        elif isinstance(argument, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32"
        if isinstance(argument, Tensor) or (isinstance(argument, int) and argument % 16 == 0):
            attributes[(number,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = compile_kernel(source, target=HOPPER, options=self._settings)
    assert compiled.asm["cubin"]
    check_parameters(kernel, compiled, arguments)
    done.add(kernel.__name__)


def check_parameters(kernel: Any, compiled: Any, arguments: tuple[object, ...]) -> None:
    """See that C++ would give the kernel the parameters that it has."""
    compiled.function = 1  # without a driver it has not been loaded
    numbered = [native.Number(0) if isinstance(each, Tensor) else each for each in arguments]
    given = native.described(compiled, 1, kernel.arg_names, numbered)[4]
    (listed,) = re.findall(r"\.entry[^(]*\((.*?)\)", compiled.asm["ptx"], re.DOTALL)
    wanted = re.findall(r"\.param \.(\w+)", listed)
    kinds = [kind for kind in compiled.src.signature.values() if kind != "constexpr"]
    types = ["u64" if kind.startswith("*") else {"i32": "u32", "fp32": "f32"}[kind] for kind in kinds]
    assert len(given) == len(types)
    assert wanted[: len(types)] == types
    assert set(wanted[len(types) :]) <= {"u64"}  # memory of Triton's own
    assert len(wanted) <= len(types) + 4


def batch(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.empty(shape, dtype=dtype), torch.zeros((shape[0], *shape[2:]), dtype=torch.long)


def main() -> None:
    fused.Starter.__call__ = compile_only  # type: ignore[method-assign]
    for name, shape, dtype in (
        ("cals-alm", (16384, 1000), torch.bfloat16),
        ("cals-alm", (2, 150, 64, 64), torch.bfloat16),
        ("ada-dual-focal", (2, 21, 64, 64), torch.float32),
        ("calfocal", (128, 100), torch.float32),
        ("brier", (4, 50257), torch.float32),
        ("ls", (300, 10), torch.float16),
    ):
        loss = calibrant.create_loss(name, shape[1])
        recipe = loss.fused()
        assert recipe is not None
        logits, target = batch(*shape, dtype=dtype)
        value = fused.fused_loss(recipe, logits.requires_grad_(), target, loss._eager)
        value.backward()
    for shape in ((16384, 1000), (2, 21, 64, 64), (300, 10)):
        elements = arrange(*batch(*shape), num_classes=shape[1])
        outcomes(elements)
        top_classes(elements)
        gap_sums(elements, torch.linspace(0, 1, 16))
        for loss in (calibrant.create_loss("cals-alm", shape[1]), calibrant.create_loss("cals-hr", shape[1])):
            recipe = loss.fused()
            assert isinstance(recipe, Fused)
            margin_sums(elements, recipe)
    print(*sorted(done))


if __name__ == "__main__":
    main()
