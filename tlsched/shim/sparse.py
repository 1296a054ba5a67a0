"""Sparse gradients: those of nn.Embedding(sparse=True), on a way of their own.

Their size is only known when backward has ended, so they share no bucket. They are summed at the
end of the round on the most urgent lane, and their updates are not left for later.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn import Parameter

from tlsched.errors import ModelRefused
from tlsched.shim.accumulation import Hook, on_accumulation
from tlsched.shim.gradients import Gradients
from tlsched.shim.lanes import Lane


def sparse_parameters(model: nn.Module) -> dict[Parameter, str]:
    """Weights of embeddings that ask for sparse gradients, by name: the same on every rank."""
    wanted = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
    }
    return {p: name for name, p in model.named_parameters() if id(p) in wanted}


class SparseGradients:
    """Averages the gradients of ``names`` over the ranks of ``lane`` at the end of each round."""

    def __init__(self, names: Mapping[Parameter, str], lane: Lane, world_size: int) -> None:
        self.names = dict(names)
        self._lane = lane
        self._world_size = world_size
        self._gradients: Gradients | None = None
        self._hooks: list[Hook] = [on_accumulation(p, self._on_gradient) for p in self.names]

    def attach(self, gradients: Gradients) -> None:
        """Open rounds of ``gradients`` from now on."""
        self._gradients = gradients

    def close(self) -> None:
        """Take the hooks away."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def average(self) -> None:
        """Average what backward left. Every rank calls it at the end of every round."""
        with torch.no_grad():
            for parameter, name in self.names.items():
                self._average(parameter, name)

    def _on_gradient(self) -> None:
        if self._gradients is not None and self._gradients.enabled:
            self._gradients.open_round()

    def _average(self, parameter: Parameter, name: str) -> None:
        local = parameter.grad
        if local is not None and local.layout != torch.sparse_coo:
            raise ModelRefused(
                f"the gradient of {name} is dense though its embedding asks for sparse ones",
                hint="tie or read it nowhere else, or use nn.Embedding(sparse=False)",
            )
        part = _empty_like(parameter) if local is None else local / self._world_size
        total = part.coalesce()
        work = self._lane.all_reduce(total)
        try:
            work.wait(self._lane.timeout_s)
        except RuntimeError as error:
            raise self._lane.failure(f"averaging the sparse gradient of {name}", error) from error
        if local is not None or total._nnz():
            parameter.grad = total


def _empty_like(parameter: Parameter) -> torch.Tensor:
    return torch.sparse_coo_tensor(
        torch.empty((1, 0), dtype=torch.int64),
        parameter.new_empty((0, *parameter.shape[1:])),
        parameter.shape,
        check_invariants=False,
    )
