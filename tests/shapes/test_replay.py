"""Replayed models: ordinary modules of the shapes' sizes that sleep as long as they are told."""

from __future__ import annotations

import time

import pytest
import torch

from tlsched.demo.replay import gradient_bytes, replayed, replayed_profile
from tlsched.shapes.catalog import layers_of
from tlsched.shapes.names import SHAPE_NAMES


@pytest.mark.parametrize("name", SHAPE_NAMES)
def test_a_replayed_model_has_the_shapes_layers_at_scale(name: str) -> None:
    model = replayed(name, compute_s=0.0, scale=0.001)
    sizes = [parameter.numel() for parameter in model.parameters()]
    expected = [layer.scaled(0.001) for layer in layers_of(name) if layer.tensors]
    assert sizes == expected
    assert 4 * sum(sizes) == gradient_bytes(name, 0.001)


@pytest.mark.parametrize("name", SHAPE_NAMES)
def test_a_replayed_models_profile_is_of_its_parameters(name: str) -> None:
    model = replayed(name, compute_s=0.0, scale=0.001)
    profile = replayed_profile(name, compute_s=0.6, scale=0.001)
    expected = [((key,), 4 * weight.numel()) for key, weight in model.named_parameters()]
    assert [(bucket.names, bucket.bytes) for bucket in profile.buckets] == expected
    assert profile.compute_s == pytest.approx(0.6)


def test_every_parameter_of_a_replayed_model_is_trained() -> None:
    model = replayed("gpt2-medium", compute_s=0.0, scale=0.0001)
    loss = model(torch.ones(1)).sum()
    loss.backward()
    grads = [parameter.grad for parameter in model.parameters()]
    assert all(grad is not None and bool(grad.ne(0).all()) for grad in grads)
    assert grads[0] is not None
    assert float(grads[0][0]) == 2.0  # read twice: by the embedding and by the head


def test_a_replayed_iteration_takes_its_compute_time() -> None:
    model = replayed("resnet50", compute_s=0.3, scale=0.001)
    begin_s = time.perf_counter()
    model(torch.ones(1)).sum().backward()
    assert time.perf_counter() - begin_s >= 0.29


def test_what_the_host_does_in_backward_is_no_part_of_the_computing() -> None:
    model = replayed("vgg16", compute_s=0.6, scale=0.001)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: time.sleep(0.01))  # type: ignore[no-untyped-call]  # torch leaves it untyped
    for _ in range(2):
        begin_s = time.perf_counter()
        model(torch.ones(1)).sum().backward()
        took_s = time.perf_counter() - begin_s
    # Sixteen hooks of 10 ms, of which only the last one's has nothing to hide behind.
    assert 0.59 <= took_s < 0.6 + 0.08


def test_what_forward_waits_for_is_added_to_the_computing() -> None:
    model = replayed("vgg16", compute_s=0.3, scale=0.001)
    for layer in model.children():
        layer.register_forward_pre_hook(lambda *_: time.sleep(0.01))
    begin_s = time.perf_counter()
    model(torch.ones(1)).sum().backward()
    count = len(list(model.children()))
    assert time.perf_counter() - begin_s >= 0.29 + 0.01 * count
