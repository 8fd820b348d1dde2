"""Lightning trains from the loader, and what it resumes gets the data of a run never stopped."""

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.base.errors import MissingDependency, UsageError
from penstock.loading.loader import Loader

from ..parameters import mainly
from .kit import write

pytestmark = pytest.mark.filterwarnings("ignore")

SAMPLES, EPOCHS = 12, 2


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    values = np.arange(1, SAMPLES * 4 + 1, dtype=np.float32).reshape(SAMPLES, 4)
    return write(tmp_path_factory.mktemp("data") / "a.zarr", values, (1, 4))


def open_loader(data: Path, **knobs: Any) -> Loader:
    return Loader(data, **{"batch_size": 3, "shuffle": "sample", "seed": 4, **knobs})


def make_net() -> Any:
    """A net that keeps the first value of every row it is trained on in ``seen``."""
    torch = pytest.importorskip("torch")
    # What Lightning imports of torchvision loads after this.
    from penstock.models import import_torchvision

    with contextlib.suppress(MissingDependency):
        import_torchvision()
    lightning = pytest.importorskip("pytorch_lightning")

    class Net(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 1)
            self.seen: list[list[float]] = []

        def training_step(self, batch: dict[str, Any], index: int) -> Any:
            self.seen.append(batch["data"][:, 0].tolist())
            return self.linear(batch["data"] * 1e-6).square().mean()

        def validation_step(self, batch: dict[str, Any], index: int) -> None:
            assert batch["data"].shape[1] == 4

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    return Net()


def fit(folder: Path, train: Any, validation: Any = None, save: Any = None, **how: Any) -> Any:
    """The net after a training."""
    net, ckpt = make_net(), how.pop("ckpt_path", None)
    import pytorch_lightning as lightning

    callbacks = []
    if save is not None:
        every = {"dirpath": folder / "saved", "save_top_k": -1, "filename": "{step:03d}"}
        callbacks = [lightning.callbacks.ModelCheckpoint(**every, **save)]
    trainer = lightning.Trainer(
        **{"max_epochs": EPOCHS, **how}, accelerator="cpu", logger=False, callbacks=callbacks,
        enable_checkpointing=bool(callbacks), enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(net, train, validation, ckpt_path=ckpt)
    return net


def epochs(data: Path, count: int, batches: int | None = None) -> list[list[float]]:
    """What a run that is never stopped sees."""
    with open_loader(data) as loader:
        whole = [[b["data"][:, 0].tolist() for b in loader][:batches] for _ in range(count)]
    return [batch for epoch in whole for batch in epoch]


RUNS: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "third-step-and-validation": ({"val_check_interval": 2}, {"every_n_train_steps": 3}, True),
    "each-epoch": ({}, {"every_n_epochs": 1, "save_on_train_epoch_end": True}, False),
    "part-of-an-epoch": ({"limit_train_batches": 3}, {"every_n_train_steps": 1}, False),
}


@pytest.mark.slow
@pytest.mark.parametrize("run", mainly([*RUNS], 1))
def test_a_run_goes_on_from_any_checkpoint(run: str, data: Path, tmp_path) -> None:
    how, save, validated = RUNS[run]

    def validation() -> Any:
        return open_loader(data).as_torch() if validated else None

    expected = epochs(data, EPOCHS, how.get("limit_train_batches"))
    with open_loader(data) as loader:
        assert fit(tmp_path, loader.as_torch(), validation(), save, **how).seen == expected
    checkpoints = sorted((tmp_path / "saved").iterdir())
    assert len(checkpoints) >= EPOCHS
    for path in checkpoints:
        step = int(path.stem.partition("=")[2])
        with open_loader(data, workers=2) as loader:
            net = fit(tmp_path, loader.as_torch(), validation(), ckpt_path=path, **how)
        assert net.seen == expected[step:], path.name


@pytest.mark.slow
def test_a_dataloader_around_it_has_no_state_and_is_refused(data: Path, tmp_path) -> None:
    torch = pytest.importorskip("torch")

    def wrapped(loader: Loader) -> Any:
        return torch.utils.data.DataLoader(loader.as_torch(), batch_size=None, num_workers=0)

    with open_loader(data) as loader, pytest.raises(UsageError, match="without a DataLoader"):
        fit(tmp_path, wrapped(loader))
    with open_loader(data) as loader, open_loader(data) as other:  # there is no place to lose
        assert len(fit(tmp_path, loader.as_torch(), wrapped(other), max_epochs=1).seen) == 4


def test_an_epoch_that_is_set_before_the_first_batch_is_the_one_that_comes(data: Path) -> None:
    """Lightning asks for the iterator first."""
    expected = epochs(data, 2)
    with open_loader(data) as loader:
        dataset = loader.as_torch()
        batches = iter(dataset)
        dataset.set_epoch(1)
        assert [b["data"][:, 0].tolist() for b in batches] == expected[4:]
