"""Layers of a model that is named on a command line: a shape, or a function of the user's."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from tlsched.errors import ConfigError
from tlsched.shapes.catalog import layers_of
from tlsched.shapes.walk import Layer, walk

_HINT = "let it return the model and a tuple of its inputs: (model, (x,))"


def load_layers(name: str) -> Sequence[Layer]:
    """The layers of the shape ``name``, or of what the function ``package.module:function`` makes.

    The function is called without arguments, on the meta device, and returns a module and the tuple
    of inputs that it is called with; FLOPs are then those of these inputs. Raises ConfigError.
    """
    if ":" not in name:
        return layers_of(name)
    module_name, _, function_name = name.partition(":")
    function = _function(module_name, function_name)
    try:
        with torch.device("meta"):
            made = function()
    except Exception as error:  # it is the user's code: whatever it raises is theirs to see
        raise ConfigError(
            f"{name} cannot be called on the meta device ({type(error).__name__}: {error})",
            hint=_HINT,
        ) from error
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module) or not isinstance(inputs, tuple):
        raise ConfigError(f"{name} does not return a module and its inputs", hint=_HINT)
    with torch.device("meta"):
        return walk(model.to("meta"), [_on_meta(value) for value in inputs])


def _function(module_name: str, function_name: str) -> Any:
    before = list(sys.path)
    sys.path.insert(0, "")  # as `python -m` does: what lies in the current folder
    try:
        return getattr(importlib.import_module(module_name), function_name)
    except Exception as error:  # the user's module may raise anything while it is imported
        raise ConfigError(
            f"{module_name}:{function_name} cannot be imported ({type(error).__name__}: {error})",
            hint="give package.module:function, with the package here or installed",
        ) from error
    finally:
        sys.path[:] = before


def _on_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, torch.Tensor) else value
