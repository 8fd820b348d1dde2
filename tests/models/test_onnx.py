"""An ONNX file as a model: what it says, what it computes, and files that are none."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.base import MissingDependency, UsageError
from penstock.inference import reach_of
from penstock.inference.opening import identity
from penstock.models import check_model_name, load_model

from .packages_kit import infer, noise, onnx_of

ANY = ("b", 1, "z", "y", "x")


def conv(channels: int = 1, axes: int = 3) -> Any:
    torch.manual_seed(0)
    return getattr(torch.nn, f"Conv{axes}d")(channels, 1, 3, padding=1)


@pytest.fixture
def net(tmp_path: Path) -> Path:
    pytest.importorskip("onnxruntime")
    (tmp_path / "a net.onnx").write_bytes(onnx_of(conv(), ANY))
    return tmp_path / "a net.onnx"


def test_it_computes_what_torch_does_and_its_tiles_leave_no_seam(net: Path) -> None:
    model = load_model(str(net))
    assert (model.in_channels, model.spatial_axes, model.recipe.patch) == (1, 3, None)
    assert reach_of(model, 3).before == (1, 1, 1), "it is run on probes as torch's networks are"
    volume = noise(1, 20, 70, 50)
    made = infer(volume, net, np.zeros(volume.shape, "float32"), normalize="none", patch=(16,))
    with torch.no_grad():
        wanted = conv()(torch.from_numpy(volume[None].astype("float32")))[0].numpy()
    assert np.abs(made - wanted)[:, 1:-1, 1:-1, 1:-1].max() < 1e-4 * np.ptp(wanted)


def test_one_shape_is_the_patch_and_other_patches_are_refused(net: Path) -> None:
    net.write_bytes(onnx_of(conv(3, 2), (1, 3, 32, 48)))
    volume = noise(3, 1, 70, 100)
    out = np.zeros((1, 1, 70, 100), "float32")
    made = infer(volume, net, out, normalize="none", overlap=(4,))
    with torch.no_grad():
        wanted = conv(3, 2)(torch.from_numpy(volume[:, 0].astype("float32")))[0].numpy()
    assert np.abs(made[0, 0] - wanted)[1:-1, 1:-1].max() < 1e-4 * np.ptp(wanted)
    with pytest.raises(UsageError, match=r"index: 2 Got: 40 Expected: 32.*the model\.$"):
        infer(volume, net, out, patch=(40, 48))


def test_weights_in_a_file_beside_it_count(net: Path) -> None:
    weight = conv().weight.detach().numpy()
    net.write_bytes(onnx_of(conv(), ANY, beside="w.data"))
    with pytest.raises(UsageError, match=r"a net\.onnx lacks w\.data$"):
        load_model(str(net))
    seen = set()
    for values in (weight, 2 * weight):
        (net.parent / "w.data").write_bytes(values.tobytes())
        seen.add(identity.attributes(load_model(str(net)).module))
    assert len(seen) == 2, "a run is not resumed with other weights"
    net.write_bytes(onnx_of(conv(), ANY, beside="../w.data"))
    with pytest.raises(UsageError, match=r"names \.\./w\.data, which lies outside of it"):
        load_model(str(net))


BAD = [
    (b"text", "onnxruntime cannot open a net.onnx: .*Protobuf parsing failed"),
    (onnx_of(conv(), ANY)[:99], "onnxruntime cannot open a net.onnx: .*Protobuf parsing failed"),
    (onnx_of(conv(), ANY, opset=99), "onnxruntime cannot open a net.onnx: .*opset"),
    (
        onnx_of(conv(axes=2)),
        r"its input is of shape \(b, c, y, x\), and not batch, number of channels",
    ),
]


@pytest.mark.parametrize(("content", "why"), BAD)
def test_what_cannot_be_run_is_refused_in_a_sentence(content: bytes, why: str, net: Path) -> None:
    net.write_bytes(content)
    with pytest.raises(UsageError, match=f"(?s)^--model {net}: {why}"):
        load_model(str(net))


def test_what_is_not_there_is_named(tmp_path: Path, monkeypatch: Any) -> None:
    with pytest.raises(UsageError, match=r"there is no file nowhere\.onnx"):
        check_model_name("nowhere.onnx", "MODEL")
    (tmp_path / "net.onnx").write_bytes(b"")
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    with pytest.raises(MissingDependency, match=r"pip install 'penstock-dl\[onnx\]'"):
        load_model(str(tmp_path / "net.onnx"))
