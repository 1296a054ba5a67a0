"""The five shapes have their published sizes, and profiles follow from who reads what when."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tlsched.errors import ConfigError
from tlsched.shapes.catalog import ONE_TENSOR, layers_of
from tlsched.shapes.derive import profile_from_module, profile_of_layers, training_flops
from tlsched.shapes.names import SHAPE_NAMES
from tlsched.shapes.walk import walk

# torchvision's model tables (VGG16_Weights, ResNet50_Weights) and, for the transformers, the
# numbers of parameters of the published checkpoints bert-large-uncased and gpt2-medium.
PUBLISHED = {
    "vgg16": 138_357_544,
    "resnet50": 25_557_032,
    "bert-large": 335_141_888,
    "gpt2-medium": 354_823_168,
}
# The same tables' GFLOPs (multiply-adds) of one image.
PUBLISHED_MULTIPLY_ADDS = {"vgg16": 15.47e9, "resnet50": 4.09e9}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_shape_has_as_many_parameters_as_are_published(name: str) -> None:
    assert sum(layer.elements for layer in layers_of(name)) == PUBLISHED[name]


def test_the_llama_style_decoder_has_what_its_formula_says() -> None:
    width, inner, vocabulary, blocks = 1024, 2816, 32000, 24
    block = 4 * width**2 + 3 * width * inner + 2 * width
    expected = blocks * block + 2 * vocabulary * width + width
    assert sum(layer.elements for layer in layers_of("llama-24")) == expected


@pytest.mark.parametrize("name", PUBLISHED_MULTIPLY_ADDS)
def test_a_shape_has_as_many_flops_as_are_published(name: str) -> None:
    flops = sum(layer.flops for layer in layers_of(name))
    assert flops / 2 == pytest.approx(PUBLISHED_MULTIPLY_ADDS[name], rel=0.001)


def test_a_tied_embedding_is_read_first_and_last() -> None:
    layers = layers_of("gpt2-medium")
    assert layers[0].tensors[0].name == "words.weight"
    assert layers[-1].again == ("words.weight",)
    assert not layers[-1].tensors
    first = profile_of_layers(layers, compute_s=1.0).buckets[0]
    assert first.needed_s == 0
    assert first.ready_s == pytest.approx(2 / 3)  # with the embedding's gradient, not the head's


@pytest.mark.parametrize("name", SHAPE_NAMES)
def test_profiles_hold_every_byte_in_need_order(name: str) -> None:
    layers = layers_of(name)
    profile = profile_of_layers(layers, compute_s=3.0)
    assert profile.bytes == 4 * sum(layer.elements for layer in layers)
    assert (profile.forward_s, profile.backward_s) == pytest.approx((1.0, 2.0))
    # Backward runs the same way back: a gradient is ready as long before backward's end, twice,
    # as its layer began after forward's begin.
    for bucket in profile.buckets:
        assert bucket.ready_s == pytest.approx(2.0 - 2 * bucket.needed_s)
    assert profile.launch_order == tuple(reversed(range(len(profile.buckets))))
    tenth = profile_of_layers(layers, compute_s=3.0, scale=0.1)
    assert tenth.bytes == pytest.approx(profile.bytes / 10, rel=1e-3)


def test_a_profile_from_a_module_follows_its_flops() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 10))
        profile = profile_from_module(model, [torch.empty(5, 10)], flops_per_s=1e6)
    flops = 2 * 5 * 10 * 20  # of each layer's forward
    assert profile.compute_s == pytest.approx(3 * 2 * flops / 1e6)
    assert [b.names for b in profile.buckets] == [("0.weight", "0.bias"), ("2.weight", "2.bias")]
    assert [b.bytes for b in profile.buckets] == [4 * 220, 4 * 210]
    assert [b.needed_s for b in profile.buckets] == pytest.approx([0, flops / 1e6])
    assert [b.ready_s for b in profile.buckets] == pytest.approx([4 * flops / 1e6, 2 * flops / 1e6])


class Odd(nn.Module):
    """Reads parameters outside their modules' forward, and trains one in another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.never_called = nn.Linear(4, 4)
        self.own = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return x @ self.never_called.weight + self.own


def test_what_no_module_reads_in_its_own_forward_is_needed_from_the_begin() -> None:
    with torch.device("meta"):
        layers = walk(Odd(), [torch.empty(2, 4)])
    assert [(layer.name, [t.name for t in layer.tensors]) for layer in layers] == [
        ("", ["own"]),
        ("", ["never_called.weight", "never_called.bias"]),
        ("first", ["first.weight", "first.bias"]),
    ]
    kinds = [bucket.kind for bucket in profile_of_layers(layers, compute_s=1.0).buckets]
    assert kinds == ["torch.bfloat16", "torch.float32", "torch.float32"]


def test_hooks_are_gone_after_a_walk() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
        assert training_flops(walk(model, [torch.empty(1, 2)])) == 3 * 2 * 2 * 2
    assert not model._forward_pre_hooks


@pytest.mark.parametrize(
    ("model", "wrong"),
    [
        (nn.Linear(4, 4, device="meta"), "Linear cannot run on the meta device"),
        (nn.ReLU(), "ReLU has nothing to train"),
    ],
)
def test_models_that_tell_nothing_are_refused(model: nn.Module, wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        walk(model, [torch.empty(1, 3, device="meta")])


def test_an_unknown_shape_is_named_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"no shape .alexnet.*vgg16, resnet50"):
        layers_of("alexnet")


def test_the_one_tensor_is_ready_first_and_needed_last() -> None:
    profile = profile_of_layers(layers_of(ONE_TENSOR), compute_s=3.0)
    *parts, whole = profile.buckets
    assert sum(part.bytes for part in parts) < 1e-6 * whole.bytes
    assert whole.ready_s == pytest.approx(0.0, abs=1e-6)
    assert whole.needed_s == pytest.approx(1.0)
    assert parts[0].needed_s == 0.0
