"""Paths as people type them: relative, through ``..``, from home; and outputs in inputs."""

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import penstock
from penstock.base import SuiteConfig, UsageError, absolute, build
from penstock.base.files import set_aside
from penstock.bench.suite import execute as suite
from penstock.cli import main
from penstock.data import Box, open_sink, open_source, write_data_set
from penstock.data.packed import format
from penstock.loading.loader import Loader

from .arrays import counted_up, zarr
from .parameters import paired

SMALL = ["--model-type", "identity", "--patch", "8", "--overlap", "2", "--devices", "cpu"]
DATA = counted_up(16)


@pytest.fixture
def beside(tmp_path, monkeypatch) -> Path:
    """A folder beside that of the data, in which the process is."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    zarr(tmp_path / "in.zarr", DATA)
    return tmp_path


def test_a_path_is_settled_as_the_system_follows_it(beside: Path) -> None:
    (beside / "far" / "deep").mkdir(parents=True)
    (beside / "here" / "link").symlink_to(beside / "far" / "deep")
    assert absolute("../in.zarr") == absolute("~/in.zarr") == beside / "in.zarr"
    assert absolute("link/../x") == beside / "far" / "x"
    assert absolute("link/x") == beside / "here" / "link" / "x"


def test_what_is_set_aside_replaces_nothing(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / "rows.jsonl").write_text(str(number))
        set_aside(tmp_path / "rows.jsonl")
        if number == 1:
            (tmp_path / "rows-1.jsonl").unlink()
    assert sorted(file.read_text() for file in tmp_path.iterdir()) == ["1", "2", "3"]


SPECS: tuple[Any, ...] = (
    "../in.zarr",
    "~/here/../in.zarr",
    {"driver": "zarr", "kvstore": {"driver": "file", "path": "../in.zarr/"}},
    {"driver": "zarr", "kvstore": {"driver": "file", "path": "../here"}, "path": "../in.zarr"},
    {"driver": "zarr", "kvstore": "../in.zarr"},
    {
        "driver": "cast",
        "dtype": "float32",
        "base": {"driver": "zarr", "kvstore": {"driver": "file", "path": "~/in.zarr"}},
    },
)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_every_spec_may_name_a_folder_through_dots(beside: Path, spec: Any) -> None:
    assert (open_source(spec).read(open_source(spec).domain)[0, 0] == DATA).all()


def test_a_file_url_may_have_dots(beside: Path) -> None:
    (beside / "a b").mkdir()
    zarr(beside / "a b" / "in.zarr", DATA)
    for name in ("/a%20b/../in.zarr", "/a%20b/../a%20b/in.zarr/"):
        url = f"file://{beside}{name}"
        for spec in (url, {"driver": "zarr", "kvstore": url}):
            assert open_source(spec).domain.shape[2:] == DATA.shape


@pytest.mark.parametrize(
    "out",
    ["../out.zarr", *(pytest.param(o, marks=pytest.mark.slow) for o in ("~/o.zarr", "../o.n5"))],
)
def test_infer_and_plan_take_dots(beside: Path, out: str) -> None:
    words = ["--in-spec", "../in.zarr", "--out-spec", out, *SMALL]
    assert main(["plan", *words]) == 0
    assert main(["infer", *words, "--normalize", "none"]) == 0
    made = beside / Path(out).name
    assert (open_source(made).read(open_source(made).domain)[0, 0] == DATA).all()
    assert main(["infer", *words, "--normalize", "none", "--resume"]) == 0
    assert not list((beside / "here").iterdir())


def test_generated_samples_are_read_through_dots(beside: Path) -> None:
    words = ["--samples", "4", "--grid", "8", "16"]
    assert main(["generate", "ufs-p2", "../set", *words]) == 0
    expected = next(iter(Loader(beside / "set", batch_size=2)))
    name = next(iter(expected))
    for folder in ("../set", "~/here/../set"):
        for engine in ("native", "tensorstore"):
            with Loader(folder, batch_size=2, engine=engine) as loader:
                assert (next(iter(loader))[name] == expected[name]).all()
    assert format.open_dataset(Path("../set"), "--data").num_samples == 4


@pytest.mark.parametrize(
    "inside", ["in.zarr/out.zarr", "in.zarr/0/1", "here/../in.zarr/x", "in.zarr"]
)
def test_an_output_inside_the_input_is_refused(beside: Path, inside: str) -> None:
    before = sorted(beside.rglob("*"))
    with pytest.raises(UsageError, match=r"^`out_spec` .*: (is the input|lies inside the array)"):
        penstock.run_inference(
            beside / "in.zarr", beside / inside, model="identity", patch=8, overlap=2,
            devices="cpu", overwrite=inside == "in.zarr",
        )  # fmt: skip
    assert sorted(beside.rglob("*")) == before


def test_an_output_beside_the_input_in_one_group_is_fine(tmp_path) -> None:
    zarr(tmp_path / "group.zarr" / "0", DATA)
    penstock.run_inference(
        tmp_path / "group.zarr" / "0", tmp_path / "group.zarr" / "1", model="identity", patch=8,
        overlap=2, devices="cpu", normalize="none",
    )  # fmt: skip
    assert open_sink(tmp_path / "group.zarr" / "1", domain=open_source(DATA).domain,
                     dtype=DATA.dtype, resume=True).exists  # fmt: skip


def test_preprocess_takes_dots_and_keeps_out_of_the_scenes(beside: Path, capsys) -> None:
    pytest.importorskip("rasterio")
    pytest.importorskip("contourpy")
    data = beside / "data"
    write_data_set(data, (60, 70), scenes=2, validation=1, objects=2, tiff="strips", seed=0)
    words = ["preprocess", "--data_root", "../data", "--chip-size", "32", "--overlap", "0",
             "--train_label_file", "../data/labels/train.csv", "--num_workers", "1",
             "--val_label_file", "../data/labels/validation.csv"]  # fmt: skip
    assert main([*words, "--output_dir", "../chips"]) == 0
    before = sorted(data.rglob("*"))
    scene = next((data / "train").iterdir()).name
    for out in ("../data", f"../data/train/{scene}/chips"):
        capsys.readouterr()
        assert main([*words, "--output_dir", out]) == 2
        assert "which is the input" in capsys.readouterr().err
    assert sorted(data.rglob("*")) == before


@pytest.mark.parametrize(
    ("kind", "within"), paired(("packed", "chips", "array"), ("", "run", "../link/run"))
)
def test_a_training_keeps_out_of_its_data(kind: str, within: str, tmp_path, capsys) -> None:
    """What is refused comes before the data are opened, so a file of theirs is enough."""
    data = tmp_path / "data"
    (tmp_path / "link").symlink_to(data)
    if kind == "array":
        zarr(data, DATA)
    else:
        data.mkdir()
        (data / {"packed": "dataset.json", "chips": "index.json"}[kind]).write_text("{}")
    words = {
        "packed": ["emulator", "--train-data-root", f"{data}/../other", "--val-data-root", data],
        "chips": ["detector", "--train-chips-path", data, "--val-chips-path", tmp_path / "other"],
        "array": ["pairs", "--in-spec", data, "--target-spec", data],
    }[kind]
    before = sorted(data.rglob("*"))
    command = ["train", *map(str, words), "--output-dir", f"{data}/{within}", "--overwrite"]
    assert main(command) == 2
    said = capsys.readouterr().err
    assert f"{data}; give a folder outside it" in said and said.count("\n") == 1
    assert sorted(data.rglob("*")) == before


def test_a_suite_keeps_out_of_its_chips(tmp_path) -> None:
    paths = {"train_chips_path": tmp_path / "train", "val_chips_path": tmp_path / "val"}
    with pytest.raises(UsageError, match=r"val/out lies inside --val-chips .*val; give a folder"):
        suite.check_suite_output(
            build(SuiteConfig, {"output_dir": tmp_path / "val" / "out", **paths})
        )
    suite.check_suite_output(build(SuiteConfig, {"output_dir": tmp_path / "out", **paths}))


@pytest.mark.parametrize("given", [None, 3, [[1, 2]]])
def test_what_names_no_place_is_refused(beside: Path, given: Any) -> None:
    """None as the output wrote a store of the name None."""
    with pytest.raises(UsageError, match=r"of type \w+ is no path, URL, TensorStore spec or numpy"):
        open_sink(given, domain=Box((0,) * 5, (1, 1, 4, 4, 4)), dtype=np.uint8)
    with pytest.raises(UsageError, match=r"of type \w+ is no path, URL, TensorStore spec or numpy"):
        open_source(given)
    assert not [*Path().iterdir()]


def test_names_of_files_may_hold_the_signs_of_urls_and_json(beside: Path) -> None:
    np.save("{a}?.npy", DATA)
    assert main(["convert", "{a}?.npy", "what?.tif"]) == 0
    assert (open_source("what?.tif").read(open_source("what?.tif").domain) == DATA).all()


@pytest.mark.parametrize("name", ["a::b", "c|zip:", "d::|e"])
def test_names_of_files_may_hold_the_signs_of_specs(name: str, beside: Path) -> None:
    with h5py.File(f"{name}.h5", "w") as file:
        file["raw"], file["other"] = DATA, DATA[:1]
    assert main(["convert", f"{name}.h5::raw", f"{name}.zarr"]) == 0
    assert main(["convert", f"{name}.zarr", f"{name}.tif"]) == 0
    for place in (f"{name}.h5::raw", f"{name}.zarr", f"{name}.tif"):
        assert (open_source(place).read(open_source(place).domain) == DATA).all()


def test_a_backslash_that_would_be_a_slash_is_refused(beside: Path, capsys) -> None:
    np.save("a\\b.npy", DATA)
    for words in (
        ["convert", "a\\b.npy", "a\\b.zarr"], ["convert", "a\\b.npy", "a\\b.tif"],
        ["generate", "ufs-p1", "a\\b", "--samples", "1", "--grid", "8", "8"],
    ):  # fmt: skip
        assert main(words) == 2
        assert "TensorStore takes its backslash for a slash; rename it" in capsys.readouterr().err
    assert not Path("a").exists()


@pytest.mark.parametrize("name", ["./~draft", "~nobody-at-all"])
def test_a_name_that_begins_with_the_sign_for_home_is_a_name(
    name: str, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store, picture = f"{name}.ome.zarr", f"{name}.tif"
    assert main(["generate", "volume", store, "--shape", "8", "8", "8"]) == 0
    assert main(["convert", store, picture]) == 0
    assert main(["infer", picture, f"{name}.zarr", "--model", "identity"]) == 0
    assert main(["info", f"{name}.zarr"]) == 0
    assert Path(store).is_dir() and Path(picture).is_file()
