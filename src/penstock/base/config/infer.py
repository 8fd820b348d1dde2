"""The knobs of ``penstock infer`` and ``penstock plan``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from .knobs import (
    Bytes,
    Knobs,
    Names,
    Natural,
    NetworkKnobs,
    PerAxis,
    Positive,
    Selection,
    Shape,
    flag,
    folder_place,
    many,
)
from .run_labels import Labels
from .sharing import Sampled
from .voxel_size import VoxelSize


def _model(value: object) -> object:
    """The text of a path; refuses what is neither text, a module nor a function."""
    if isinstance(value, Path):
        return str(value)
    if not isinstance(value, str) and not callable(value):
        raise ValueError(f"{value!r} is neither a name, a reference or a file, nor a module")
    return value


def _off(value: object) -> object:
    """``none`` for ``--normalize false``, and for ``false`` in YAML."""
    return "none" if value is False or str(value).lower() == "false" else value


def _single(value: object) -> object:
    """``auto`` for a list of it, as a command line gives it."""
    return "auto" if value in (["auto"], ("auto",)) else value


def _automatic(value: object) -> object:
    """None for ``auto``."""
    return None if _single(value) == "auto" else value


def _spelled(value: object) -> object:
    """``true`` and ``false`` of YAML and Python, spelled as on a command line."""
    return str(value).lower() if isinstance(value, bool) else value


Normalize = Literal["percentile", "global", "zscore", "zscore-nonzero", "fixed", "none"]
HeadKind = Literal["intensity", "scores", "labels"]
_Limit = Annotated[float, Field(allow_inf_nan=True)]
"""A side may have no limit."""
HEAD_KINDS: tuple[HeadKind, ...] = ("intensity", "scores", "labels")


def _head_kinds(value: object) -> object:
    """Kinds, or NAME=KIND; in YAML and Python also a mapping of names to kinds."""
    if isinstance(value, Mapping):
        value = [f"{name}={kind}" for name, kind in value.items()]
    words = many(value)
    assert isinstance(words, list | tuple)
    for word in words:
        if str(word).rpartition("=")[2] not in HEAD_KINDS:
            raise ValueError(f"{word!r} is not {', '.join(HEAD_KINDS)}, or NAME=KIND")
    if len({"=" in str(word) for word in words}) > 1:
        raise ValueError("give a kind for each head, or NAME=KIND for some, and not both")
    return words


class Valued(Sampled):
    """The knobs of values: how they are scaled for the network, and what its heads become."""

    floats_are: ClassVar[HeadKind] = "intensity"
    """The kind of a head of floats of which nobody says anything."""

    normalize: Annotated[Normalize | None, BeforeValidator(_off)] = flag(
        None,
        help="global: percentiles of the whole volume; percentile: those of each block, which "
        "change with --block; zscore: mean and deviation of the whole volume, or of "
        "what is not 0 in it; fixed: two intensities (default: what the model says, else global; "
        "percentile where --halo is given)",
    )
    norm_lower: float = flag(0.5, help="lower percentile, or intensity")
    norm_upper: float = flag(99.9, help="upper percentile, or intensity")
    halo: PerAxis | None = flag(
        None,
        help="voxels around a block that count in its own percentiles, at most overlap // 2 "
        "(default: --trim-voxels)",
        unit="voxels",
        group="values",
    )
    norm_level: Natural | None = flag(
        None, help="take global percentiles from this level of an OME-Zarr pyramid", group="values"
    )
    eps: Annotated[float, Field(gt=0)] | None = flag(
        None,
        help="least range to divide values by (default: where the two percentiles are equal, "
        "the range of the data)",
        group="values",
    )
    clip_norm: tuple[_Limit, _Limit] | tuple[()] | None = flag(
        None,
        help="clip normalised values to LO HI; without numbers to 0 1 (default: no clipping)",
        group="values",
    )
    head_kind: (
        Annotated[tuple[HeadKind | str, ...], BeforeValidator(_head_kinds), Field(min_length=1)]
        | None
    ) = flag(
        None,
        help="kind of the model's heads: one for all, one for each, or NAME=KIND. intensity: "
        "denormalised, blended, in the input's dtype; scores (probabilities, logits): blended, "
        "never denormalised, float32; labels (classes, masks, objects): neither denormalised nor "
        "blended, in the model's integers (default: integers are labels, floats intensity; floats "
        "that look like probabilities are refused until their kind is given)",
        group="values",
    )
    denormalize: bool = flag(
        True,
        help="undo the normalisation of heads that are intensity",
        alias="--no-output-denormalize",
        const=False,
        group="values",
    )
    reduce: str | None = flag(
        None,
        help="write less than all scores, once patches are joined: argmax (the channel of the "
        "highest score), threshold:X (1 above X), or top:K (two outputs: the K best channels and "
        "their scores)",
        group="values",
    )
    tta: Literal["flips", "rotations"] | None = flag(
        None,
        help="write the mean over mirrored inputs (4 in 2-D, 8 in 3-D), or over 4 turns in the "
        "plane of y and x",
        group="values",
    )
    out_dtype: Names | None = flag(
        None,
        help="dtype of a new output, or of each (default: the input's for intensity, float32 for "
        "scores, the model's integers for labels)",
        group="values",
    )
    missing: Literal["fill", "error"] = flag(
        "fill",
        help="what an absent chunk of the input is: its fill value, counted in the summary, or an "
        "error",
        group="input and model",
    )

    @property
    def asked_normalization(self) -> Normalize | None:
        """The normalisation that the settings ask for; None if the network may choose.

        A halo alone asks for percentiles of each block: nothing else uses it, and the seed knew no
        other normalisation.
        """
        return self.normalize or (None if self.halo is None else "percentile")

    @model_validator(mode="after")
    def _goes_together(self) -> Valued:
        if self.reduce is not None and set(self.head_kind or ()) - {"scores"}:
            raise ValueError("--reduce takes scores and decides what becomes of them, so leave out "
                             "--head-kind")  # fmt: skip
        lower, upper = self.norm_lower, self.norm_upper
        if not lower < upper:
            raise ValueError(f"--norm-lower {lower} must be less than --norm-upper {upper}")
        if self.asked_normalization in (None, "global") and not 0 <= lower < 50 < upper <= 100:
            raise ValueError(
                f"--normalize global --norm-lower {lower:g} --norm-upper {upper:g}: here global, "
                "the default, takes two percentiles of the whole volume, one below 50 and one "
                "above; aind_torch_utils means two intensities that values are clipped to: "
                f"--normalize fixed --norm-lower {lower:g} --norm-upper {upper:g} --clip-norm 0 1"
            )
        if self.asked_normalization == "percentile" and not 0 <= lower < upper <= 100:
            raise ValueError(
                f"--norm-lower {lower} and --norm-upper {upper} must be percentiles from 0 to 100"
            )
        if self.clip_norm and not self.clip_norm[0] < self.clip_norm[1]:
            low, high = self.clip_norm
            raise ValueError(f"--clip-norm {low} must be less than {high}")
        return self


class InferConfig(Valued, NetworkKnobs, VoxelSize, Labels):
    """The knobs of ``penstock infer`` and `penstock.run_inference`."""

    # what
    in_spec: Any = flag(help="input: TensorStore JSON (inline or a file), a path or a URL")
    out_spec: Annotated[tuple[Any, ...], BeforeValidator(many), Field(min_length=1)] = flag(
        help="output, in the same forms; one for each head of the model"
    )
    model_type: Annotated[Any, BeforeValidator(_model)] = flag(
        help="model: a name, module:function, file.py:function, .pt2, TorchScript, .onnx, a package"
    )
    t: Selection = flag(
        ("all",), help="time points: all, 0, 0:5 or several", group="input and model"
    )
    c: Selection = flag(
        ("all",), help="channels: all, 0, 0:2, names or several", group="input and model"
    )

    # geometry
    patch: Annotated[Shape | Literal["auto"] | None, BeforeValidator(_single)] = flag(
        None,
        help="shape that the model sees: one number, z y x, or y x (2-D); auto: what computes "
        "least and fits into memory (default: a chunk and its halo, or 64)",
        unit="voxels",
    )
    overlap: Annotated[PerAxis | None, BeforeValidator(_automatic)] = flag(
        None,
        help="voxels that neighbouring patches share (default: auto, the least at which no seam is "
        "left; else 10)",
        unit="voxels",
    )
    block: Shape | None = flag(
        None,
        help="shape of a block: whole chunks of the output, written once (default: fitted)",
        unit="voxels",
        group="patches and seams",
    )
    batch: Positive | Literal["auto"] | None = flag(
        None,
        help="patches of one forward, or auto (default: on a GPU 16 of 64 cubed, on a CPU 2)",
    )
    seam_mode: Literal["trim", "blend"] = flag(
        "trim",
        help="trim: each voxel from one patch; blend: a weighted mean of all that cover it",
        group="patches and seams",
    )
    trim_voxels: Natural | None = flag(
        None,
        help="least voxels to cut from each face of a patch. Seams lie in the middle of the "
        "overlap, which cuts overlap // 2; more than that is refused (default: overlap // 2)",
        unit="voxels",
        group="patches and seams",
    )
    window: Literal["cosine", "gaussian", "constant"] | None = flag(
        None,
        help="weights of a patch with --seam-mode blend: a cosine over the overlap, a Gaussian of "
        "an eighth of the patch, or all equal (default: what the model says, else cosine)",
        group="patches and seams",
    )
    min_blend_weight: Annotated[float, Field(gt=0, le=1)] = flag(
        0.05,
        help="least weight of a voxel, before weights are scaled to add up to one",
        group="patches and seams",
    )

    # devices
    devices: Annotated[tuple[str, ...], BeforeValidator(many)] = flag(
        ("auto",), help="auto, cpu, mps, cuda:0 cuda:1 ..."
    )
    amp: Literal["auto", "fp16", "bf16", "off"] = flag(
        "auto",
        help="autocast; auto: fp16 on CUDA where values are normalised, else off",
        alias="--no-amp",
        const="off",
        group="arithmetic",
    )
    tf32: bool = flag(False, help="let CUDA use TF32 in float32 arithmetic", group="arithmetic")
    compile: bool = flag(False, help="torch.compile the model", group="arithmetic")
    compile_dynamic: Annotated[Literal["auto", "true", "false"], BeforeValidator(_spelled)] = flag(
        "false",
        help="shapes of torch.compile: false: fixed, since all batches have one shape; true: any; "
        "auto: fixed until one changes",
        alias="--no-compile-dynamic",
        const="false",
        group="arithmetic",
    )
    threads: Positive | None = flag(
        None, help="threads of torch on the CPU (default: torch's own)", group="arithmetic"
    )

    # flow
    prep_workers: Positive = flag(
        4, help="threads that read, for all devices together", group="queues"
    )
    writer_workers: Positive = flag(4, help="threads that write", group="queues")
    max_inflight_batches: Positive | None = flag(
        None,
        help="most batches between reading and writing (default: as memory allows)",
        group="queues",
    )

    # output and records
    ome_zarr: Literal["0.4", "0.5"] | None = flag(
        None,
        help="version of OME-Zarr; 0.6 is not written, as ome-zarr-py 0.18 and Neuroglancer 2.41 "
        "do not read it (default: 0.4 where the input is that and unsharded, else 0.5)",
        group="a new output",
    )
    plain: bool = flag(
        False,
        help="write a .zarr as an array alone (Zarr v3), without group, levels and scale",
        group="a new output",
    )

    @model_validator(mode="after")
    def _group(self) -> InferConfig:
        if self.plain and self.ome_zarr is not None:
            raise ValueError("--plain writes no OME-Zarr; leave --ome-zarr or --plain out")
        return self

    @property
    def sides(self) -> tuple[int, ...] | None:
        """The patch in numbers; None as long as there are none."""
        return None if isinstance(self.patch, str) else self.patch


class DecodedConfig(InferConfig):
    """A job whose output a decoder reads: floats of an unknown kind are taken as they are, since on
    the scale and in the dtype of the input nothing of distances or flows would be left."""

    floats_are: ClassVar[HeadKind] = "scores"


def _rate(value: object) -> object:
    """Voxels per second, or the folder of a run that measured them."""
    try:
        rate = float(str(value))
    except ValueError:
        return folder_place(value)
    if not 0 < rate < math.inf:
        raise ValueError(f"{value} is not a number of voxels per second above 0")
    return rate


class ScaleConfig(Knobs):
    """The knobs of ``penstock plan`` that describe workers and store."""

    rate: Annotated[float | Path | str, BeforeValidator(_rate)] | None = flag(
        None,
        help="voxels per second of one worker, or the run folder of an infer that measured them",
    )
    bandwidth: Annotated[Bytes, Field(ge=1)] | None = flag(
        None,
        help="bytes per second that the store serves to all workers together, such as 20GB "
        "(default: more than they need)",
        unit="bytes a second",
    )
