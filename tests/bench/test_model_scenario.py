"""Scenario ``model`` on small networks in files."""

import json
from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.base.errors import UsageError
from penstock.bench.launch.worker import status_of
from penstock.bench.scenarios import WrongResult

from ..parameters import mainly
from .kit_model import CASE, Phases, made

torch: Any = None
under_test: Any = None


@pytest.fixture(autouse=True, scope="module")
def _libraries() -> None:
    """Imported by the first test, so that to collect them all takes no time."""
    names = {"torch": "torch", "under_test": "penstock.bench.scenarios.model"}
    globals().update({name: import_module(module) for name, module in names.items()})


def test_an_inference_step(nets: str) -> None:
    scenario, phases = made(nets, "convs", halo=3), Phases()
    assert scenario.step(phases) == {"samples": 2, "pixels": 2 * 16**2, "useful_pixels": 2 * 10**2}
    assert phases.seen == []
    assert scenario.facts["parameters"] == 3 * 8 * 9 + 8 + 8 * 2 * 9 + 2
    assert scenario.facts["model_bytes"] == 4 * scenario.facts["parameters"]
    assert scenario.facts["channels"] == 3
    assert scenario.facts["tile_shape"] == [16, 16]
    assert json.loads(json.dumps(scenario.facts)) == scenario.facts
    assert scenario.compile_s is None
    scenario.close()


@pytest.mark.slow
def test_a_training_step_learns(nets: str) -> None:
    scenario, phases = made(nets, "convs", mode="train"), Phases()
    weights = [p.detach().clone() for p in scenario._model.module.parameters()]
    scenario.step(phases)
    assert phases.seen == ["forward", "backward", "optimizer"]
    now = list(scenario._model.module.parameters())
    assert all(not torch.equal(a, b) for a, b in zip(weights, now, strict=True))
    assert all(p.grad is None for p in now), "gradients are given back in the step"


@pytest.mark.parametrize("mode", mainly(["inference", "train"], 0))
@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"amp": True},
        {"dtype": "bfloat16"},
        {"dtype": "float16"},
        {"channels_last": True},
        {"tile": "8x24"},
    ],
    ids=str,
)
def test_every_variant_steps(nets: str, mode: str, knobs: dict[str, Any]) -> None:
    scenario, phases = made(nets, "convs", mode=mode, **knobs), Phases()
    works = [scenario.step(phases) for _ in range(3)]
    assert works[0] == works[1] == works[2]
    if knobs.get("channels_last"):
        assert scenario._input.is_contiguous(memory_format=torch.channels_last)
    scenario.close()


@pytest.mark.slow
@pytest.mark.parametrize("mode", mainly(["inference", "train"], 1))
def test_channels_last_is_of_each_tensors_own_axes(mode: str) -> None:
    """The refiner is a network of images whose patches are embedded by a convolution of volumes."""
    case = {**CASE, "model": "prithvi-refiner-tiny", "tile": "32", "batch": 1, "mode": mode}
    scenario = under_test.ModelScenario(case | {"channels_last": True})
    scenario.step(Phases())
    forms = {4: torch.channels_last, 5: torch.channels_last_3d}
    parameters = list(scenario._model.module.parameters())
    assert {parameter.ndim for parameter in parameters} >= set(forms)
    for tensor in (scenario._input, *parameters):
        if form := forms.get(tensor.ndim):
            assert tensor.is_contiguous(memory_format=form)


def test_a_network_of_three_axes_has_cubes_for_tiles() -> None:
    scenario = under_test.ModelScenario({**CASE, "model": "denoise-tiny", "tile": "8", "halo": 1})
    assert scenario.facts["tile_shape"] == [8, 8, 8]
    assert scenario.step(Phases())["useful_pixels"] == 2 * 6**3


@pytest.mark.slow
def test_no_output_outlives_its_step(nets: str) -> None:
    for mode in ("inference", "train"):
        scenario = made(nets, "Watched", mode=mode)
        net: Any = scenario._model.module
        net.alive.clear()  # of the play on shapes
        for _ in range(3):
            scenario.step(Phases())
        assert net.alive[-2:] == [False, False]


def test_the_data_is_of_the_seed(nets: str) -> None:
    first, same, other = (made(nets, "convs", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first._input, same._input)
    assert not torch.equal(first._input, other._input)


def test_a_shape_that_changes_is_a_wrong_result(nets: str) -> None:
    scenario = made(nets, "Shrinking")
    scenario.step(Phases())
    with pytest.raises(WrongResult, match=r"\(2, 3, 16, 15\) .* \(2, 3, 16, 14\)"):
        scenario.step(Phases())


@pytest.mark.slow
def test_an_output_may_have_any_shape(nets: str) -> None:
    assert made(nets, "classes", mode="train").step(Phases())["samples"] == 2


@pytest.mark.parametrize("mode", mainly(["inference", "train"], 0))
def test_values_that_are_not_finite_are_a_wrong_result(nets: str, mode: str) -> None:
    with pytest.raises(WrongResult, match="not finite"):
        made(nets, "Infinite", mode=mode).step(Phases())


@pytest.mark.slow
def test_a_network_that_looks_at_values_is_tried_for_real(nets: str) -> None:
    assert under_test.check({**CASE, "model": f"{nets}:Valued"})[1]["parameters"] >= 0


@pytest.mark.slow
def test_checkpointing_computes_again_and_changes_no_gradient(nets: str) -> None:
    plain, saving = (made(nets, "blocks", mode="train", checkpointing=on) for on in (False, True))
    gradients = []
    for scenario in (plain, saving):
        scenario._forward()["out"].square().sum().backward()
        gradients.append([p.grad for p in scenario._model.module.parameters()])
    for a, b in zip(*gradients, strict=True):
        assert a is not None and b is not None and torch.equal(a, b)


@pytest.mark.slow
def test_a_network_that_knows_how_to_recompute_does_it_itself(nets: str) -> None:
    """All at once, where else each of its parts would be alone."""
    assert made(nets, "Recomputing", mode="train", checkpointing=True)._model.module.forgets


@pytest.fixture
def flags() -> Iterator[tuple[Any, Any]]:
    """Those of CUDA as torch has them by default, and after the test as they were."""
    both = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [flag.allow_tf32 for flag in both]
    for flag, value in zip(both, (False, True), strict=True):
        flag.allow_tf32 = value
    yield both
    for flag, value in zip(both, before, strict=True):
        flag.allow_tf32 = value


def test_tf32_is_said_of_products_and_convolutions_alike(nets: str, flags: tuple[Any, Any]) -> None:
    """Torch lets cuDNN alone use it by default."""
    for case, on in ((CASE, False), (CASE | {"tf32": True}, True)):
        under_test.ModelScenario({**case, "model": f"{nets}:convs"})
        assert [flag.allow_tf32 for flag in flags] == [on, on]


def test_the_structure_is_of_shapes_and_classes_and_not_of_values() -> None:
    torch.manual_seed(0)
    nets = [
        torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU()),
        torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU()),
        torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.GELU()),
        torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU()),
        torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU()).half(),
    ]
    hashes = [under_test.structure(net) for net in nets]
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 4
    assert all(len(hash) == 16 for hash in hashes)


def test_a_checked_case_has_its_device_and_channels_and_was_not_run(nets: str) -> None:
    case, facts = under_test.check({**CASE, "model": f"{nets}:Patches", "device": "auto"})
    assert case["channels"] == 3
    assert torch.device(case["device"]).type in ("cpu", "cuda", "mps")
    assert facts["tile_shape"] == [16, 16]


@pytest.mark.parametrize(
    ("net", "knobs", "sentence"),
    [
        ("nothing", {}, "--model .*nothing could not be made"),
        ("Patches", {"tile": "18"}, "--tile-sizes 18: .* side of 18 is no.* multiple of the patch"),
        ("Valued", {"tile": "64"}, "--tile-sizes 64: .* too wide for me$"),
        ("convs", {"tile": "4x16x16"}, "4x16x16 has 3 axes; model .* takes 2"),
        ("convs", {"channels": 4}, r"does not take a batch of shape \(1, 4, 16, 16\)"),
        ("convs", {"device": "cuda:7"}, "--device cuda:7: this machine has"),
        ("convs", {"device": "abacus"}, "--device 'abacus' is not a device"),
        ("convs", {"weights": "absent.pt"}, "--weights absent.pt: there is no such file"),
        ("convs", {"dtype": "uint16"}, "--dtype uint16 is not supported on cpu: "),
        ("frozen", {"mode": "train"}, "no parameters to train"),
        ("Patches", {"mode": "train"}, "no gradient of the model's head 'mean'"),
        ("normed", {"mode": "train", "checkpointing": True}, "part 0 of .* counts its batches"),
        ("overwriting", {"mode": "train", "checkpointing": True}, "part 1 .* overwrites its input"),
    ],
)
def test_what_cannot_be_measured_is_said_before(nets, net, knobs, sentence) -> None:
    with pytest.raises(UsageError, match=sentence) as raised:
        under_test.check({**CASE, "model": f"{nets}:{net}"} | knobs)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("words", "status"),
    [
        ("CUDA out of memory. Tried to allocate 2.00 MiB.", "oom_device"),
        ("CUDA error: out of memory", "oom_device"),
        ("CUDA error: all CUDA-capable devices are busy or unavailable", "crash"),
    ],
)
def test_a_device_that_is_full_or_busy_is_no_matter_of_the_dtype(
    nets: str, monkeypatch, words: str, status: str
) -> None:
    def fail(*shape: int, **options: Any) -> torch.Tensor:
        raise (torch.OutOfMemoryError if words.startswith("CUDA out") else RuntimeError)(words)

    monkeypatch.setattr(torch, "ones", fail)
    with pytest.raises(RuntimeError) as raised:
        under_test.check({**CASE, "model": f"{nets}:convs", "dtype": "bfloat16"})
    assert status_of(raised.value, limited=False) == status


def on_cuda(monkeypatch) -> None:
    """A card of 10 GiB, as far as it is only asked."""
    card = SimpleNamespace(total_memory=10 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(under_test, "find_devices", lambda names: [torch.device("cuda", 0)])


def test_the_memory_of_a_card_is_what_torch_says(nets: str, monkeypatch) -> None:
    assert under_test.check({**CASE, "model": f"{nets}:convs"})[1]["device_memory"] is None
    on_cuda(monkeypatch)
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *shape, dtype, device: ones(*shape, dtype=dtype))
    case, facts = under_test.check({**CASE, "model": f"{nets}:convs", "device": "cuda"})
    assert (case["device"], facts["device_memory"]) == ("cuda:0", 10 * 2**30)


def test_the_driver_is_asked_before_the_launch_holds_memory(nets: str, monkeypatch) -> None:
    order = []

    class Driver:
        def __init__(self, device: torch.device) -> None: ...

        def used(self) -> None:
            order.append("driver")

    def ones(*shape: int, **options: Any) -> torch.Tensor:
        order.append("launch")
        raise RuntimeError("no further")

    on_cuda(monkeypatch)
    monkeypatch.setattr(under_test, "Gpu", Driver)
    monkeypatch.setattr(torch, "ones", ones)
    with pytest.raises(RuntimeError, match="no further"):
        made(nets, "convs", device="cuda:0")
    assert order == ["driver", "launch"]
