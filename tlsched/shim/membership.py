"""Which parameters are trained, and how one that joins later is taken in."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence

import torch
from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel

from tlsched.errors import ModelRefused, TrainingError
from tlsched.planning.plan import Plan
from tlsched.shim.accumulation import Hook, on_accumulation
from tlsched.shim.agreement import Agreement
from tlsched.shim.lanes import Lane


def trained(
    model: Module, without: Container[Parameter]
) -> tuple[dict[Parameter, str], list[Parameter]]:
    """The parameters that require a gradient, by name, and those that do not."""
    names: dict[Parameter, str] = {}
    frozen: list[Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter in without:
            continue
        if parameter.requires_grad:
            names[parameter] = name
        else:
            frozen.append(parameter)
    return names, frozen


def refuse_unsuitable(model: Module) -> None:
    """Raise ModelRefused for a model whose parameters cannot be trained this way."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelRefused(
            "the model has no parameter that requires a gradient",
            hint="call the model without tlsched.schedule(), or unfreeze some of it",
        )
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel):
            raise ModelRefused(
                f"{f'{name} of the model' if name else 'the model'} is wrapped in "
                "DistributedDataParallel, which averages gradients itself",
                hint="give schedule() the plain model (ddp.module)",
            )
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "device_mesh"):  # a DTensor: FSDP2, tensor parallelism
            raise ModelRefused(
                f"{name} is sharded over ranks (a DTensor)",
                hint="tlsched trains replicas: leave fully_shard() and parallelize_module() out",
            )
        # Left by torch.distributed.optim's _apply_optimizer_in_backward, which steps in a hook.
        if hasattr(parameter, "_in_backward_optimizers"):
            raise ModelRefused(
                f"{name} is updated inside backward, before its gradient is averaged",
                hint="leave out _apply_optimizer_in_backward; tlsched updates each bucket as it "
                "arrives",
            )


def watch(frozen: Sequence[Parameter], call: Callable[[], None]) -> list[Hook]:
    """Call ``call`` when one of ``frozen`` is given a gradient after all."""
    return [
        on_accumulation(parameter, call)
        for parameter in frozen
        if parameter.is_floating_point() or parameter.is_complex()
    ]


def admit(
    agreement: Agreement, lane: Lane, joined: Mapping[Parameter, str], timeout_s: float
) -> None:
    """Give ``joined`` rank 0's values and the average gradient. All ranks must admit the same.

    Raises RanksDisagree naming the first parameter that joined on some ranks only, and
    CommunicationError naming a rank on which none did.
    """
    agreement.require_same("parameters that joined", list(joined.values()))
    lane.broadcast(joined)
    has_gradient = agreement.gather("gradients", [p.grad is not None for p in joined])
    for number, parameter in enumerate(joined):
        if not any(flags[number] for flags in has_gradient):
            continue
        with torch.no_grad():
            local = parameter.grad
            average = (torch.zeros_like(parameter) if local is None else local) / agreement.size
            average = average.contiguous()
            work = lane.all_reduce(average)
            try:
                work.wait(timeout_s)
            except RuntimeError as error:
                raise lane.failure("averaging a parameter that joined", error) from error
            parameter.grad = average


def why_alone(model: Module, parameter: Parameter) -> str:
    """What to say of a parameter that the optimizer steps and nobody averages.

    Raises TrainingError for one of the model's own.
    """
    # Not model.named_parameters(), which waits for the updates that are due.
    for prefix, module in model.named_modules():
        for name, own in module._parameters.items():
            if own is parameter:
                raise TrainingError(
                    f"{f'{prefix}.{name}' if prefix else name} has a gradient but requires none, "
                    "so no rank averages it",
                    hint="call requires_grad_() on it, or leave it out of the optimizer",
                )
    return (
        f"a parameter of shape {tuple(parameter.shape)} is stepped by the optimizer but is no "
        "part of the model: its gradient is not averaged"
    )


def refuse_different(mine: Plan, taken: Plan) -> None:
    """Raise TrainingError when rank 0's plan is for other parameters than this rank's."""
    if {n for b in mine.buckets for n in b.names} != {n for b in taken.buckets for n in b.names}:
        raise TrainingError(
            "rank 0 trains other parameters than this rank",
            hint="freeze and unfreeze the same parameters on every rank",
        )
