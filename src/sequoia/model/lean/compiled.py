"""Compiled forms of `fused`'s functions, by torch's inductor: one for any number of rows, called without guards.

A guard costs more than what it guards here. What makes it needless: all calls of a model are seen, at two numbers of
rows, before its kernels are made, and differ in nothing but rows and the cache's capacity.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from threading import Lock, Thread
from typing import Any

import torch
from torch import SymInt, Tensor, func

from sequoia.model.lean.fused import PLAIN, Kernels

_OPTIONS = {
    "compile_threads": 1,  # none of inductor's worker processes, which take the cores from the passes
    "size_asserts": False,
    "scalar_asserts": False,
}
_WIDE = 2048  # outputs from which on more threads than one save more than it takes to start them
_ROWS = (7, 11, 1)  # in passes that calls are taken from: two to see what follows the rows, and the case on its own
_TOLERANCE = 0.2  # as for 16-bit passes: rounding may move an 8-bit number's second half by all of its range

_one_at_a_time = Lock()  # inductor's options are the whole process's

Arguments = tuple[Any, ...]  # tensors first
Function = Callable[..., Any]
RunPass = Callable[[Kernels, int], object]  # a pass of as many rows


@dataclass(frozen=True)
class Site:
    """The calls of a function with one width, one for each of `_ROWS`."""

    function: Function
    calls: tuple[Arguments, ...]

    @property
    def tensors(self) -> int:
        return sum(isinstance(argument, Tensor) for argument in self.calls[0])


class _Form:
    """A compiled function, called as the function is."""

    def __init__(self, site: Site, run: Callable[[list[Any]], Sequence[Any]]) -> None:
        self._run, self._tensors = run, site.tensors
        self._single = inspect.signature(site.function).return_annotation == "Tensor"

    def __call__(self, *arguments: Any) -> Any:
        found = self._run([*arguments[: self._tensors]])
        return found[0] if self._single else found


class _ByWidth:
    """A function's compiled forms by the width of its first argument, and itself for any other."""

    def __init__(self, function: Function, forms: Mapping[int, Function]) -> None:
        self._function, self._forms = function, forms

    def __call__(self, *arguments: Any) -> Any:
        return self._forms.get(arguments[0].shape[-1], self._function)(*arguments)


def compile_later(
    run_pass: RunPass, folder: Path, take: Callable[[Kernels], None], tell: Callable[[str], None]
) -> Thread:
    """Compile in the background, while passes go on as they are.

    Args:
        run_pass: see `compiled`.
        folder: keeps what was compiled, where the user has named none to inductor.
        take: called with the kernels once they are ready and checked.
        tell: called with a line of text instead, where they cannot be made.
    """
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))

    def work() -> None:
        try:
            with _one_at_a_time, torch.no_grad():
                kernels = compiled(run_pass)
        except Exception as error:  # inductor is private to torch, and compilers differ: passes go on without
            reason = (str(error).split("\n")[0] or type(error).__name__)[:200]
            tell(f"passes are not compiled: {reason}")
            return
        take(kernels)

    thread = Thread(target=work, name="compile", daemon=True)
    thread.start()
    return thread


def compiled(run_pass: RunPass) -> Kernels:
    """Compile what a model's passes call, one function after another; those not called stay as they are.

    Args:
        run_pass: runs a pass with these kernels.

    Raises:
        RuntimeError: a kernel gives other numbers than its function.
        Exception: whatever inductor and the C++ compiler raise.
    """
    found: dict[str, dict[int, Function]] = {}
    for name, by_width in _sites(run_pass).items():
        found[name] = {width: _checked(site, _Form(site, _compile(site))) for width, site in by_width.items()}
    return Kernels(**{name: _ByWidth(getattr(PLAIN, name), forms) for name, forms in found.items()})


def _sites(run_pass: RunPass) -> dict[str, dict[int, Site]]:
    """By function and width. Calls of one width that differ in other sizes are left out."""
    recorded = [_recorded(run_pass, rows) for rows in _ROWS]
    return {
        name: {
            width: Site(getattr(PLAIN, name), tuple(calls[name][width] for calls in recorded))
            for width in by_width
            if all(calls[name][width] for calls in recorded)
        }
        for name, by_width in recorded[0].items()
    }


def _recorded(run_pass: RunPass, rows: int) -> dict[str, dict[int, Arguments]]:
    calls: dict[str, dict[int, Arguments]] = {}

    def noting(name: str) -> Function:
        def note(*arguments: Any) -> Any:
            by_width = calls.setdefault(name, {})
            width = arguments[0].shape[-1]
            known = by_width.setdefault(width, arguments)
            if _form_of(known) != _form_of(arguments):
                by_width[width] = ()
            return getattr(PLAIN, name)(*arguments)

        return note

    run_pass(Kernels(**{entry.name: noting(entry.name) for entry in fields(Kernels)}), rows)
    return calls


def _form_of(arguments: Arguments) -> list[object]:
    return [(arg.shape, arg.stride(), arg.dtype) if isinstance(arg, Tensor) else arg for arg in arguments]


def _compile(site: Site) -> Callable[[list[Any]], Sequence[Any]]:
    """A compiled form, which takes the tensors in a list."""
    from torch._dispatch.python import enable_python_dispatcher
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv())
    constants = site.calls[0][site.tensors :]

    def body(*tensors: Tensor) -> tuple[Tensor, ...]:
        found = site.function(*tensors, *constants)
        return found if isinstance(found, tuple) else (found,)

    with mode, enable_python_dispatcher():
        inputs = _dynamic(site, mode)
        graph = make_fx(func.functionalize(body, remove="mutations"), decomposition_table=select_decomp_table())(
            *inputs
        )
    threads = torch.get_num_threads() if site.calls[0][0].shape[-1] >= _WIDE else 1
    with config.patch(_OPTIONS | {"cpp.threads": threads}), tracing(TracingContext(mode)):
        output: Any = compile_fx_inner(graph, inputs)
    run: Callable[[list[Any]], Sequence[Any]] = output.current_callable
    return run


def _dynamic(site: Site, mode: Any) -> list[Tensor]:
    """The tensors without numbers, sizes that follow the rows as a symbol, and the cache's capacity as another."""
    rows, outer = (_symbol(mode.shape_env, name, hint) for name, hint in (("rows", _ROWS[0]), ("outer", 1 << 14)))

    def dynamic(one: Tensor, other: Tensor) -> Tensor:
        pairs = zip(one.shape, other.shape, strict=True)
        sizes = [a if a == b else rows * (a // _ROWS[0]) for a, b in pairs]
        if one.is_contiguous():
            return torch.empty(sizes, dtype=one.dtype)
        return torch.empty_strided(sizes, [outer, *one.stride()[1:]], dtype=one.dtype)

    return [dynamic(*pair) for pair in zip(*site.calls[:2], strict=True) if isinstance(pair[0], Tensor)]


def _symbol(environment: Any, name: str, hint: int) -> SymInt:
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    source = ConstantSource(name)
    symbol = environment.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC)
    found: SymInt = environment.create_symintnode(symbol, hint=hint, source=source)
    return found


def _checked(site: Site, form: Function) -> Function:
    """The form, if it gives and writes what the function does."""
    for arguments in site.calls:
        found, expected = (_outcome(run, arguments) for run in (form, site.function))
        for one, other in zip(found, expected, strict=True):
            distance = (one.float() - other.float()).square().mean().sqrt()
            if not distance <= _TOLERANCE * other.float().square().mean().sqrt():
                raise RuntimeError(f"{site.function.__name__} gives other numbers when compiled")
    return form


def _outcome(run: Function, arguments: Arguments) -> list[Tensor]:
    """What a function returns, and its arguments afterwards."""
    fresh = [_copy(arg) if isinstance(arg, Tensor) else arg for arg in arguments]
    found = run(*fresh)
    after = [arg for arg in fresh if isinstance(arg, Tensor)]
    return [*(found if isinstance(found, tuple | list) else (found,)), *after]


def _copy(tensor: Tensor) -> Tensor:
    """With the same strides."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)
