"""Which servers a context was asked to use, and whether they can sum its gradients."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from torch.nn import Module

from tlsched.errors import ConfigError, ModelRefused
from tlsched.shim.ps.connecting import Place
from tlsched.shim.ps.lane import code_of
from tlsched.shim.ps.listening import TOKEN_VARIABLE, Address, parse_address
from tlsched.shim.ps.opening import Found
from tlsched.shim.ps.wire import key_of

Given = int | Sequence[str] | None


@dataclass(frozen=True, slots=True)
class Servers:
    """Where servers are: the last ``ranks`` of the job, at ``addresses``, or (neither) started."""

    ranks: int = 0
    addresses: tuple[Address, ...] = ()

    def found(self) -> Found:
        """Those at addresses, or none yet."""
        places = [Place(f"server {n}", address) for n, address in enumerate(self.addresses)]
        return Found(tuple(places), key_of(os.environ.get(TOKEN_VARIABLE, "")))


def choose_servers(model: Module, given: Given) -> Servers:
    """The servers that the argument ``servers=`` asks for.

    Raises ConfigError for a bad argument, ModelRefused naming a parameter that no server can sum.
    """
    _refuse_unsuitable(model)
    if given is None:
        return Servers()
    if isinstance(given, int):
        if given < 1 or isinstance(given, bool):
            raise ConfigError(f"servers is {given}", hint="give how many ranks serve, or None")
        return Servers(ranks=given)
    if isinstance(given, str) or not given:
        raise ConfigError(
            f"servers is {given!r}", hint='give a list of addresses, such as ["10.0.0.5:7150"]'
        )
    return Servers(addresses=tuple(parse_address(one) for one in given))


def _refuse_unsuitable(model: Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.device.type != "cpu":
            raise ModelRefused(
                f"{name} is on {parameter.device}, and parameter servers sum host memory only",
                hint='use backend="nccl"',
            )
        if parameter.requires_grad and code_of(parameter.dtype) is None:
            raise ModelRefused(
                f"{name} is {parameter.dtype}, which parameter servers cannot sum",
                hint='use another dtype, or backend="gloo"',
            )
