"""The denoisers: names that published weights expect, sides, receptive field, what was learnt."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

import penstock.models
from penstock.data.volumes import clean_volume, noisy
from penstock.models.unet3d import denoise_net, denoise_tiny

pytestmark = pytest.mark.usefixtures("one_thread")
WEIGHTS = Path(penstock.models.__file__).parent / "denoise_tiny.safetensors"

# Block, channels taken, between and given: as in the public network's state dict.
PUBLIC_BLOCKS = [
    ("inc", 1, 32, 32),
    ("down1.maxpool_conv.1", 32, 64, 64),
    ("down2.maxpool_conv.1", 64, 128, 128),
    ("down3.maxpool_conv.1", 128, 256, 256),
    ("down4.maxpool_conv.1", 256, 256, 256),
    ("up1.conv", 512, 256, 128),
    ("up2.conv", 256, 128, 64),
    ("up3.conv", 128, 64, 32),
    ("up4.conv", 64, 32, 32),
]


def public_shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for block, taken, between, given in PUBLIC_BLOCKS:
        for place, inputs, outputs in ((0, taken, between), (3, between, given)):
            shapes[f"{block}.double_conv.{place}.weight"] = (outputs, inputs, 3, 3, 3)
            shapes[f"{block}.double_conv.{place}.bias"] = (outputs,)
            shapes[f"{block}.double_conv.{place + 1}.weight"] = (outputs,)
            shapes[f"{block}.double_conv.{place + 1}.bias"] = (outputs,)
    return shapes | {"outc.conv.weight": (1, 32, 1, 1, 1), "outc.conv.bias": (1,)}


def on_meta(multiplier: float = 1) -> nn.Module:
    """The network without its weights, which take longer to draw than all that is asked of it."""
    with torch.device("meta"):
        return denoise_net(multiplier)


def shapes_of(net: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in net.state_dict().items()}


@pytest.fixture(scope="module")
def tiny() -> nn.Module:
    net = denoise_tiny()
    net.load_state_dict(load_file(WEIGHTS), strict=True)
    return net.eval()


def forward(net: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return net(x)


def test_the_state_dict_is_that_of_the_public_network_in_order() -> None:
    assert list(shapes_of(on_meta()).items()) == list(public_shapes().items())


def test_group_normalisation_has_as_many_groups_as_the_public_network() -> None:
    half = on_meta(0.375)  # 12 channels: the greatest common divisor with 8 is 4
    groups = [m.num_groups for m in half.modules() if isinstance(m, nn.GroupNorm)]
    assert groups[:4] == [4, 4, 8, 8]
    assert all(m.num_groups == 8 for m in on_meta().modules() if isinstance(m, nn.GroupNorm))


@pytest.mark.parametrize("multiplier", [0.5, 2])
def test_the_multiplier_scales_every_width(multiplier: float) -> None:
    shapes = shapes_of(on_meta(multiplier))
    assert shapes["inc.double_conv.0.weight"] == (32 * multiplier, 1, 3, 3, 3)
    assert shapes["up1.conv.double_conv.0.weight"] == (256 * multiplier, 512 * multiplier, 3, 3, 3)


@pytest.mark.parametrize("multiplier", [0, -1, 0.3, float("nan")])
def test_a_multiplier_without_whole_channels_is_refused(multiplier: float) -> None:
    with pytest.raises(ValueError, match="1/32"):
        denoise_net(multiplier)


def test_the_output_is_the_input_plus_a_correction() -> None:
    net = denoise_net(1 / 32)
    nn.init.zeros_(net.get_parameter("outc.conv.weight"))
    nn.init.constant_(net.get_parameter("outc.conv.bias"), 0.25)
    x = torch.arange(2.0 * 16 * 16 * 16).reshape(2, 1, 16, 16, 16)
    torch.testing.assert_close(forward(net, x), x + 0.25)


def test_sides_need_not_be_multiples_of_the_halvings() -> None:
    x = torch.randn(1, 1, 17, 16, 31, generator=torch.Generator().manual_seed(0))
    for net in (denoise_net(1 / 8).eval(), denoise_tiny().eval()):
        y = forward(net, x)
        assert y.shape == x.shape
        assert y.isfinite().all()


@pytest.mark.parametrize(
    ("net", "least"), [(denoise_net(1 / 8), 16), (denoise_tiny(), 4)], ids=["net", "tiny"]
)
def test_sides_that_cannot_be_halved_are_refused(net: nn.Module, least: int) -> None:
    forward(net, torch.zeros(1, 1, least, least, least))
    with pytest.raises(ValueError, match=rf"\({least}, {least - 1}, {least}\).*at least {least}"):
        net(torch.zeros(1, 1, least, least - 1, least))


@pytest.mark.parametrize(("taken", "given"), [(1, 1), (1, 3), (2, 2)])
def test_channels(taken: int, given: int) -> None:
    net = denoise_net(1 / 8, in_channels=taken, out_channels=given)
    assert (net.in_channels, net.out_channels) == (taken, given)
    assert forward(net, torch.zeros(2, taken, 16, 16, 16)).shape == (2, given, 16, 16, 16)


def test_channels_that_cannot_be_added_are_refused() -> None:
    with pytest.raises(ValueError, match=r"2 input channels .* 1 output"):
        denoise_net(in_channels=2)
    tiny = denoise_tiny()
    assert (tiny.in_channels, tiny.out_channels) == (1, 1)


@pytest.mark.slow
def test_tiny_takes_noise_off_a_volume_that_it_has_not_seen(tiny: nn.Module) -> None:
    clean = clean_volume((32, 64, 64), seed=424_242)
    image = noisy(clean, seed=31)
    lower, upper = np.percentile(image, (0.5, 99.9))
    padded = (np.pad(image, 8, mode="reflect") - lower) / (upper - lower)
    y = forward(tiny, torch.from_numpy(padded.astype(np.float32))[None, None])
    result = y[0, 0, 8:-8, 8:-8, 8:-8].numpy() * (upper - lower) + lower
    before, after = (np.mean((clean - of) ** 2) for of in (image, result))
    assert 10 * np.log10(before / after) > 6  # decibels; seen: 7.0
    assert abs(float(np.mean(result - clean))) < 1


def test_the_weights_are_small_and_say_how_they_were_made() -> None:
    assert WEIGHTS.stat().st_size < 2_000_000
    with safe_open(WEIGHTS, "pt") as file:
        assert set(file.metadata()) == {"script", "seed", "steps"}
