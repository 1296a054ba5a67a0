"""What tunes the window of a policy that sends pieces under credit."""

from __future__ import annotations

from collections.abc import Callable

from torch.nn import Module

from tlsched.planning.policies import PolicySettings
from tlsched.planning.tuning import BayesianSearch, Tuning, can_search


def tuning_of(model: Module, settings: PolicySettings, say: Callable[[str], None]) -> Tuning | None:
    """A search for ``model``'s window; None where ``settings`` fix it, or nothing can search."""
    if settings.window is not None:
        return None
    if not can_search():
        say(
            "pieces and credit stay at their defaults: `pip install 'tlsched[tune]'` to have "
            "them tuned"
        )
        return None
    sizes = [p.numel() * p.element_size() for p in model.parameters()]
    return Tuning(BayesianSearch(max(sizes)))
