"""From what the first iterations showed to a plan and to the places where forward waits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch.nn import Module, Parameter

from tlsched.planning.plan import ParameterInfo, Plan, make_plan
from tlsched.shim import compiled
from tlsched.shim.bucket import Bucket
from tlsched.shim.gradients import Gradients
from tlsched.shim.guards import Readers


def first_plan(names: Mapping[Parameter, str]) -> Plan:
    """A plan for when nothing is known: order of registration, and its reverse for gradients.

    Each module counts as the reader of its own parameters, which is mostly what will be learned;
    then the buckets stay.
    """
    parameters = list(names)
    owner = {p: name.rpartition(".")[0] for p, name in names.items()}
    ready = {names[p]: -i for i, p in enumerate(parameters)}
    return make_plan(facts(parameters, names, owner), ready)


def need_order(readers: Readers, names: Mapping[Parameter, str]) -> list[Parameter]:
    """All parameters in the order in which the last iteration first read them, unread ones last."""
    seen = dict.fromkeys(readers.need_order)
    return [*seen, *(parameter for parameter in names if parameter not in seen)]


def facts(
    order: Iterable[Parameter], names: Mapping[Parameter, str], reader: Mapping[Parameter, str]
) -> list[ParameterInfo]:
    """What planning needs to know of each parameter of ``order``; ``reader`` names a module."""
    return [
        ParameterInfo(
            name=names[parameter],
            bytes=parameter.numel() * parameter.element_size(),
            kind=f"{parameter.dtype} on {parameter.device}",
            reader=reader.get(parameter),
        )
        for parameter in order
    ]


def ready_rank(
    learned: Gradients, order: Sequence[Parameter], names: Mapping[Parameter, str]
) -> dict[str, int]:
    """Position of each parameter's gradient in backward; those never seen come after all others."""
    rank = {name: i for i, name in enumerate(learned.ready_order)}
    unseen = [names[p] for p in order if names[p] not in rank]
    return rank | {name: len(rank) + i for i, name in enumerate(unseen)}


def needs(
    model: Module, readers: Readers, gradients: Gradients
) -> tuple[dict[str, tuple[Bucket, ...]], list[Bucket]]:
    """Which buckets each module's forward waits for, by the module's name, and those of step().

    A module waits for what it was seen to read and for its own parameters, read or not; what nobody
    was seen to read, the root module waits for. Buckets read outside any forward are step()'s.
    """
    modules: dict[str, set[Bucket]] = {}
    boundaries = compiled.boundaries(model)
    for parameter, (bucket, _) in gradients.place.items():
        for name in readers.modules[parameter] or {""}:
            modules.setdefault(name, set()).add(bucket)
    for inner, module in model.named_modules():
        outer = compiled.outermost(inner, boundaries)
        name = inner if outer is None else outer
        for own in module._parameters.values():
            if own is not None and own in gradients.place:
                modules.setdefault(name, set()).add(gradients.place[own][0])
    outside = {gradients.place[p][0] for p in readers.outside}
    return (
        {name: tuple(sorted(them, key=lambda b: b.index)) for name, them in modules.items()},
        sorted(outside, key=lambda b: b.index),
    )
