"""Kernels are launched from C++ as from Python.

A driver of our own stands in for CUDA's: it computes a sum of logits times the label's number. That kernels
compiled by Triton come out right is a matter of ``tests/losses/test_cuda.py``.
"""

import copy
import ctypes
import fcntl
import gc
import os
import pickle
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch.autograd import forward_ad

import calibrant
from calibrant.kernels import fused, native
from calibrant.losses import base

COMPUTE, FINISH, SCALE = 1, 2, 3
HERE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, where there is no class
Buffers = dict[str, Tensor | None]


@pytest.fixture(scope="module")
def module() -> ModuleType:
    try:
        return native.load(native.built())
    except RuntimeError as error:
        if "no C++ compiler" not in str(error):
            raise
        pytest.skip(str(error))


def floats(address: int, size: int) -> Any:
    return (ctypes.c_float * size).from_address(address)


class Driver:
    """Launches three kernels on the CPU, and remembers what was launched."""

    def __init__(self, size: int) -> None:
        self.size, self.launched, self.error, self.own = size, [], 0, 0
        numbers = [ctypes.c_uint] * 7
        self._launch = ctypes.CFUNCTYPE(
            ctypes.c_int,
            ctypes.c_void_p,
            *numbers,
            ctypes.c_void_p,
            ctypes.POINTER(ctypes.c_void_p),
            ctypes.c_void_p,
        )(self.launch)
        place = ctypes.POINTER(ctypes.c_void_p)
        self._stream = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int32, place)(self.stream)
        self._context = ctypes.CFUNCTYPE(ctypes.c_int, place)(self.current_context)
        self._retain = ctypes.CFUNCTYPE(ctypes.c_int, place, ctypes.c_int)(self.retain_context)
        self._set = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(self.set_context)
        self.context, self.retained = 5, []

    def addresses(self) -> tuple[int | None, ...]:
        functions = (self._launch, self._stream, self._context, self._retain, self._set)
        return tuple(ctypes.cast(each, ctypes.c_void_p).value for each in functions)

    def current_context(self, place: Any) -> int:
        place[0] = self.context
        return 0

    def retain_context(self, place: Any, device: int) -> int:
        self.retained.append(device)
        place[0] = 8
        return 0

    def set_context(self, context: int) -> int:
        self.context = context
        return 0

    def stream(self, device: int, place: Any) -> int:
        place[0] = 77
        return 0

    def launch(self, function: int, *rest: Any) -> int:
        *grid, stream, parameters, _ = rest
        self.launched.append((function, tuple(grid), stream))
        cells = [ctypes.c_uint64.from_address(parameters[number]).value for number in range(6)]
        if function == COMPUTE:
            logits, target, value, gradient, found, self.own = cells
            factors = (ctypes.c_int64 * self.size).from_address(target)
            floats(value, 1)[0] = sum(a * b for a, b in zip(floats(logits, self.size), factors, strict=True))
            for number, factor in enumerate(factors):
                floats(gradient, self.size)[number] = factor
            if found != value:
                floats(found, 1)[0] = 0.5
        elif function == FINISH:
            found, value, number = cells[:3]
            assert ctypes.c_float.from_buffer(ctypes.c_uint32(number)).value == 0.25
            floats(value, 1)[0] *= floats(found, 1)[0]
        else:
            gradient, upstream, found = cells[:3]
            factor = floats(upstream, 1)[0] * floats(found, 1)[0]
            for number in range(self.size):
                floats(gradient, self.size)[number] *= factor
        return self.error


KERNELS = (
    (
        COMPUTE,
        3,
        128,
        16,
        [
            (native.LOGITS, 0),
            (native.TARGET, 0),
            (native.VALUE, 0),
            (native.GRADIENT, 0),
            (native.FOUND, 0),
            (native.OWN + 1, 0),
        ],
    ),
    (FINISH, 1, 32, 0, [(native.FOUND, 0), (native.VALUE, 0), (-1, native._bits("fp32", 0.25))]),
    (SCALE, 2, 64, 0, [(native.GRADIENT, 0), (native.UPSTREAM, 0), (native.FOUND, 0)]),
)


class Call:
    """A loss of four logits, their sum times the target, halved if several programs work on it."""

    def __init__(self, module: ModuleType, several: bool = True) -> None:
        self.logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]], requires_grad=True)
        self.target = torch.tensor([[1, 0, -1, 2]])
        self.driver, self.asked = Driver(4), []
        kernels = KERNELS if several else (KERNELS[0], None, None)
        self.plan = module.plan(self.driver.addresses(), *kernels, self.logits, self.target, 3 * several)
        self.weight, self.class_weight = torch.ones(2), torch.ones(4)
        self.buffers: Buffers = {
            "weight": self.weight,
            "nothing": None,
            "class_weight": self.class_weight,
        }
        own = (self.class_weight, self.weight, None, None, None, None, None)
        self.call: Callable[..., Tensor | None] = module.again(self.plan, self.buffers, own, self.otherwise)

    def otherwise(self, *arguments: Any) -> Tensor:
        self.asked.append(arguments)
        logits, target, upstream = arguments[:3]
        gradient: Tensor = 100 * upstream * target + 0 * logits
        return gradient

    def __call__(self) -> Tensor:
        value = self.call(self.logits, self.target)
        assert value is not None
        return value


@pytest.mark.parametrize("several", [False, True])
def test_value_and_gradient(module: ModuleType, several: bool) -> None:
    call = Call(module, several)
    value = call()
    half = 0.5 if several else 1.0
    assert value.item() == half * (1 - 3 + 8)
    assert value.dtype == torch.float32
    assert value.shape == ()
    (3 * value).backward()
    assert call.logits.grad is not None
    assert call.logits.grad.tolist() == [[3 * half, 0, -3 * half, 6 * half]]
    assert call.driver.launched[0] == (COMPUTE, (3, 1, 1, 128, 1, 1, 16), 77)
    assert call.driver.own == call.weight.data_ptr()
    assert [each[0] for each in call.driver.launched] == ([COMPUTE, FINISH, SCALE] if several else [COMPUTE])
    assert call.asked == []


def test_a_second_pass_over_a_graph(module: ModuleType) -> None:
    call = Call(module)
    value = call()
    value.backward(retain_graph=True)
    (gradient,) = torch.autograd.grad(value, call.logits, torch.tensor(2.0))
    assert gradient.tolist() == [[200, 0, -200, 400]]
    ((logits, target, upstream, found, versions),) = call.asked
    assert torch.equal(logits, call.logits)
    assert torch.equal(target, call.target)
    assert upstream.item() == 2
    assert found[0].item() == 0.5
    assert versions == (call.class_weight._version, call.weight._version)
    with pytest.raises(RuntimeError, match="second time"):
        value.backward()


def test_no_correction_for_one_program(module: ModuleType) -> None:
    call = Call(module, several=False)
    value = call()
    value.backward(retain_graph=True)
    value.backward()
    assert call.asked[0][3] is None


def test_the_state_of_the_forward_pass_is_told(module: ModuleType) -> None:
    call = Call(module)
    value = call()
    before = call.class_weight._version, call.weight._version
    call.weight.add_(1)
    call.class_weight.add_(1)
    value.backward(retain_graph=True)  # the gradient is there already
    value.backward()
    assert call.asked[0][4] == before


@pytest.mark.parametrize("several", [False, True])
def test_upstream_gradients_that_memory_does_not_hold(module: ModuleType, several: bool) -> None:
    for upstream, factor in ((torch._efficientzerotensor(()), 0), (torch._neg_view(torch.tensor(2.0)), -2)):
        call = Call(module, several)
        call().backward(upstream)
        assert call.logits.grad is not None
        half = 0.5 if several else 1.0
        assert call.logits.grad.tolist() == [[factor * half, 0, -factor * half, 2 * factor * half]]


def test_gradients_of_gradients(module: ModuleType) -> None:
    call = Call(module)
    (gradient,) = torch.autograd.grad(call(), call.logits, create_graph=True)
    assert gradient.requires_grad
    assert len(call.asked) == 1


def test_errors_of_python_come_through(module: ModuleType) -> None:
    call = Call(module)

    def fail(*arguments: object) -> Tensor:
        raise ValueError("nothing to be had")

    own = (None,) * 7
    value = module.again(call.plan, {}, own, fail)(call.logits, call.target)
    value.backward(retain_graph=True)
    with pytest.raises(ValueError, match="nothing to be had"):
        value.backward()


def test_errors_of_the_driver_come_through(module: ModuleType) -> None:
    call = Call(module)
    call.driver.error = 700
    with pytest.raises(RuntimeError, match="CUDA error 700"):
        call()


def test_logits_that_were_changed_in_place(module: ModuleType) -> None:
    call = Call(module)
    leaf = call.logits
    call.logits = leaf * 1
    value = call()
    value.backward(retain_graph=True)
    with torch.no_grad():
        call.logits.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


class Subclass(Tensor):
    pass


def in_forward_mode(call: Call) -> object:
    with forward_ad.dual_level():
        return call.call(forward_ad.make_dual(call.logits, torch.ones(1, 4)), call.target)


CHANGES: dict[str, Callable[[Call], object]] = {
    "shape": lambda call: call.call(torch.ones(1, 3, requires_grad=True), call.target),
    "layout": lambda call: call.call(torch.ones(4, 2)[:, 0].view(1, 4).requires_grad_(), call.target),
    "type": lambda call: call.call(call.logits.detach().double().requires_grad_(), call.target),
    "type of labels": lambda call: call.call(call.logits, call.target.int()),
    "strided labels": lambda call: call.call(call.logits, torch.zeros(1, 8, dtype=torch.long)[:, ::2]),
    "place": lambda call: call.call(torch.ones(5)[1:].view(1, 4).requires_grad_(), call.target),
    "no gradient": lambda call: call.call(call.logits.detach(), call.target),
    "a subclass": lambda call: call.call(call.logits.as_subclass(Subclass), call.target),
    "the opposite in memory": lambda call: call.call(
        torch._neg_view(torch.ones(1, 4)).requires_grad_(), call.target
    ),
    "nothing in memory": lambda call: call.call(
        torch._efficientzerotensor((1, 4)).requires_grad_(), call.target
    ),
    "sparse": lambda call: call.call(torch.ones(1, 4).to_sparse().requires_grad_(), call.target),
    "nested": lambda call: call.call(
        torch.nested.nested_tensor([torch.ones(4)], requires_grad=True), call.target
    ),
    "forward mode": lambda call: in_forward_mode(call),
    "no tensor": lambda call: call.call([[1.0]], call.target),
    "no labels": lambda call: call.call(call.logits, None),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # of torch, about its own
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_different_is_left_to_python(module: ModuleType, change: str) -> None:
    call = Call(module)
    assert CHANGES[change](call) is None
    assert call.driver.launched == []


def test_a_gradient_of_the_target_is_left_to_python(module: ModuleType) -> None:
    call = Call(module)
    target = torch.zeros(1, 4)
    plan = module.plan(call.driver.addresses(), *KERNELS, call.logits, target, 3)
    again = module.again(plan, {}, (None,) * 7, call.otherwise)
    assert again(call.logits, target) is not None
    assert again(call.logits, target.requires_grad_()) is None


def test_modes_are_left_to_python(module: ModuleType) -> None:
    from torch.overrides import TorchFunctionMode
    from torch.utils.flop_counter import FlopCounterMode

    class Watch(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function(*args, **(kwargs or {}))

    call = Call(module)
    for mode in (torch.no_grad(), torch.inference_mode(), Watch(), FlopCounterMode(display=False)):
        with mode:
            assert call.call(call.logits, call.target) is None
    assert call.driver.launched == []
    with torch.device("cpu"):  # a mode as well, but one that does not matter
        call()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what torch does inside
def test_transforms_are_left_to_python(module: ModuleType) -> None:
    call = Call(module)
    found = []

    def watched(logits: Tensor) -> Tensor:
        found.append(call.call(logits, call.target))
        return logits.sum()

    torch.func.grad(watched)(call.logits.detach())
    torch.func.vmap(watched)(call.logits.detach().expand(2, 1, 4))
    torch.func.jvp(watched, (call.logits.detach(),), (torch.ones(1, 4),))
    torch.jit.trace(watched, (call.logits,), check_trace=False)
    assert found == [None] * len(found)
    assert len(found) >= 4
    assert call.driver.launched == []


def test_a_thread_without_a_context_gets_one(module: ModuleType) -> None:
    call = Call(module)
    call()
    assert call.driver.retained == []
    call.driver.context = None
    call()
    assert call.driver.context == 8
    assert call.driver.retained == [-1]  # the number of the CPU


def test_other_buffers_are_left_to_python(module: ModuleType) -> None:
    call = Call(module)
    call.buffers["weight"] = call.weight.clone()
    assert call.call(call.logits, call.target) is None
    call.buffers["weight"] = call.weight
    call()
    for other in (torch.ones(2, dtype=torch.float16), torch.ones(1)):
        weight = call.weight.data
        call.weight.data = other
        assert call.call(call.logits, call.target) is None
        call.weight.data = weight
    call()
    del call.buffers["weight"]
    assert call.call(call.logits, call.target) is None


def test_nothing_is_kept_alive(module: ModuleType) -> None:
    call = Call(module)
    call.buffers["itself"] = call.call  # type: ignore[assignment]
    gone = weakref.ref(call.driver), weakref.ref(call.weight)
    value = call()
    value.backward()
    del call, value
    gc.collect()
    assert [each() for each in gone] == [None, None]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (({}, (None,) * 3, print), "seven tensors"),
        (({}, (None,) * 6 + (1,), print), "must be tensors"),
        (([], (None,) * 7, print), "must be dict"),
    ],
)
def test_bad_arguments(module: ModuleType, arguments: tuple[Any, ...], error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        module.again(Call(module).plan, *arguments)


def test_bad_kernels(module: ModuleType) -> None:
    logits, target = torch.ones(1, 2), torch.zeros(1)
    for parameters, error in (([(13, 0)], "no tensor of that number"), ([(0, 0)] * 61, "60 parameters")):
        with pytest.raises(ValueError, match=error):
            module.plan((1,) * 5, (1, 1, 32, 0, parameters), None, None, logits, target, 0)


# --------------------------------------------------------------------------------------- on the Python side


def test_kernels_are_described() -> None:
    signature = {"x": "*bf16", "stride": "i32", "one": "constexpr", "scale": "fp32", "K": "constexpr"}
    compiled = SimpleNamespace(
        src=SimpleNamespace(signature=signature),
        metadata=SimpleNamespace(num_warps=4, shared=512),
        function=42,
    )
    found = native.described(compiled, 7, list(signature), [native.GRADIENT, 1000, 1, 0.5, 21])
    assert found == (42, 7, 128, 512, [(11, 0), (-1, 1000), (-1, 0x3F000000)])
    assert native._bits("fp32", 1e39) == native._bits("fp32", float("inf"))
    with pytest.raises(TypeError, match="stride is compiled as i32, but given as Number"):
        native.described(compiled, 7, list(signature), [native.GRADIENT, native.VALUE, 1, 0.5, 21])


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    builder = native._Builder()
    assert builder.wait() is None


def test_a_compiler_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "sh -c 'echo no way >&2; exit 3'")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(RuntimeError, match="failed: no way"):
        native.built()
    assert [path.name for path in (tmp_path / "calibrant").iterdir()] == ["lock"]


def test_it_is_built_once(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*arguments: object, **options: object) -> None:
        raise AssertionError("it was compiled again")

    monkeypatch.setattr(subprocess, "run", run)
    builder = native._Builder()
    assert builder.wait() is not None


def test_a_build_outlives_its_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "a compiler"
    compiler.write_text('#!/bin/sh\nsleep 2\nwhile [ "$1" != -o ]; do shift; done\necho compiled > "$2"\n')
    compiler.chmod(0o755)
    program = "import threading, time; from calibrant.kernels import native; native.module(); time.sleep(0.5)"
    environment = {**os.environ, "CXX": f"'{compiler}'", "XDG_CACHE_HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=60)
    folder = tmp_path / "calibrant"
    assert list(folder.glob("*.so")) == []
    monkeypatch.setenv("CXX", "false")  # whoever else wants it waits, and does not compile
    with (folder / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
    (path,) = folder.glob("*.so")
    assert path.read_text() == "compiled\n"


def test_a_fork_does_not_hold_the_lock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\nsleep 1\nwhile [ "$1" != -o ]; do shift; done\necho compiled > "$2"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with ThreadPoolExecutor(1) as thread:
        building = thread.submit(native.built)
        while not (tmp_path / "calibrant" / "lock").exists():
            time.sleep(0.01)
        time.sleep(0.3)
        worker = get_context("fork").Process(target=time.sleep, args=(60,))  # as of a data loader
        worker.start()
        building.result()
    try:
        with (tmp_path / "calibrant" / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        worker.kill()
        worker.join()


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CALIBRANT_NATIVE", "0")
    assert native._Builder().wait() is None


def test_a_loss_does_again_what_it_did() -> None:
    loss = calibrant.create_loss("cals-alm", 3)
    logits, target = torch.randn(2, 3), torch.tensor([0, 1])
    wanted = loss(logits, target)

    def remember(value: Tensor | None) -> None:
        loss.__dict__["_again"] = lambda logits, target: value

    remember(torch.tensor(5.0))
    assert loss(logits, target).item() == 5
    remember(None)
    assert torch.equal(loss(logits, target), wanted)
    remember(torch.tensor(5.0))
    with compiled_autograd._enable(torch.compile(backend="eager")):
        assert torch.equal(loss(logits, target), wanted)
    state = loss.state_dict()
    loss.unneeded = 1
    for change in (
        lambda: loss.load_state_dict(state),
        lambda: setattr(loss, "margin", 3.0),
        lambda: setattr(loss, "reduction", "sum"),
        lambda: loss.eval(),
        lambda: setattr(loss, "multiplier", loss.multiplier.clone()),
        lambda: delattr(loss, "unneeded"),
    ):
        remember(torch.tensor(5.0))
        change()
        assert loss(logits, target).item() != 5
    remember(torch.tensor(5.0))
    for other in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        assert other(logits, target).item() != 5


@pytest.mark.usefixtures("handed_over")
def test_a_loss_that_is_changed_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = calibrant.create_loss("cals-alm", 3).to(HERE)
    logits, target = torch.randn(2, 3, device=HERE, requires_grad=True), torch.tensor([0, 1], device=HERE)
    plain = base.again

    def slowly(*arguments: Any) -> Any:
        found = plain(*arguments)
        assert found is not None
        loss.margin = 3.0  # as another thread may do
        return found

    monkeypatch.setattr(base, "can_fuse", lambda logits, target: True)
    loss(logits, target)
    assert loss._again is not None
    del loss.__dict__["_again"]
    monkeypatch.setattr(base, "again", slowly)
    loss(logits, target)
    assert loss._again is None


# ---------------------------------------------------------------------------------- what may be handed over


@pytest.fixture
def handed_over(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The plans that are asked for, of kernels that Triton has only interpreted."""
    asked: list[tuple[Any, ...]] = []

    def hand_over(module: Any, plan: Any, own: Any, logits: Tensor, target: Tensor) -> object:
        asked.append((logits.shape, target.shape))
        return object()

    fake = SimpleNamespace(again=lambda *arguments: arguments)
    monkeypatch.setattr(native, "module", lambda: fake)
    monkeypatch.setattr(fused, "_handed_over", hand_over)
    monkeypatch.setattr(fused, "_LAUNCHES", {})
    return asked


def remembered(
    logits: Tensor, target: Tensor, reduction: str = "mean", recipe: Any = None, loss: Any = None
) -> Any:
    loss = loss or calibrant.create_loss("cals-alm", logits.shape[1]).to(HERE)
    recipe = recipe or loss.fused()
    logits.requires_grad_()
    fused.fused_loss(recipe, logits, target, loss._eager, reduction).backward(
        torch.ones(target.shape, device=HERE) if reduction == "none" else None
    )
    return fused.again(recipe, logits, target, loss._eager, loss._buffers, reduction)


def pixels(*shape: int) -> tuple[Tensor, Tensor]:
    logits, target = torch.randn(shape), torch.zeros(shape[0], *shape[2:], dtype=torch.long)
    return logits.to(HERE), target.to(HERE)


def test_a_plan_for_each_shape(handed_over: list[tuple[Any, ...]]) -> None:
    for shape in ((2, 3, 4, 6), (2, 3, 6, 4), (2, 3, 24), (2, 3, 4, 6)):
        assert remembered(*pixels(*shape)) is not None
    assert [tuple(logits) for logits, _ in handed_over] == [(2, 3, 4, 6), (2, 3, 6, 4), (2, 3, 24)]


def test_layouts_that_need_a_copy_are_not_handed_over(handed_over: list[tuple[Any, ...]]) -> None:
    logits, target = pixels(2, 3, 4, 6)
    assert remembered(logits.to(memory_format=torch.channels_last).detach(), target) is not None
    assert remembered(logits.detach().transpose(2, 3), target.transpose(1, 2)) is None
    assert remembered(logits.detach(), pixels(2, 3, 6, 4)[1].transpose(1, 2)) is None
    logits, target = pixels(4, 6)
    assert remembered(logits[:, ::2], target) is None


def test_what_is_not_handed_over(handed_over: list[tuple[Any, ...]]) -> None:
    logits, target = pixels(4, 3)
    assert remembered(logits, target, "none") is None
    assert remembered(logits.detach().half(), target) is None
    recipe = calibrant.create_loss("cals-alm", 3).to(HERE).fused()
    assert recipe is not None
    assert recipe.multiplier is not None
    made_anew = recipe._replace(multiplier=recipe.multiplier.clone())
    assert remembered(logits.detach(), target, recipe=made_anew) is None
    assert remembered(logits.detach(), target) is not None
    with torch.inference_mode():
        uncounted = calibrant.create_loss("cals-alm", 3).to(HERE)
    assert remembered(logits.detach(), target, loss=uncounted) is None


@pytest.mark.usefixtures("handed_over")
def test_a_hand_over_that_fails_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> object:
        raise OSError("libtorch_cuda.so: cannot open shared object file")

    builder = native._Builder()
    monkeypatch.setattr(native, "BUILDER", builder)
    monkeypatch.setattr(fused, "_handed_over", fail)
    assert remembered(*pixels(4, 3)) is None
    assert builder.module is None
