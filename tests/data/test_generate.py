"""The verb ``generate``: presets and volumes, end to end."""

import re

import numpy as np
import pytest

from penstock.cli import generate, main
from penstock.data import PRESETS, Box, Specimen, World, open_dataset

from .kit import read

GRID = (8, 16)


@pytest.mark.slow
def test_generate_packs_a_preset(tmp_path, capsys) -> None:
    root = tmp_path / "data"
    words = ["generate", "ufs-p1", str(root), "--samples", "3", "--grid", "8", "16", "--seed", "5"]
    assert main(words) == 0
    packed = open_dataset(root)
    world = World(GRID, 5)
    for index in range(3):
        sample = world.sample(PRESETS["ufs-p1"], index)
        for name, values in sample.items():
            np.testing.assert_array_equal(read(packed, name)[index], values)
    assert (packed.document["preset"], packed.document["seed"]) == ("ufs-p1", 5)
    assert len(packed.arrays["inputs"].channels) == 187
    out, err = capsys.readouterr()
    assert "inputs   3 x 8 x 16 x 187 (sample, lat, lon, channels), chunks 1 x 8 x 16 x 13" in out
    ratio = packed.document["compression_ratio"]
    assert f"Compression ratio {ratio:.3g}" in out
    assert err.splitlines()[-1] == "3 of 3 samples"
    assert main(words) == 2
    assert "use --overwrite" in capsys.readouterr().err
    assert main([*words, "--overwrite"]) == 0


def test_generate_makes_a_volume(specimen: Specimen, tmp_path, monkeypatch, capsys) -> None:
    from penstock.data.stores.open import open_source

    words = ["generate", "volume", str(tmp_path / "v.zarr"), "--shape", "16", "20", "24"]
    words += ["--chunks", "8", "16", "16", "--seed", "3"]
    # Made once a session: growing what is in it takes a second.
    monkeypatch.setattr(generate, "Specimen", {3: specimen}.__getitem__)
    assert main(words) == 0
    source = open_source(str(tmp_path / "v.zarr"))
    assert source.chunks[-3:] == (8, 16, 16)
    assert source.axes == "zyx"
    volume = source.read(source.domain)[0, 0]
    np.testing.assert_array_equal(volume, specimen.image(Box((0, 0, 0), (16, 20, 24))))
    out, err = capsys.readouterr()
    assert "v.zarr: 16 x 20 x 24 voxels (z, y, x) of uint16" in out
    assert err.splitlines()[-1] == f"{16 * 20 * 24:,} of {16 * 20 * 24:,} voxels"
    assert main(words) == 2
    assert "use --overwrite" in capsys.readouterr().err
    words[2] = str(tmp_path / "clean.zarr")
    assert main([*words, "--clean"]) == 0
    clean = open_source(str(tmp_path / "clean.zarr"))
    truth = np.rint(specimen.clean(Box((0, 0, 0), (16, 20, 24))))
    np.testing.assert_array_equal(clean.read(clean.domain)[0, 0], truth)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("ufs-p3 OUT", "there is no preset 'ufs-p3'; there are ufs-p1, ufs-p2,"),
        ("", "give what to make .* got neither"),
        ("ufs-p1", "give what to make .* got ufs-p1"),
        ("ufs-p1 OUT --samples 0", "--samples '0': input should be greater than or equal to 1"),
        ("ufs-p1 OUT --grid 7 16", "--grid '7': input should be a multiple of 2"),
        ("ufs-p1 OUT --shards 2 3", "give one number, the samples in a shard"),
        ("ufs-p1 OUT --inputs u", "--inputs belongs to --from, but this is a preset"),
        ("volume OUT --samples 2", "--samples belongs to a preset and --from, but this is"),
        ("volume OUT --shape 4 4", "--shape takes more values"),
        ("--from none.nc OUT", "--from none.nc is not a file"),
        ("--from none.nc", "takes OUT and nothing else, and got nothing"),
        ("--from none.nc ufs-p1 OUT", "takes OUT and nothing else, and got ufs-p1 OUT"),
    ],
)
def test_wrong_usage_is_one_sentence_and_exit_2(words, sentence, tmp_path, here, capsys) -> None:
    assert main(["generate", *words.split()]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert re.search(sentence, err), err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words", ["ufs-p2 OUT --samples 4 --grid 8 16", "volume OUT --shape 8 8 8", "xview3 OUT"]
)
def test_no_data_is_made_inside_an_array(words, specimen, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(generate, "Specimen", {0: specimen}.__getitem__)
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "zarr.json").write_text('{"zarr_format": 3, "node_type": "array"}')
    for out in (folder / "new", folder / "far" / "new"):
        assert main(["generate", *words.replace("OUT", str(out)).split()]) == 2
        said = capsys.readouterr().err
        assert f"OUT {out} lies inside the array {folder}; give a place outside it" in said
    assert [path.name for path in folder.rglob("*")] == ["zarr.json"]
