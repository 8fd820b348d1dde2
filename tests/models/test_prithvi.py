"""prithvi-refiner: names of public checkpoints, an encoder written anew as oracle, what learns."""

import copy
import dataclasses
import functools
from typing import cast

import numpy as np
import pytest
import tifffile
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock.base.errors import UsageError
from penstock.models import footprint as models_footprint
from penstock.models import load as models
from penstock.models import prithvi
from penstock.models.prithvi import (
    FrozenLinear,
    Refiner,
    Size,
    SizeName,
    positions,
    prithvi_refiner,
)

from ..parameters import mainly
from .prithvi_oracle import encode, sines_and_cosines

pytestmark = pytest.mark.usefixtures("one_thread")
# Width, blocks, heads, patch: as in the configurations of the public checkpoints.
PUBLIC = {
    "tiny": (192, 12, 3, 16),
    "100m": (768, 12, 12, 16),
    "300m": (1024, 24, 16, 16),
    "600m": (1280, 32, 16, 14),
}
SHALLOW = 2


def public_encoder(size: str, frames: int = 1) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the encoder in a public checkpoint of version 2."""
    width, blocks, _, patch = PUBLIC[size]
    shapes: dict[str, tuple[int, ...]] = {
        "cls_token": (1, 1, width),
        "pos_embed": (1, 1 + frames * (224 // patch) ** 2, width),
        "patch_embed.proj.weight": (width, 6, 1, patch, patch),
        "patch_embed.proj.bias": (width,),
    }
    for block in range(blocks):
        for name, given, taken in (
            ("norm1", width, 0),
            ("attn.qkv", 3 * width, width),
            ("attn.proj", width, width),
            ("norm2", width, 0),
            ("mlp.fc1", 4 * width, width),
            ("mlp.fc2", width, 4 * width),
        ):
            shapes[f"blocks.{block}.{name}.weight"] = (given, taken) if taken else (given,)
            shapes[f"blocks.{block}.{name}.bias"] = (given,)
    shapes |= {"norm.weight": (width,), "norm.bias": (width,)}
    return {f"encoder.{name}": shape for name, shape in shapes.items()}


def public_state(frames: int = 1) -> dict[str, Tensor]:
    """A tiny checkpoint as the public ones are: random numbers, true positions, and all that a
    refiner has no use for."""
    return dict(_public_state(frames, PUBLIC["tiny"]))


@functools.cache
def _public_state(frames: int, of: tuple[int, ...]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    state = {
        name: torch.randn(shape, generator=generator) * (0.05 if len(shape) > 1 else 0.5)
        for name, shape in public_encoder("tiny", frames).items()
    }
    state["encoder.pos_embed"] = torch.from_numpy(sines_and_cosines(192, frames, 14)).float()[None]
    return state | {
        "encoder.temporal_embed_enc.scale": torch.ones(1),
        "encoder.location_embed_enc.scale": torch.ones(1),
        "decoder.mask_token": torch.zeros(1, 1, 512),
        "decoder.decoder_embed.weight": torch.zeros(512, 192),
        "decoder.decoder_blocks.0.norm1.weight": torch.zeros(512),
    }


def image(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def shapes_of(net: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in net.state_dict().items()}


def forward(net: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return net(x)


def learn(net: Refiner, seed: int = 7) -> Refiner:
    """As if it had been trained: adapters whose B is no longer zero."""
    generator = torch.Generator().manual_seed(seed)
    for name, value in net.named_parameters():
        if name.endswith("lora_b"):
            nn.init.normal_(value, std=0.05, generator=generator)
    return net


def on_meta(size: str, **options: object) -> Refiner:
    """Nobody can change its weights, so that one serves all tests."""
    return _on_meta(size, PUBLIC[size], **options)


@functools.cache
def _on_meta(size: str, of: tuple[int, ...], **options: object) -> Refiner:
    with torch.device("meta"):
        return prithvi_refiner(size, **options)  # type: ignore[arg-type]


def cut_to(depth: int, monkeypatch) -> None:
    for name, (width, _, heads, patch) in list(PUBLIC.items()):
        monkeypatch.setitem(PUBLIC, name, (width, depth, heads, patch))
        size = dataclasses.replace(prithvi.SIZES[cast(SizeName, name)], depth=depth)
        monkeypatch.setitem(cast(dict[str, Size], prithvi.SIZES), name, size)


@pytest.fixture(autouse=True)
def shallow(request, monkeypatch) -> None:
    """Two blocks for all, which are alike, but in tests of a size: they take it as it is."""
    if "size" not in request.fixturenames:
        cut_to(SHALLOW, monkeypatch)


@functools.cache
def _tiny(of: tuple[int, ...]) -> Refiner:
    return prithvi_refiner("tiny").eval()


@pytest.fixture
def tiny() -> Refiner:
    """One for all who only look at it."""
    return _tiny(PUBLIC["tiny"])


def test_the_output_is_the_input_plus_a_correction() -> None:
    net = prithvi_refiner("tiny", 4)
    nn.init.zeros_(net.decoder.out.weight)
    nn.init.constant_(net.decoder.out.bias, 0.25)  # type: ignore[arg-type]
    x = image(1, 4, 32, 48)
    torch.testing.assert_close(forward(net, x), x + 0.25)


def test_a_batch_is_its_samples(tiny: Refiner) -> None:
    x = image(3, 6, 48, 32)
    alone = torch.cat([forward(tiny, sample[None]) for sample in x])
    torch.testing.assert_close(forward(tiny, x), alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("size", "sides", "sentence"),
    [
        ("tiny", (64, 100), "64 x 100 pixels .* 16 x 16: 100 is not a multiple of 16; 96 and"),
        ("tiny", (8, 64), "8 x 64 pixels .*: 8 is not a multiple of 16; 16 is"),
        ("600m", (256, 256), "256 x 256 pixels .* 256 is not a multiple of 14; 252 and 266 are"),
    ],
)
def test_broken_patches_are_refused(size: str, sides: tuple[int, int], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        on_meta(size)(torch.empty(1, 6, *sides, device="meta"))


def test_an_input_of_other_bands_is_refused(tiny: Refiner) -> None:
    with pytest.raises(UsageError, match=r"\(1, 5, 64, 64\) is not \(batch, 6 bands, y, x\)"):
        tiny(image(1, 5, 64, 64))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"size": "huge"}, "no size 'huge'; it is one of tiny, 100m, 300m, 600m"),
        ({"in_channels": 3}, "the first 4 to 6 of B02, B03, B04"),
        ({"in_channels": 7}, "the first 4 to 6"),
    ],
)
def test_what_cannot_be_made_is_refused(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        prithvi_refiner(**({"size": "tiny"} | options))  # type: ignore[arg-type]


@pytest.mark.parametrize("size", mainly(PUBLIC, 0, 1))
def test_names_and_shapes_are_those_of_the_public_checkpoints(size: str) -> None:
    shapes = shapes_of(on_meta(size).encoder)
    adapted = {name for name in shapes if name.endswith(("lora_a", "lora_b"))}
    assert len(adapted) == 4 * PUBLIC[size][1]
    assert {name: shapes[name] for name in shapes.keys() - adapted} == {
        name.removeprefix("encoder."): shape for name, shape in public_encoder(size).items()
    }


@pytest.mark.parametrize(("width", "grid"), [(192, 14), (1280, 16)])
def test_positions_are_the_sines_and_cosines_of_the_public_code(width: int, grid: int) -> None:
    np.testing.assert_allclose(positions(width, grid), sines_and_cosines(width, 1, grid), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("frames", "prefix"), [pytest.param(1, "encoder.", id="v2"), pytest.param(3, "", id="v1")]
)
def test_a_public_checkpoint_encodes_as_public_code(frames: int, prefix: str, tmp_path) -> None:
    public = public_state(frames)
    state = public
    if not prefix:  # version 1 names the parts of encoder and decoder without these words
        state = {k.removeprefix("encoder.").removeprefix("decoder."): v for k, v in public.items()}
    torch.save(state, tmp_path / "Prithvi.pt")
    net = models.load_model("prithvi-refiner-tiny", tmp_path / "Prithvi.pt").module
    assert isinstance(net, Refiner)
    # Positions of one frame are the first of several.
    encoder = {name: public[name] for name in public_encoder("tiny")}
    encoder["encoder.pos_embed"] = encoder["encoder.pos_embed"][:, : 1 + 14 * 14]
    loaded = net.state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in encoder.items())
    x = image(1, 6, 224, 224)
    expected = encode(encoder, x, heads=3, patch=16)
    torch.testing.assert_close(forward(net.encoder, x), expected, rtol=0, atol=2e-4)


def test_another_grid_takes_positions_between_those_of_the_checkpoint(tiny: Refiner) -> None:
    native = tiny.encoder._patch_positions(14, 14).reshape(14, 14, -1)
    finer = tiny.encoder._patch_positions(27, 16).reshape(27, 16, -1)
    corners = ([0, 0, -1, -1], [0, -1, 0, -1])
    torch.testing.assert_close(finer[corners], native[corners])
    # Every second line of 27 is a line of 14; along a line of equal x, positions of x are equal.
    torch.testing.assert_close(finer[::2, 0], native[:, 0], rtol=0, atol=1e-5)
    assert torch.equal(native.reshape(1, 196, -1), tiny.encoder.pos_embed[:, 1:])


def test_a_checkpoint_of_six_bands_loads_into_fewer() -> None:
    state = public_state()
    net = prithvi_refiner("tiny", 4)
    net.load_state_dict(net.from_public(state))
    # Bands that are left out count as bands of zeros.
    full = prithvi_refiner("tiny", 6)
    full.load_state_dict(full.from_public(state))
    x = image(1, 4, 64, 64)
    padded = torch.zeros(1, 6, 64, 64)
    padded[:, :4] = x
    torch.testing.assert_close(
        forward(net.encoder, x), forward(full.encoder, padded), rtol=0, atol=1e-4
    )


def test_a_state_dict_of_ours_loads_whole(tmp_path) -> None:
    net = learn(prithvi_refiner("tiny"))
    torch.save(net.state_dict(), tmp_path / "ours.pt")
    loaded = models.load_model("prithvi-refiner-tiny", tmp_path / "ours.pt").module
    for name, value in net.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


def test_only_adapters_head_and_decoder_learn() -> None:
    net = learn(prithvi_refiner("tiny"))
    net(image(1, 6, 64, 64)).square().mean().backward()
    for name, parameter in net.named_parameters():
        learns = "lora" in name or name.startswith(("head.", "decoder."))
        assert parameter.requires_grad == learns, name
        assert (parameter.grad is not None and bool(parameter.grad.any())) == learns, name
    adapted = [name for name, _ in net.named_parameters() if "lora" in name]
    assert len(adapted) == SHALLOW * 2 * 2
    assert all(".attn.qkv." in name or ".attn.proj." in name for name in adapted)


def test_adapters_begin_as_nothing(tiny: Refiner) -> None:
    frozen = copy.deepcopy(tiny)
    for layer in frozen.modules():
        if isinstance(layer, FrozenLinear):
            layer.lora_a = layer.lora_b = None
    x = image(1, 6, 64, 64)
    assert torch.equal(forward(tiny, x), forward(frozen, x))
    assert not torch.equal(forward(learn(prithvi_refiner("tiny")), x), forward(frozen, x))


def test_an_adapter_is_a_product_of_two_thin_matrices() -> None:
    layer = learn(prithvi_refiner("tiny")).encoder.blocks[0].attn.qkv
    with torch.no_grad():
        merged = layer.weight + 16 / 8 * layer.lora_b @ layer.lora_a
        x = image(5, 192)
        torch.testing.assert_close(layer(x), F.linear(x, merged, layer.bias))


def test_checkpointing_keeps_less_and_gives_the_same_gradients() -> None:
    x = image(1, 6, 32, 48)
    gradients, kept = [], []
    for enabled in (False, True):
        net = learn(prithvi_refiner("tiny")).train()
        net.set_checkpointing(enabled)
        sizes: list[int] = []

        def pack(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(tensor.numel() * tensor.element_size())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = net(x).square().mean()
        kept.append(sum(sizes))
        loss.backward()
        gradients.append([p.grad for p in net.parameters() if p.requires_grad])
    for plain, again in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, again)
    assert kept[1] < kept[0] / 2


def test_weights_are_always_the_same_and_leave_the_random_state_alone() -> None:
    made = [prithvi_refiner("tiny").state_dict()]
    torch.manual_seed(99)
    before = torch.get_rng_state()
    made.append(prithvi_refiner("tiny").state_dict())
    assert torch.equal(torch.get_rng_state(), before)
    first, again = (torch.cat([t.flatten() for t in each.values()]) for each in made)
    assert torch.equal(first, again)


def test_the_registry_makes_a_model_of_two_axes() -> None:
    model = models.load_model("prithvi-refiner-tiny")
    assert (model.in_channels, model.spatial_axes) == (6, 2)
    footprint = models_footprint.measure_footprint(model, (2, 6, 64, 96))
    assert [head.channels for head in footprint.heads] == [6]
    assert footprint.peak_bytes is not None  # played on shapes alone
    with pytest.raises(UsageError, match="100 is not a multiple of 16"):
        models_footprint.measure_footprint(model, (1, 6, 100, 100))


@pytest.mark.slow
def test_inference_of_an_image_of_six_bands(tmp_path) -> None:
    torch.save(public_state(), tmp_path / "Prithvi.pt")
    pixels = np.random.default_rng(0).random((6, 64, 64), dtype=np.float32)
    tifffile.imwrite(tmp_path / "in.ome.tif", pixels, metadata={"axes": "CYX"})
    written = np.zeros((6, 1, 64, 64), np.float32)  # c z y x
    penstock.run_inference(
        str(tmp_path / "in.ome.tif"), written, model="prithvi-refiner-tiny",
        weights=tmp_path / "Prithvi.pt", normalize="none", patch=64, overlap=0, trim_voxels=0,
        devices="cpu",
    )  # fmt: skip
    net = models.load_model("prithvi-refiner-tiny", tmp_path / "Prithvi.pt").module
    expected = forward(net, torch.from_numpy(pixels)[None])[0].numpy()
    assert not np.allclose(expected, pixels, atol=1e-3)
    np.testing.assert_allclose(written[:, 0], expected, atol=1e-5)
