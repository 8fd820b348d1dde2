"""Scenario ``model`` on small networks in files, and ``penstock bench model`` from end to end."""

from __future__ import annotations

import contextlib
import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from penstock.base.config.bench import BenchModelConfig
from penstock.base.config.knobs import build
from penstock.base.errors import UsageError
from penstock.bench.cases.model import model_case_namer, model_cases
from penstock.bench.launch.supervisor import LaunchRequest, run_launch
from penstock.bench.launch.worker import status_of
from penstock.bench.scenarios import WrongResult
from penstock.bench.scenarios import model as under_test
from penstock.bench.scenarios.model import ModelScenario, check, structure
from penstock.cli import main
from penstock.instruments.ledger import Ledger
from penstock.instruments.record import Record

NETS = '''
import weakref
import torch
from torch import nn

def convs():
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 2, 3, padding=1))

def blocks():
    more = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 2, 3, padding=1))
    return nn.Sequential(convs(), more)

class Patches(nn.Module):
    """Nothing but shapes may go through it."""
    def __init__(self):
        super().__init__()
        self.proj = nn.Conv2d(3, 8, 4, stride=4)
    def forward(self, x):
        assert x.device.type == "meta", "it was run"
        if x.shape[-1] % 4:
            raise ValueError(f"a side of {x.shape[-1]} is no multiple of the patch, 4")
        return {"map": self.proj(x), "mean": x.mean((2, 3))}

class Valued(nn.Module):
    """Looks at a value, so that it cannot be played on shapes."""
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
    def forward(self, x):
        if x.shape[-1] > 32:
            raise RuntimeError("too wide for me\\nand more")
        return self.conv(x) if x.sum() > 0 else x

class Shrinking(nn.Module):
    """Returns a pixel less each time."""
    def __init__(self):
        super().__init__()
        self.conv, self.calls = nn.Conv2d(3, 3, 1), 0
    def forward(self, x):
        self.calls += x.device.type != "meta"
        return self.conv(x)[..., self.calls:]

class Infinite(nn.Conv2d):
    def __init__(self):
        super().__init__(3, 3, 1)
    def forward(self, x):
        return super().forward(x) / 0

class Watched(nn.Module):
    """Knows whether what it returned is still alive at the next call."""
    def __init__(self):
        super().__init__()
        self.conv, self.last, self.alive = nn.Conv2d(3, 3, 1), None, []
    def forward(self, x):
        if self.last is not None:
            self.alive.append(self.last() is not None)
        y = self.conv(x)
        self.last = weakref.ref(y)
        return y

def frozen():
    return convs().requires_grad_(False)

def normed():
    return nn.Sequential(nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)))

def overwriting():
    return nn.Sequential(nn.Conv2d(3, 3, 1), nn.LeakyReLU(inplace=True))

def classes():
    return nn.Sequential(nn.Conv2d(3, 5, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
'''

CASE: dict[str, Any] = {
    "mode": "inference", "tile": "16", "batch": 2, "weights": None, "channels": None,
    "dtype": "float32", "amp": False, "compile": False, "channels_last": False, "tf32": False,
    "checkpointing": False, "halo": 0, "device": "cpu", "threads": None, "seed": 0, "budget": None,
}  # fmt: skip

CONVS = 2 * 16 * 16 * 2 * (3 * 8 * 9 + 8 * 2 * 9)
"""Multiplications and additions of ``convs`` on a case; not counted: biases and GELU."""


@pytest.fixture(scope="module")
def nets(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("nets") / "nets.py"
    path.write_text(NETS)
    return str(path)


class Phases:
    """Notes which phases a step goes through."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.seen.append(name)
        yield


def made(nets: str, net: str, **knobs: Any) -> ModelScenario:
    return ModelScenario({**CASE, "model": f"{nets}:{net}"} | knobs)


# --- the scenario ----------------------------------------------------------------------------


def test_an_inference_step(nets: str) -> None:
    scenario, phases = made(nets, "convs", halo=3), Phases()
    assert scenario.step(phases) == {
        "samples": 2,
        "pixels": 2 * 16**2,
        "useful_pixels": 2 * 10**2,
    }
    assert phases.seen == []
    assert scenario.facts["parameters"] == 3 * 8 * 9 + 8 + 8 * 2 * 9 + 2
    assert scenario.facts["model_bytes"] == 4 * scenario.facts["parameters"]
    assert scenario.facts["channels"] == 3
    assert scenario.facts["tile_shape"] == [16, 16]
    assert json.loads(json.dumps(scenario.facts)) == scenario.facts
    assert scenario.compile_s is None
    scenario.close()


def counted(nets: str, net: str, **knobs: Any) -> dict[str, Any]:
    return check({**CASE, "model": f"{nets}:{net}"} | knobs)[1]


def test_flops_of_both_ways(nets: str) -> None:
    facts = counted(nets, "convs")
    assert (facts["flops"], facts["flops_uncounted"]) == (CONVS, {"gelu": 1})
    facts = counted(nets, "convs", mode="train")
    # The first layer's input has no gradient, so it is passed once backwards and not twice.
    assert facts["flops"] == 3 * CONVS - 2 * 16 * 16 * 2 * 3 * 8 * 9
    assert set(facts["flops_uncounted"]) >= {"gelu", "gelu_backward", "mse_loss"}


def test_a_training_step_learns(nets: str) -> None:
    scenario, phases = made(nets, "convs", mode="train"), Phases()
    weights = [p.detach().clone() for p in scenario._model.module.parameters()]
    scenario.step(phases)
    assert phases.seen == ["forward", "backward", "optimizer"]
    now = list(scenario._model.module.parameters())
    assert all(not torch.equal(a, b) for a, b in zip(weights, now, strict=True))
    assert all(p.grad is None for p in now), "gradients are given back in the step"


@pytest.mark.parametrize("mode", ["inference", "train"])
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


@pytest.mark.parametrize("mode", ["inference", "train"])
def test_channels_last_is_of_each_tensors_own_axes(mode: str) -> None:
    """The refiner is a network of images whose patches are embedded by a convolution of volumes."""
    case = {**CASE, "model": "prithvi-refiner-tiny", "tile": "32", "batch": 1, "mode": mode}
    scenario = ModelScenario(case | {"channels_last": True})
    scenario.step(Phases())
    forms = {4: torch.channels_last, 5: torch.channels_last_3d}
    parameters = list(scenario._model.module.parameters())
    assert {parameter.ndim for parameter in parameters} >= set(forms)
    for tensor in (scenario._input, *parameters):
        if form := forms.get(tensor.ndim):
            assert tensor.is_contiguous(memory_format=form)


def test_a_network_of_three_axes_has_cubes_for_tiles() -> None:
    scenario = ModelScenario({**CASE, "model": "denoise-tiny", "tile": "8", "halo": 1})
    assert scenario.facts["tile_shape"] == [8, 8, 8]
    assert scenario.step(Phases())["useful_pixels"] == 2 * 6**3


def test_a_network_without_weights_of_its_own_is_measured_untrained() -> None:
    _, facts = check({**CASE, "model": "denoise-net", "tile": "16"})
    assert facts["model"] == "denoise-net"
    assert facts["parameters"] > 12e6


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


def test_an_output_may_have_any_shape(nets: str) -> None:
    assert made(nets, "classes", mode="train").step(Phases())["samples"] == 2


@pytest.mark.parametrize("mode", ["inference", "train"])
def test_values_that_are_not_finite_are_a_wrong_result(nets: str, mode: str) -> None:
    with pytest.raises(WrongResult, match="not finite"):
        made(nets, "Infinite", mode=mode).step(Phases())


def test_a_network_that_looks_at_values_has_no_flops(nets: str) -> None:
    assert counted(nets, "Valued")["flops"] is None
    assert counted(nets, "Valued")["flops_uncounted"] is None


def test_checkpointing_computes_again_and_changes_no_gradient(nets: str) -> None:
    plain, saving = (made(nets, "blocks", mode="train", checkpointing=on) for on in (False, True))
    # Both blocks go forward twice, up to what the gradient of their last layer needs.
    again = 2 * 16 * 16 * 2 * (3 * 8 * 9 + 2 * 8 * 9)
    flops = [counted(nets, "blocks", mode="train", checkpointing=c)["flops"] for c in (False, True)]
    assert flops[1] == flops[0] + again
    gradients = []
    for scenario in (plain, saving):
        scenario._forward()["out"].square().sum().backward()
        gradients.append([p.grad for p in scenario._model.module.parameters()])
    for a, b in zip(*gradients, strict=True):
        assert a is not None and b is not None and torch.equal(a, b)


def test_a_network_that_knows_how_to_recompute_does_it_itself() -> None:
    case = {**CASE, "model": "prithvi-refiner-tiny", "tile": "32", "batch": 1, "mode": "train"}
    flops = [check({**case, "checkpointing": on})[1]["flops"] for on in (False, True)]
    assert flops[1] > flops[0]


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
    """Torch lets cuDNN alone use it by default. A case from before there was the knob is one
    without TF32, as `infer` and `train` would run it."""
    old = {name: value for name, value in CASE.items() if name != "tf32"}
    for case, on in ((CASE, False), (CASE | {"tf32": True}, True), (old, False)):
        ModelScenario({**case, "model": f"{nets}:convs"})
        assert [flag.allow_tf32 for flag in flags] == [on, on]


def test_the_structure_is_of_shapes_and_classes_and_not_of_values() -> None:
    torch.manual_seed(0)
    nets = [
        nn.Sequential(nn.Linear(2, 3), nn.ReLU()),
        nn.Sequential(nn.Linear(2, 3), nn.ReLU()),
        nn.Sequential(nn.Linear(2, 3), nn.GELU()),
        nn.Sequential(nn.Linear(3, 2), nn.ReLU()),
        nn.Sequential(nn.Linear(2, 3), nn.ReLU()).half(),
    ]
    hashes = [structure(net) for net in nets]
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 4
    assert all(len(hash) == 16 for hash in hashes)


# --- what is refused -------------------------------------------------------------------------


def test_a_checked_case_has_its_device_and_channels_and_was_not_run(nets: str) -> None:
    case, facts = check({**CASE, "model": f"{nets}:Patches", "device": "auto"})
    assert case["channels"] == 3
    assert torch.device(case["device"]).type in ("cpu", "cuda", "mps")
    assert facts["tile_shape"] == [16, 16]


@pytest.mark.parametrize(
    ("net", "knobs", "sentence"),
    [
        ("nothing", {}, "--model .*nothing could not be made"),
        ("Patches", {"tile": "18"}, "--tile-sizes 18: .* side of 18 is no multiple of the patch"),
        ("Valued", {"tile": "64"}, "--tile-sizes 64: .* too wide for me$"),
        ("convs", {"tile": "4x16x16"}, "4x16x16 has 3 axes; model .* takes 2"),
        ("convs", {"channels": 4}, r"does not take a batch of shape \(1, 4, 16, 16\)"),
        ("convs", {"device": "cuda:7"}, "--device cuda:7: this machine has"),
        ("convs", {"device": "abacus"}, "--device 'abacus' is no device"),
        ("convs", {"halo": 8}, "--halo 8 leaves nothing of --tile-sizes 16"),
        ("convs", {"amp": True, "dtype": "bfloat16"}, "--amp .* --dtype bfloat16"),
        ("convs", {"checkpointing": True}, "--mode train"),
        ("convs", {"weights": "absent.pt"}, "--weights absent.pt: there is no such file"),
        ("frozen", {"mode": "train"}, "no parameters to train"),
        ("normed", {"mode": "train", "checkpointing": True}, "part 0 of .* counts its batches"),
        ("overwriting", {"mode": "train", "checkpointing": True}, "part 1 .* overwrites its input"),
    ],
)
def test_what_cannot_be_measured_is_said_before(
    nets: str, net: str, knobs: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UsageError, match=sentence) as raised:
        check({**CASE, "model": f"{nets}:{net}"} | knobs)
    assert "\n" not in str(raised.value)


def test_a_dtype_without_arithmetic_is_said_before(nets: str) -> None:
    with pytest.raises(UsageError, match="--dtype uint16 is not supported on cpu: "):
        check({**CASE, "model": f"{nets}:convs", "dtype": "uint16"})


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB."), "oom_device"),
        (RuntimeError("CUDA error: out of memory"), "oom_device"),
        (RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable"), "crash"),
    ],
)
def test_a_device_that_is_full_or_busy_is_no_matter_of_the_dtype(
    nets: str, monkeypatch: pytest.MonkeyPatch, error: RuntimeError, status: str
) -> None:
    def fail(*shape: int, **options: Any) -> torch.Tensor:
        raise error

    monkeypatch.setattr(torch, "ones", fail)
    with pytest.raises(RuntimeError) as raised:
        check({**CASE, "model": f"{nets}:convs", "dtype": "bfloat16"})
    assert status_of(raised.value, limited=False) == status


def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card of 10 GiB, as far as it is only asked."""
    card = SimpleNamespace(total_memory=10 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(under_test, "find_devices", lambda names: [torch.device("cuda", 0)])


def test_the_memory_of_a_card_is_what_torch_says(
    nets: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check({**CASE, "model": f"{nets}:convs"})[1]["device_memory"] is None
    on_cuda(monkeypatch)
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *shape, dtype, device: ones(*shape, dtype=dtype))
    case, facts = check({**CASE, "model": f"{nets}:convs", "device": "cuda"})
    assert (case["device"], facts["device_memory"]) == ("cuda:0", 10 * 2**30)


def test_the_driver_is_asked_before_the_launch_holds_any_of_the_card(
    nets: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_head_without_a_gradient_cannot_be_trained_on(nets: str) -> None:
    with pytest.raises(UsageError, match="no gradient of the model's head 'mean'"):
        check({**CASE, "model": f"{nets}:Patches", "mode": "train"})


def test_a_prithvi_refiner_says_which_tile_would_do() -> None:
    with pytest.raises(UsageError, match="100 is no multiple of 16"):
        check({**CASE, "model": "prithvi-refiner-tiny", "tile": "100"})


# --- cases -----------------------------------------------------------------------------------


def config(**settings: Any) -> BenchModelConfig:
    return build(BenchModelConfig, settings)


def test_the_defaults_are_the_seeds() -> None:
    cases = model_cases(config())
    assert [(case["tile"], case["batch"]) for case in cases] == [
        ("256", 1), ("256", 2), ("256", 4), ("384", 1), ("384", 2), ("384", 4)
    ]  # fmt: skip
    assert cases[0].keys() == {*CASE, "model"}


def test_axes_are_multiplied_and_named_where_they_differ() -> None:
    cases = model_cases(config(amp=("off", "on"), tile_sizes=("8", "8", "16"), batch_sizes=(1,)))
    name = model_case_namer(cases)
    assert [name(case) for case in cases] == [
        "tile 8, batch 1, no amp",
        "tile 8, batch 1, amp",
        "tile 16, batch 1, no amp",
        "tile 16, batch 1, amp",
    ]


# --- the command, with a worker that makes its answers up -----------------------------------------

WORKER = """
import json, os, sys
request = json.load(open(sys.argv[1]))
case = request["case"]
batch, side = case["batch"], int(case["tile"])
def say(message):
    os.write(int(sys.argv[2]), json.dumps(message).encode() + b"\\n")
def fail(status, message):
    say({"failed": {"status": status, "stage": "measure", "message": message}})
    sys.exit(1)
facts = {"model": case["model"], "parameters": 10, "model_bytes": 40, "structure": "0" * 16,
         "tile_shape": [side, side], "channels": 3, "process_bytes": 2000}
print("not a record")
if request["task"] == "check":
    if case["model"] == "unknown":
        fail("unsupported", "--model 'unknown' is unknown")
    if case["model"] == "nets:fragile":
        os.abort()
    say({"result": {"case": {**case, "device": "cpu", "channels": 3}, "facts": facts}})
    sys.exit(0)
if case["model"] == "nets:fragile":
    os.abort()
pixels = batch * side**2
if batch == 64 or case["budget"] and 1000 + 4 * pixels > case["budget"]:
    fail("oom_host", "no room")
assert case["device"] == "cpu" and request["memory_limit"] == case["budget"]
seconds = [1e-3 + 1e-6 * pixels * (1 + n / 1e3) for n in range(10)]
say({"result": {
    "work": {"samples": batch, "pixels": pixels, "useful_pixels": pixels},
    "samples_s": {"step": seconds}, "stop": "precise",
    "warmup": {"settled": side != 32}, "facts": facts,
    "memory": {"host_peak": 1000 + 4 * pixels}}})
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, whose launches are answered by `WORKER`."""
    (tmp_path / "worker.py").write_text(WORKER)
    monkeypatch.setattr(
        "penstock.bench.launch.supervisor.WORKER", (sys.executable, str(tmp_path / "worker.py"))
    )
    monkeypatch.setattr("penstock.instruments.environment.WATCH_S", 0.0)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def bench(*words: str) -> int:
    return main(["bench", "model", "--effort", "quick", "--output", "out/bench.csv", *words])


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_a_sweep_writes_its_rows_and_says_what_they_say(
    fake: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench("--tile_sizes", "16", "32", "--batch-sizes", "1", "64") == 0
    written = rows(fake / "out/bench.csv")
    assert {(row["tile_size"], row["batch_size"], row["status"]) for row in written} == {
        ("16", "1", "ok"), ("16", "64", "oom_host"), ("32", "1", "ok"), ("32", "64", "oom_host")
    }  # fmt: skip
    assert {row["device"] for row in written} == {"cpu"}, "auto was resolved"
    records = Ledger(fake / "out/bench.ledger").records()
    assert len(records) == 4
    assert (fake / "out/bench.inference.yaml").exists()
    out, err = capsys.readouterr()
    assert "oom_host (no room)" in err
    assert "never steady" in err
    assert "tile 32, batch 1, launch 0: 2.0" in err
    for file in ("bench.csv", "bench.ledger/records.jsonl", "bench.inference.yaml"):
        assert f"Written: out/{file}" in out

    assert bench("--tile-sizes=16", "--batch_sizes=1") == 0
    assert len(rows(fake / "out/bench.csv")) == 5, "appended"


def test_the_settings_of_several_models_are_refused_before_a_sweep(
    fake: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each has a file of its own, and which is known only when all is measured."""
    (fake / "out").mkdir()
    (fake / "out/bench.inference_identity.yaml").write_text("what a user wrote")
    words = ("--tile-sizes", "16", "--batch-sizes", "1", "--model", "denoise-net", "identity")
    assert bench(*words) == 2
    assert "--recommend out/bench.inference_identity.yaml: what is" in capsys.readouterr().err
    assert not (fake / "out/bench.ledger").exists()
    assert bench(*words, "--replace") == 0
    assert bench(*words) == 0


def test_a_model_that_crashes_is_a_row_and_the_exit_code_is_1(fake: Path) -> None:
    (fake / "nets.py").touch()
    words = ("--tile-sizes", "16", "--batch-sizes", "1", "--model", "nets:fragile", "nets:sound")
    assert bench(*words) == 1
    statuses = {row["model"]: row["status"] for row in rows(fake / "out/bench.csv")}
    assert statuses == {"nets:fragile": "crash", "nets:sound": "ok"}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--model unknown", "--model 'unknown' is unknown"),
        ("--batch-sizes 0", "--batch-sizes"),
        ("--tile-sizes 16x", "--tile-sizes"),
        ("--tile-sizes 16 --halo 8", "--halo 8 leaves nothing of --tile-sizes 16"),
        ("--amp --dtype bfloat16", "--amp"),
        ("--checkpointing", "--checkpointing"),
        ("--output worker.py", "worker.py is not the CSV of a benchmark"),
        ("--output worker.py/bench.csv", "--output worker.py/bench.csv cannot be written"),
        ("--output .", "--output . cannot be written"),
        ("--ledger worker.py", "--ledger worker.py/records.jsonl cannot be written"),
        ("--recommend worker.py/a.yaml", "--recommend worker.py/a.yaml cannot be written"),
    ],
)
def test_what_makes_no_sense_is_one_sentence_and_nothing_is_created(
    fake: Path, capsys: pytest.CaptureFixture[str], words: str, sentence: str
) -> None:
    before = sorted(fake.rglob("*"))
    assert bench(*words.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1 and sentence in err
    assert sorted(fake.rglob("*")) == before


def test_a_ledger_with_a_spoilt_line_is_refused(
    fake: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (fake / "l").mkdir()
    (fake / "l" / "records.jsonl").write_text("half a rec\n")
    assert bench("--ledger", "l") == 2
    assert "line 1" in capsys.readouterr().err
    assert not (fake / "out").exists()


def test_an_interrupted_sweep_goes_on_with_resume(
    fake: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--tile-sizes", "16", "--batch-sizes", "1", "2", "3")
    append, kept = Ledger.append, []

    def impatient(ledger: Ledger, record: Record) -> None:
        append(ledger, record)
        kept.append(record)
        if len(kept) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Ledger, "append", impatient)
        assert bench(*words) == 3
    assert "--resume" in capsys.readouterr().err
    assert bench(*words, "--resume") == 0
    records = Ledger(fake / "out/bench.ledger").records()
    assert records[:2] == kept
    assert sorted(record.case["batch"] for record in records) == [1, 2, 3]
    assert len(rows(fake / "out/bench.csv")) == 3


def test_the_limit_of_each_tile(fake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--find-limit", "--budget", "20000", "--tile-sizes", "16", "32") == 0
    out, _ = capsys.readouterr()
    assert "Tile 16: a batch of 18 fits" in out  # 1000 + 4 * 18 * 256 = 19432
    assert "Tile 32: a batch of 4 fits" in out
    assert Ledger(fake / "out/bench.ledger/limits").records()
    written = rows(fake / "out/bench.csv")
    found = [(row["tile_size"], row["batch_size"], row["error"]) for row in written]
    assert found == [("16", "18", ""), ("16", "19", "OOM"), ("32", "4", ""), ("32", "5", "OOM")]
    assert {row["avg_time_ms"] + row["pixels_per_sec"] for row in written} == {""}, "only tried"
    assert "Written: out/bench.csv" in out
    assert main(["plot", "out/bench.csv", "--output", "out/limits"]) == 0


@pytest.mark.parametrize("words", [(), ("--find-limit",)])
def test_a_budget_that_holds_no_launch_is_refused(
    fake: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    assert bench("--budget", "1KiB", *words) == 2
    told = "holds no launch: Python, torch and the weights take 1.99 KiB before the first sample"
    assert f"--budget 1.00 KiB {told}" in capsys.readouterr().err
    assert not (fake / "out").exists()
    assert bench("--budget", "0", *words) == 2


# --- the command, with the real worker -------------------------------------------------------


@pytest.mark.slow
def test_from_a_file_to_a_row(nets: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = f"--model {nets}:convs --tile_sizes 16 --batch_sizes 1 --mode train --device cpu"
    assert bench(*words.split(), "--launch-seconds", "0.2") == 0
    (row,) = rows(tmp_path / "out/bench.csv")
    assert (row["mode"], row["status"], row["model_params"]) == ("train", "ok", "370")
    assert float(row["total_time_ms"]) > 0
    assert float(row["host_peak_mb"]) > 10
    (record,) = Ledger(tmp_path / "out/bench.ledger").records()
    phases = ["forward", "backward", "optimizer"]
    assert list(record.samples_s) == ["step", *phases]
    parts = zip(*(record.samples_s[name] for name in phases), strict=True)
    for step, within in zip(record.samples_s["step"], parts, strict=True):
        assert 0 < sum(within) <= step
    assert record.warmup.first_s and record.warmup.setup_s
    assert record.memory.host_baseline and record.memory.host_peak_kernel
    assert record.case["channels"] == 3
    assert record.work["flops"] == counted(nets, "convs", mode="train", batch=1)["flops"]


def test_a_launch_of_inference(nets: str) -> None:
    case = {**CASE, "model": f"{nets}:convs"}
    request = LaunchRequest("model", case, rules={"seconds": 0.2, "precision": 0.01})
    record = run_launch(request, launch=0, order=None, timeout_s=60)
    assert record.ok, record.error
    assert list(record.samples_s) == ["step"]
    assert record.work == {"samples": 2, "pixels": 512, "useful_pixels": 512}
    assert record.stop in ("precise", "noise_stable", "budget")


def test_resume_refuses_what_another_machine_measured(
    fake: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--tile-sizes", "16", "--batch-sizes", "1")
    assert bench(*words) == 0
    path = fake / "out/bench.ledger/records.jsonl"
    (record,) = Ledger(fake / "out/bench.ledger").records()
    elsewhere = record.model_copy(update={"environment": {"machine_key": "elsewhere"}})
    path.write_text(elsewhere.line() + "\n")
    assert bench(*words, "--resume") == 2
    assert "on another machine (elsewhere, not " in capsys.readouterr().err
    assert path.read_text() == elsewhere.line() + "\n"
