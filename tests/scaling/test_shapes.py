"""Lines that are read by their shape give what they give when each is read in full."""

import gzip
import random

import pytest

from penstock.base.errors import UsageError
from penstock.scaling.sources import attempt, gpu_readings
from penstock.scaling.sources.attempt import Attempt
from penstock.scaling.sources.digit_places import MOST, Shapes
from penstock.scaling.sources.slurm_log import read_log

from .kit import MEASURED, log, our_log, read_text, results
from .mutated import mutated

BAR = (
    "Epoch {epoch}: {percent:3d}%|{bar:<10}| {step}/50 [00:01<00:02, {rate:.2f}it/s, v_num=1, "
    "val_loss={loss:.3f}, val_acc={acc:.3f}]\n"
)
OURS = "epoch {epoch}, step {step} of 50: loss {rate:.4f}; val_loss {loss:.4f}, val_acc {acc:.4f}\n"
OTHERS = (
    "GPU 1: Tesla\n", "GPU 0: A100\n", "Hidden dimensions 2: 3\n", "12:03:04 loss: 0.3\n",
    "Tue Nov 24 23:57:26 UTC 2026\n", "Tue Nov 24 01:02:03 2025  x\n",
    "rank 3: 4.5 s a step: forward 30%, communication 50%\n", "3, 97 %, 41 %, 55\n",
    "Epoch 3: 10%|█         | 5/50 [00:01<00:02, 3.1it/s, loss=nan]\n",
    "Epoch 3: 10%|█         | 5/50 [00:01<00:02, 3.1it/s, val_loss=1e999]\n",
    "Epoch 3: 10%|█         | 5/50 [00:01<00:02, 3.1it/s]Total training time: 5 seconds\n",
)  # fmt: skip


def lines(form: str, seed: int, *, label: bool = False) -> str:
    """Lines of eight ranks that take turns."""
    rng, text = random.Random(seed), ""
    for step in range(2, 51, 2):
        for rank in range(8):
            text += f"{rank}: " * label + form.format(
                epoch=seed, step=step, percent=2 * step, bar="█" * (step // 5),
                rate=rng.uniform(1, 20), loss=rng.random(), acc=rng.random(),
            )  # fmt: skip
    return text


LOGS = (
    log("5", 4, 95.23, ranks=2, epochs=6) + lines(BAR, 3),
    log("5", 4, None, done=3, epochs=6)
    + lines(BAR, 4, label=True)
    + log("5", 4, 60.0, first=3, epochs=6),
    MEASURED + lines(OURS.replace("{epoch}", "{epoch} of 9"), 1),
    MEASURED + our_log(results(2, 5.0), {"SLURM_JOB_ID": "31"}) + lines(OURS, 9),
    lines(BAR.replace("{epoch}", "{epoch}/50"), 50) + "".join(OTHERS),
)


@pytest.mark.parametrize("rounds", [10, pytest.param(200, marks=pytest.mark.long)])
def test_shapes_change_nothing(tmp_path, rounds: int) -> None:
    """Mutated and shuffled logs are read by shapes, and each line in full."""
    path, by_shape = tmp_path / "slurm-7.out", 0

    class InFull(Shapes):
        def take(self, line: bytes, attempt: Attempt) -> bool:
            nonlocal by_shape
            by_shape += super().take(line, Attempt())
            return False

    def told() -> str:
        try:
            return repr(read_log(path))
        except UsageError as error:
            return str(error)

    for seed in range(rounds):
        rng = random.Random(seed)
        data = rng.choice(LOGS).encode()
        for _ in range(rng.choice((0, 1, 1, 3))):
            data = mutated(data, rng)
        if rng.random() < 0.4:
            rows = [*data.split(b"\n"), *map(str.encode, OTHERS)]
            rng.shuffle(rows)
            data = b"\n".join(rows)
        path.write_bytes(data)
        quick = told()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("penstock.scaling.sources.slurm_log.Shapes", InFull)
            assert told() == quick, seed
    assert by_shape > 60 * rounds, "most lines share their shape with an earlier one"


def test_what_an_attempt_keeps_is_bounded(tmp_path, monkeypatch) -> None:
    for name, most in (("MOST_READINGS", 8), ("MOST_EPOCHS", 2), ("MOST_RANKS", 3)):
        monkeypatch.setattr(gpu_readings if name == "MOST_READINGS" else attempt, name, most)
    text = "Max epochs: 3\n" + "".join(f"word {n} {'x' * n}: 5\n" for n in range(99))
    text += "".join(f"{n}, {n % 100} %, 41 %, 55\n" for n in range(1000))
    text += "".join(
        f"Epoch {n}: 100%|█| 5/5 [00:01<00:00, 9.0it/s, val_loss={n}.5, val_acc=0.5]\n"
        for n in (0, 1, 1, 2, 3)
    )
    text += "".join(f"Total training time: {n + 1} seconds\n" for n in range(9))
    (run,) = read_text(tmp_path, text)
    assert run.rank_seconds == (1, 2, 9) and run.seconds == 9
    assert run.utilisation == tuple(range(8))
    assert run.scores["val_loss"] == ((1, 0.5), (2, 1.5)) and run.val_loss == 0.5


def test_shapes_are_bounded() -> None:
    shapes = Shapes()
    for n in range(MOST + 5):
        shapes.learn(b"x" * (n % 500) + b"y" * (n // 500), kept=False)
    assert len(shapes._known) <= MOST
    shapes.learn(b"z" * 600, kept=False)
    assert not shapes.take(b"z" * 600, Attempt())


def test_a_compressed_log_is_read_and_a_damaged_one_is_refused(tmp_path) -> None:
    text = LOGS[1].encode()
    (plain, packed) = (tmp_path / name for name in ("slurm-5.out", "slurm-6.out.gz"))
    plain.write_bytes(text)
    packed.write_bytes(gzip.compress(text))
    (tmp_path / "slurm-6.err.gz").write_bytes(gzip.compress(b"DUE TO TIME LIMIT\n"))
    one, other = read_log(plain), read_log(packed)
    assert [run.source for run in other] == [str(packed)] * 2
    assert [run.epochs for run in one] == [run.epochs for run in other]
    packed.write_bytes(gzip.compress(b"Max epochs: 3\n"))
    (alone,) = read_log(packed)
    assert (alone.job, alone.name, alone.status) == ("6", "slurm-6", "timeout")
    whole = gzip.compress(random.Random(0).randbytes(9999))
    for damaged in (whole[:5000], whole[:5000] + b"\0" * 99 + whole[5099:], b"no gzip"):
        packed.write_bytes(damaged)
        with pytest.raises(UsageError, match=r"slurm-6.out.gz cannot be read"):
            read_log(packed)
