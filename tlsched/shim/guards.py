"""Guards: learned places where a forward pass must wait for a bucket, and nowhere else.

A parameter may be read outside its own module's forward (tied weights, MultiheadAttention's
projections, a class token), so where to wait is not guessed but recorded: for the first iterations
a torch function mode notes which module's forward is running when a parameter is first used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.nn import Module, Parameter
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from tlsched.shim import compiled
from tlsched.shim.hooks import Uncopied

# Getters that hand out the values themselves; all others (shape, grad, device, …) read none.
_VALUE_GETTERS = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
_NO_VALUES = frozenset(
    {"size", "dim", "stride", "numel", "nelement", "is_floating_point", "is_complex",
     "is_contiguous", "element_size", "requires_grad_", "register_hook", "get_device",
     "register_post_accumulate_grad_hook", "data_ptr", "storage_offset", "backward"}
)  # fmt: skip


class Readers(TorchFunctionMode):
    """Records who reads ``parameters`` first, between :meth:`start_iteration` calls.

    ``need_order`` lists them as the last iteration first read them; ``modules`` holds for each the
    names of all modules in whose forward it was read; ``outside`` those that were first read while
    no module's forward was running (weight averaging, logging).
    """

    def __init__(self, model: Module, parameters: Iterable[Parameter]) -> None:
        super().__init__()
        self.need_order: list[Parameter] = []
        self.modules: dict[Parameter, set[str]] = {p: set() for p in parameters}
        self.first_module: dict[Parameter, str] = {}
        self.outside: set[Parameter] = set()
        self._stack: list[str] = []
        self._seen: set[Parameter] = set()
        self._paused = False
        self._entered = False
        self._handles: list[RemovableHandle | compiled.Boundary] = []
        boundaries = compiled.boundaries(model)
        for name, (module, attribute) in boundaries.items():
            before = functools.partial(self._read_all, name, tuple(module.parameters()))
            self._handles.append(compiled.Boundary(module, attribute, before, hide=self))
        for name, module in model.named_modules():
            if compiled.outermost(name, boundaries) is None:
                self._handles += [
                    module.register_forward_pre_hook(Uncopied(self._enter(name)), prepend=True),
                    module.register_forward_hook(Uncopied(self._leave), always_call=True),
                ]

    def start(self) -> None:
        """Begin to record."""
        self.__enter__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._entered = True

    def start_iteration(self) -> None:
        """A new iteration: whatever is read next is needed first."""
        self.need_order.clear()
        self._seen.clear()

    def pause(self, paused: bool) -> None:
        """Look away while tlsched itself reads the parameters."""
        self._paused = paused

    def stop(self) -> None:
        """Stop recording and leave the mode, also from under modes that were entered later."""
        self._paused = True
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._entered:
            self._entered = False
            _take_out(self)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Note the parameters among the arguments, then do what was asked."""
        if torch.compiler.is_compiling():
            return func(*args, **(kwargs or {}))
        if not self._paused and _reads_values(func):
            self._note(args)
            if kwargs:
                self._note(kwargs.values())
        return func(*args, **(kwargs or {}))

    def _note(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, Parameter):
                if value in self.modules:
                    self._read(value)
            elif isinstance(value, (list, tuple)):
                self._note(value)

    def _read(self, parameter: Parameter) -> None:
        if self._stack:
            self.modules[parameter].add(self._stack[-1])
        if parameter in self._seen:
            return
        self._seen.add(parameter)
        self.need_order.append(parameter)
        if self._stack:
            self.first_module[parameter] = self._stack[-1]
        else:
            self.outside.add(parameter)

    def _read_all(self, name: str, parameters: tuple[Parameter, ...]) -> None:
        """Compiled code begins, which is taken to read every parameter below it."""
        if self._paused:
            return
        self._stack.append(name)
        for parameter in parameters:
            if parameter in self.modules:
                self._read(parameter)
        self._stack.pop()

    def _enter(self, name: str) -> Callable[[Module, Any], None]:
        def hook(_module: Module, _arguments: Any) -> None:
            if not torch.compiler.is_compiling():
                self._stack.append(name)

        return hook

    def _leave(self, _module: Module, _arguments: Any, _result: Any) -> None:
        if not torch.compiler.is_compiling() and self._stack:
            self._stack.pop()


def guard_modules(
    model: Module, needs: Mapping[str, tuple[Any, ...]], wait: Callable[[tuple[Any, ...]], None]
) -> list[RemovableHandle]:
    """Call ``wait(needs[name])`` before each forward of the module ``name``.

    Compiled modules are left to :func:`tlsched.shim.compiled.guard`.
    """
    modules = dict(model.named_modules())
    boundaries = compiled.boundaries(model)

    def guard(buckets: tuple[Any, ...]) -> Callable[[Module, Any], None]:
        def hook(_module: Module, _arguments: Any) -> None:
            if not torch.compiler.is_compiling():
                wait(buckets)

        return hook

    return [
        modules[name].register_forward_pre_hook(Uncopied(guard(buckets)), prepend=True)
        for name, buckets in needs.items()
        if name not in boundaries
    ]


def _reads_values(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        return getattr(getattr(func, "__self__", None), "__name__", "") in _VALUE_GETTERS
    return name not in _NO_VALUES


def _take_out(mode: TorchFunctionMode) -> None:
    """Leave ``mode``, wherever it is in this thread's stack of modes."""
    above: list[Any] = []
    while torch._C._len_torch_function_stack():
        top = torch._C._pop_torch_function_stack()
        if top is mode:
            break
        above.append(top)
    for other in reversed(above):
        torch._C._push_on_torch_function_stack(other)
