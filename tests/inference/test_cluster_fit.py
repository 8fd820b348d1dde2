"""Which workers of a cluster take part in a job, and what the client need not load."""

from __future__ import annotations

import io
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.base.config.infer import InferConfig
from penstock.base.config.knobs import build
from penstock.inference.sharing import station

from ..house import HEAVY
from .cluster_kit import QUICK, WORDS, place

__all__ = ["place"]  # fixtures

distributed = pytest.importorskip("distributed")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


class Loads(pickle.Unpickler):
    """Reads a pickle, and lists the packages that it needs."""

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        self.packages: set[str] = set()

    def find_class(self, module: str, name: str) -> Any:
        self.packages.add(module.partition(".")[0])
        return super().find_class(module, name)


def test_what_a_worker_tells_of_a_job_that_it_has_opened_needs_no_torch() -> None:
    knobs = {"in_spec": "in.npy", "out_spec": "out.zarr", "model_type": "identity", "workers": 2}
    opened = station.open_task((build(InferConfig, knobs), 1, ""), 0)
    loads = Loads(pickle.dumps(opened))
    assert loads.load().maker == opened.maker
    assert "penstock" in loads.packages and not loads.packages & {*HEAVY}


@pytest.mark.slow
def test_the_client_of_a_cluster_does_not_import_torch() -> None:
    words = ["infer", *WORDS, *QUICK, "--out-spec", "out.zarr", "--cluster", "local:1"]
    code = (
        "import sys; from penstock.cli import main; code = main(sys.argv[1:]); "
        "sys.exit(code or 'torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, *words], check=True)
    assert [*Path("out.zarr.penstock").glob("done-*.log")]
