"""One forward pass over a model on the meta device: who reads which parameters, and the FLOPs.

The order of reading is the need order. FLOPs are those that torch.utils.flop_counter counts
(matrix products, convolutions, attention), from one reading module's forward to the next one's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tlsched.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Tensor:
    """A trainable parameter: how many elements, bytes of its gradient, and its dtype."""

    name: str
    elements: int
    bytes: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Layer:
    """A module that reads parameters: those that nobody has read before, and its forward's FLOPs.

    ``again`` are the names of parameters that it reads after others have (tied weights).
    """

    name: str
    tensors: tuple[Tensor, ...]
    flops: float
    again: tuple[str, ...] = ()

    @property
    def elements(self) -> int:
        """Of the parameters that are read here first."""
        return sum(tensor.elements for tensor in self.tensors)

    @property
    def bytes_an_element(self) -> int:
        """Of the gradients of those parameters."""
        return self.tensors[0].bytes // max(1, self.tensors[0].elements)

    @property
    def kind(self) -> str:
        """Their dtype."""
        return self.tensors[0].dtype

    def scaled(self, scale: float) -> int:
        """Elements when every layer has ``scale`` times its own: at least one."""
        return max(1, round(self.elements * scale))


def walk(model: nn.Module, inputs: Sequence[Any]) -> list[Layer]:
    """The layers of ``model``, called with ``inputs``, in need order.

    Both should be on the meta device, else the pass is computed. A parameter whose module is never
    called (MultiheadAttention's output projection) belongs to the nearest module around it that is.
    Raises ConfigError when the model cannot run there.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            f"{type(model).__name__} has nothing to train", hint="give a model with parameters"
        )
    readings = _Readings(model)
    try:
        with torch.no_grad(), readings.counter:
            model(*inputs)
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        raise ConfigError(
            f"{type(model).__name__} cannot run on the meta device ({_first_line(error)})",
            hint="give it inputs of the right shape, and let its forward not look at values",
        ) from error
    finally:
        readings.end()
    return readings.layers()


class _Readings:
    """Notes at which FLOP each module is called first."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.counter = FlopCounterMode(display=False)
        self._began: dict[str, float] = {}
        self._handles = [
            module.register_forward_pre_hook(self._hook(name))
            for name, module in model.named_modules()
        ]

    def end(self) -> None:
        for handle in self._handles:
            handle.remove()

    def layers(self) -> list[Layer]:
        """A layer for each module that reads, with the FLOPs until the next one."""
        read, again = self._owners()
        names = [name for name in self._began if name in read or name in again]
        ends = [*(self._began[name] for name in names[1:]), float(self.counter.get_total_flops())]
        found = []
        begin = 0.0  # what is computed before anything is read belongs to the first
        for name, end in zip(names, ends, strict=True):
            found += _by_dtype(name, read.get(name, []), end - begin, tuple(again.get(name, ())))
            begin = end
        return found

    def _owners(self) -> tuple[dict[str, list[Tensor]], dict[str, list[str]]]:
        """For each called module what it reads first, and what others have read before."""
        read: dict[str, list[Tensor]] = {}
        again: dict[str, list[str]] = {}
        seen: dict[nn.Parameter, str] = {}
        order = {name: number for number, name in enumerate(self._began)}
        tensors = [
            (order[reader], reader, name, parameter)
            for name, parameter in self._model.named_parameters(remove_duplicate=False)
            if parameter.requires_grad
            for reader in [self._reader(name)]
        ]
        for _, reader, name, parameter in sorted(tensors, key=lambda entry: entry[0]):
            if parameter in seen:
                again.setdefault(reader, []).append(seen[parameter])
                continue
            seen[parameter] = name
            size = parameter.numel()
            tensor = Tensor(name, size, size * parameter.element_size(), str(parameter.dtype))
            read.setdefault(reader, []).append(tensor)
        return read, again

    def _reader(self, name: str) -> str:
        while name:
            name = name.rpartition(".")[0]
            if name in self._began:
                return name
        return ""

    def _hook(self, name: str) -> Any:
        def note(_module: nn.Module, _inputs: Any) -> None:
            self._began.setdefault(name, float(self.counter.get_total_flops()))

        return note


def _by_dtype(
    name: str, tensors: list[Tensor], flops: float, again: tuple[str, ...]
) -> list[Layer]:
    """One layer; where dtypes differ, one for each, the last of which has the FLOPs."""
    dtypes = sorted({tensor.dtype for tensor in tensors})
    parts = [tuple(t for t in tensors if t.dtype == dtype) for dtype in dtypes] or [()]
    return [
        *(Layer(name, part, 0.0) for part in parts[:-1]),
        Layer(name, parts[-1], flops, again),
    ]


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
