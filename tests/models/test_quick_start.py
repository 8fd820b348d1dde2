"""What opens a network for a job starts without torch's compiler."""

from ..preloaded import started

_QUICK = """
import sys
from torch import nn
from penstock.models import load_model, measure_footprint
from penstock.models.probes import find_reach
shapes = {"denoise-tiny": (2, 1, 32, 32, 32), "prithvi-refiner-tiny": (2, 6, 32, 32)}
for name, shape in shapes.items():
    assert measure_footprint(load_model(name), shape).peak_bytes
assert find_reach(load_model(nn.Conv2d(1, 1, 3, padding=1)), 2).places
print([name for name in ("sympy", "torch._dynamo") if name in sys.modules])
"""


def test_neither_a_footprint_nor_a_reach_imports_the_compiler(tmp_path) -> None:
    started(tmp_path, code=_QUICK).join()
    assert (tmp_path / "said").read_text() == "[]\n"
