"""The knobs of ``penstock verify``."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from .knobs import Fraction, Natural, Overwriting, Place, Positive, Seconds, flag, many


class VerifyConfig(Overwriting):
    """The knobs of ``penstock verify``."""

    run_dir: Place | None = flag(
        None, help="run folder of the output, or its URL (default: the one that infer would take)"
    )
    readers: Positive = flag(4, help="threads that read")
    retry_for: Seconds = flag(
        900.0,
        help="how long a store may fail without a success, by faults that may pass "
        "(default: 15min)",
    )
    model: str | None = flag(
        None,
        help="the model of the run, named again as for infer: one that only the run folder names "
        "is not loaded, as it may run code (default: the run's, if it is one of Penstock's own)",
    )
    trust_model: bool = flag(
        False, help="load the model that the run folder names, and files that may run any code"
    )
    recompute: Annotated[Fraction, Field(le=1)] | None = flag(
        None, help="share of the blocks, such as 1%, to compute anew from the input and compare"
    )
    seed: Natural = flag(0, help="seed that picks the blocks of --recompute")
    devices: Annotated[tuple[str, ...], BeforeValidator(many)] | None = flag(
        None, help="devices to compute on, as for infer (default: those of the run)"
    )
    forget: bool = flag(
        False,
        help="take missing and damaged blocks off the run's list, so that infer --resume computes "
        "them again, as for a run of objects in Python; else see penstock repair",
    )
