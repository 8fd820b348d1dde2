"""The knobs of ``penstock label``, and of the decoders that are built in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from .knobs import (
    Knobs,
    Natural,
    Positive,
    Shape,
    as_number,
    build,
    check_file,
    flag,
    many,
)
from .run_labels import pairs_of
from .sharing import Stepwise

LabelDtype = Literal["uint8", "uint16", "uint32", "uint64"]


def _numbers(value: object) -> object:
    """The numbers in ``1,2,2``."""
    return value.split(",") if isinstance(value, str) else many(value)


def _offsets(value: object) -> object:
    """The offsets in ``-1,0,0/0,-1,0``."""
    return value.split("/") if isinstance(value, str) else value


Sizes = Annotated[
    tuple[Annotated[float, Field(gt=0)], ...],
    BeforeValidator(_numbers),
    Field(min_length=2, max_length=3),
]
Offset = Annotated[tuple[int, ...], BeforeValidator(_numbers), Field(min_length=2, max_length=3)]


class StarKnobs(Knobs):
    """The options of ``--decoder stardist``."""

    model: Path | None = flag(
        None, help="folder of a StarDist model, which says rays, grid and thresholds"
    )
    nms: Annotated[float, Field(ge=0, le=1)] | None = flag(
        None, help="overlap above which the less likely of two objects goes (default: 0.4)"
    )
    anisotropy: Sizes | None = flag(
        None, help="of the golden spiral along which distances z y x are given without a model"
    )
    grid: Annotated[tuple[Positive, ...], BeforeValidator(_numbers)] = flag(
        (1, 1, 1), help="voxels of the image for one of the scores, z y x"
    )


class FlowKnobs(Knobs):
    """The options of ``--decoder cellpose``."""

    niter: Positive = flag(200, help="steps along the flows")
    flow_threshold: Annotated[float, Field(ge=0)] = flag(
        0.4, help="in a plane: the most that the flows of an object may err; 0 for any"
    )


class AffinityKnobs(Knobs):
    """The options of ``--decoder affinities``."""

    offsets: Annotated[tuple[Offset, ...], BeforeValidator(_offsets)] = flag(
        help="the neighbour that each channel is about, z y x: those by faces come first"
    )
    strides: Annotated[tuple[Positive, ...], BeforeValidator(_numbers)] | None = flag(
        None, help="take other neighbours at every so many voxels, z y x"
    )


DECODERS: Mapping[str, type[Knobs]] = {
    "watershed": Knobs,
    "stardist": StarKnobs,
    "cellpose": FlowKnobs,
    "affinities": AffinityKnobs,
}
"""The decoders that are built in."""


def decoder_knobs(decoder: str, options: Mapping[str, Any]) -> Knobs:
    """The options of a decoder.

    Args:
        decoder: Its name, or ``FILE.py:FUNCTION``, which has none.
        options: Texts by name.

    Returns:
        The options, of the class in `DECODERS`.

    Raises:
        UsageError: An option is wrong, or there is none of that name.
    """
    kind = DECODERS.get(decoder, Knobs)
    check_file(kind, options, f"--decoder-option of {decoder}", whole=True)
    return build(kind, options)


class ObjectKnobs(Knobs):
    """The knobs that say what an object is; those of ``label``, and of ``infer --instances``."""

    threshold: float | None = flag(None, help="label what is above this value, such as a score")
    seed_threshold: float | None = flag(
        None,
        help="for --decoder watershed: a seed is what is above this",
        group="objects of a decoder",
    )
    connectivity: Annotated[Literal[4, 8, 6, 18, 26], BeforeValidator(as_number)] | None = flag(
        None,
        help="voxels that are neighbours: 4 or 8 in a plane, 6, 18 or 26 in a volume (default: 4 "
        "or 6, those that share a face)",
    )
    decoder_option: Annotated[Mapping[str, Any], BeforeValidator(pairs_of)] = flag(
        {},
        help="KEY=VALUE, a setting of the decoder, once for each; stardist: model, nms, grid, "
        "anisotropy; cellpose: niter, flow_threshold; affinities: offsets, strides",
        group="objects of a decoder",
    )
    object_size: Shape | None = flag(
        None,
        help="longest side of an object in voxels, z y x: the decoder sees each block with so "
        "large a halo",
        group="objects of a decoder",
    )
    instance_block: Shape | None = flag(
        None,
        help="voxels z y x that a decoder labels at a time, without the halo; the objects depend "
        "on it (default: 128, or 4 times --object-size if that is more)",
        group="objects of a decoder",
    )
    join: Annotated[float, Field(gt=0, le=1)] = flag(
        0.5,
        help="the least overlap by which two blocks see the same object",
        unit="a share",
        group="objects of a decoder",
    )
    join_rule: Literal["iou", "overlap", "touch", "owner"] = flag(
        "iou",
        help="the overlap of two views of an object: of their union; of the smaller one; any; or "
        "none, and each block keeps those whose centroid it holds",
        group="objects of a decoder",
    )
    min_size: Positive = flag(1, help="the fewest voxels of an object that stays")
    clear_border: bool = flag(False, help="leave out objects that touch a face of the volume")
    table: Path | None = flag(None, help="write a row for each object: *.parquet, or *.csv")


class InstanceConfig(ObjectKnobs):
    """The knobs of ``penstock infer --instances``."""

    instances: str | None = flag(
        None,
        help="write numbered objects instead of scores: by components, watershed, stardist, "
        "cellpose, affinities, or your FILE.py:FUNCTION; see penstock label --decoder",
        group="objects",
    )


class LabelConfig(ObjectKnobs, Stepwise):
    """The knobs of ``penstock label``."""

    in_spec: Any = flag(help="the array: a path, URL or spec")
    out_spec: Any = flag(help="the labels: an OME-Zarr, or any spec")
    equal: bool | None = flag(
        None,
        help="each object is of one value; --no-equal: of all values but 0 (default: as the dtype "
        "says: bool and uint8 hold a mask, other integers hold labels)",
    )
    decoder: str | None = flag(
        None,
        help="what makes objects of scores: components, watershed, stardist, cellpose, affinities, "
        "or your FILE.py:FUNCTION, which takes an array c z y x and gives labels z y x (default: "
        "components)",
    )
    nan_background: bool = flag(
        False,
        help="take a score that is NaN for background, and do not refuse it",
        group="input and model",
    )
    fill_holes: bool = flag(
        False,
        help="fill the background that objects enclose: it touches no face of the volume, by the "
        "connectivity that complements theirs",
    )
    intensity: Any | None = flag(
        None, help="for the table: an image of the same voxels, for the mean and maximum of objects"
    )
    channels: Annotated[tuple[Natural, ...], BeforeValidator(many)] | None = flag(
        None, help="the channels of --intensity (default: all)"
    )
    dtype: LabelDtype | None = flag(
        None,
        help="dtype of the output (default: the smallest that holds the number of objects)",
        group="a new output",
    )
    block: Shape | None = flag(
        None,
        help="voxels that a worker labels at a time, z y x, in whole chunks of the output "
        "(default: about 8 million); the result does not depend on it",
        group="how the work is done",
    )
    workers: Positive | None = flag(
        None,
        help="processes of this machine that label (default: one for each core)",
        group="how the work is done",
    )
    run_dir: Path | None = flag(
        None,
        help="folder of the run's records (default: OUT.penstock beside OUT)",
        group="how the work is done",
    )

    @property
    def decodes(self) -> bool:
        """Whether objects are made by a decoder, block by block, and not by components."""
        return self.decoder not in (None, "components")

    @property
    def rounds(self) -> list[str]:
        """The names of the rounds, in each of which every block is done once."""
        first = "decode" if self.decodes else "fill" if self.fill_holes else None
        return [first, "count", "write"] if first else ["count", "write"]

    @property
    def decoder_knobs(self) -> Any:
        """The options of the decoder, of its class in `DECODERS`."""
        return decoder_knobs(str(self.decoder), self.decoder_option)

    @model_validator(mode="after")
    def _can_decode(self) -> LabelConfig:
        name = self.decoder or "components"
        if self.decodes and name not in DECODERS and ":" not in name:
            raise ValueError(
                f"--decoder {name}: give components, {', '.join(DECODERS)} or FILE.py:FUNCTION"
            )
        options = decoder_knobs(name, self.decoder_option)
        if name == "watershed" and None in (self.threshold, self.seed_threshold):
            raise ValueError("--decoder watershed needs --threshold X and --seed-threshold Y")
        if self.threshold is None and isinstance(options, StarKnobs) and options.model is None:
            raise ValueError(
                "--decoder stardist needs --threshold X, the least probability of an object, or "
                "--decoder-option model=FOLDER, the folder of a model"
            )
        if self.decodes and self.object_size is None:
            raise ValueError(
                f"--decoder {name} needs --object-size N: the longest side of an object, in "
                "voxels, which is the halo of a block"
            )
        return self

    @model_validator(mode="after")
    def _has_effect(self) -> LabelConfig:
        """Refuse what would change nothing."""
        by = f"with --decoder {self.decoder}" if self.decodes else "with components"
        takes_threshold = not self.decodes or self.decoder in DECODERS
        for names, is_idle, where in (
            ("object_size instance_block join join_rule", not self.decodes, by),
            ("seed_threshold", self.decoder != "watershed", by),
            ("threshold", not takes_threshold, by),
            ("fill_holes equal", self.decodes, by),
            ("intensity", self.table is None, "without --table"),
            ("channels", self.intensity is None, "without --intensity"),
        ):
            for name in names.split():
                if is_idle and getattr(self, name) != LabelConfig.model_fields[name].default:
                    raise ValueError(f"--{name.replace('_', '-')} has no effect {where}")
        return self

    @model_validator(mode="after")
    def _fits(self) -> LabelConfig:
        if self.threshold is not None and self.equal:
            raise ValueError("--threshold makes a mask and --equal takes labels; give one")
        if self.table is not None and self.table.suffix not in (".parquet", ".csv"):
            raise ValueError(f"--table {self.table}: give a name that ends in .parquet or .csv")
        return self
