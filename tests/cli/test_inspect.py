"""``penstock inspect`` says how far a network sees."""

from penstock.cli import main


def test_a_network_of_the_user_is_inspected(tmp_path, capsys) -> None:
    file = tmp_path / "net.py"
    file.write_text(
        "from torch import nn\n"
        "def near(): return nn.Conv2d(1, 1, 3, padding=1)\n"
        "def far(): return nn.Sequential(nn.Conv2d(1, 1, 1), nn.InstanceNorm2d(1))\n"
    )
    assert main(["inspect", f"{file}:near"]) == 0
    assert "exact with --overlap 2 2" in capsys.readouterr().out
    assert main(["inspect", f"{file}:far"]) == 0
    assert "1 (InstanceNorm2d) sees the whole patch" in capsys.readouterr().out


def test_a_model_that_is_not_there_or_takes_other_axes_is_refused(capsys) -> None:
    assert main(["inspect", "denoise-tinny"]) == 2
    assert "did you mean denoise-tiny" in capsys.readouterr().err
    assert main(["inspect", "missing.pt2"]) == 2
    assert "there is no file" in capsys.readouterr().err
    assert main(["inspect", "denoise-tiny", "--axes", "2"]) == 2
    assert "--axes 2: denoise-tiny is made of 3-D convolutions" in capsys.readouterr().err
