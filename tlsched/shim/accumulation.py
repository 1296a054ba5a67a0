"""A hook that runs when autograd has accumulated into a parameter's gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import Parameter


@dataclass(frozen=True, slots=True)
class Hook:
    """A hook on a parameter's accumulation, and its node, which autograd itself does not keep."""

    node: object
    handle: torch.utils.hooks.RemovableHandle

    def remove(self) -> None:
        """Take it away."""
        self.handle.remove()


def on_accumulation(parameter: Parameter, call: Callable[[], None]) -> Hook:
    """Call ``call`` after each accumulation into ``parameter.grad``, last of all hooks.

    A parameter that requires no gradient gets its hook all the same: it may come to need one.
    """
    wanted = parameter.requires_grad
    try:
        parameter.requires_grad_(True)
        node = torch.autograd.graph.get_gradient_edge(parameter).node
    finally:
        parameter.requires_grad_(wanted)
    return Hook(node, node.register_hook(lambda *_: call()))
