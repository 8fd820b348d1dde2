"""The knobs of training, those of each workload, and those of the suite."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from .knobs import TRUST_MODEL, Knobs, Natural, Positive, Tile, Trackers, flag, many
from .run_labels import Labels
from .sharing import OnWorkers

TargetKind = Literal["intensity", "mask", "labels", "probabilities"]
Loss = Literal["mse", "l1", "bce", "dice", "ce"]


class DetectorData(Knobs):
    """The knobs that name the data of the detector."""

    train_data_root: Path | None = flag(
        None,
        help="training data: a packed data set (emulator), or the scenes that the chips were cut "
        "from, which is checked (detector)",
    )
    val_data_root: Path | None = flag(
        None,
        help="validation data: scenes, beside which shorelines lie (detector), or a packed data "
        "set (emulator)",
    )
    train_label_file: Path | None = flag(
        None, help="label CSV of the training scenes, checked against the chips (detector)"
    )
    val_label_file: Path | None = flag(
        None, help="label CSV of the validation scenes, likewise (detector)"
    )
    train_chips_path: Path | None = flag(
        None, help="chips of the training scenes, made by penstock preprocess (detector)"
    )
    val_chips_path: Path | None = flag(None, help="chips of the validation scenes (detector)")


class PairsData(Knobs):
    """The knobs that name and read the arrays of pairs."""

    in_spec: Any = flag(None, help="input array, as infer takes it (pairs)", group="pairs")
    target_spec: Any = flag(None, help="target array of the same extent (pairs)", group="pairs")
    axes: str | None = flag(
        None, help="axes of both arrays as stored, such as tyx, as for infer (pairs)", group="pairs"
    )
    series: Natural | None = flag(
        None,
        help="image to take of files or groups that hold several, as for infer (pairs)",
        group="pairs",
    )
    raw: bool = flag(
        False,
        help="read numbers as they are stored, whatever attributes say, as for infer (pairs)",
        group="pairs",
    )
    target_kind: TargetKind | None = flag(
        None,
        help="what the target holds (pairs; default: found from its values and said): an image, "
        "two values, class numbers, or floats from 0 to 1",
        group="pairs",
    )
    loss: Loss | None = flag(
        None,
        help="the loss (pairs; default: mse for intensity, bce for a mask or probabilities, ce for "
        "labels)",
        group="pairs",
    )


class TrainConfig(DetectorData, PairsData, Labels):
    """The knobs of ``penstock train``. A workload's own defaults stand in `TRAIN_DEFAULTS`."""

    output_dir: Path = flag(Path("outputs"), help="folder of results and checkpoints")

    # the run
    epochs: Positive = flag(10, help="passes over the training data")
    batch_size: Positive = flag(8, help="samples of a batch on each device")
    grad_accum_steps: Positive = flag(
        1,
        help="batches whose gradients are summed for one step of the optimiser",
        group="optimiser",
    )
    learning_rate: Annotated[float, Field(gt=0)] = flag(0.005, help="the optimiser's learning rate")
    optimizer: Literal["sgd", "adam"] = flag(
        "sgd", help="sgd with a momentum of 0.9, or adam", group="optimiser"
    )
    weight_decay: Annotated[float, Field(ge=0)] = flag(
        5e-4, help="weight decay of the optimiser", group="optimiser"
    )
    schedule: Literal["constant", "cosine", "step"] = flag(
        "step",
        help="learning rate: constant; cosine: falls to zero; step: a tenth every 3 epochs",
        group="optimiser",
    )
    warmup_steps: Natural = flag(
        0, help="steps in which the learning rate rises linearly", group="optimiser"
    )
    clip_norm: Annotated[float, Field(gt=0, allow_inf_nan=True)] | None = flag(
        None,
        help="largest norm of the gradient of all weights (default: no limit)",
        group="optimiser",
    )
    max_steps: Positive | None = flag(
        None, help="end after this many steps, whatever --epochs says"
    )
    seed: Natural = flag(0, help="seed of weights, order and augmentation")
    weights: Path | None = flag(None, help="weights to begin with: safetensors, or a torch file")

    # input
    num_workers: Natural = flag(4, help="processes that make batches (threads for the emulator)")
    prefetch_factor: Positive | None = flag(
        None, help="batches that each worker makes ahead (default: 2)", group="input"
    )

    # devices
    device: Literal["auto", "cpu", "cuda", "mps"] = flag("auto", help="where to train")
    distributed: bool = flag(
        False, help="train on all ranks that torchrun or SLURM started, or on all local devices"
    )
    amp: bool = flag(False, help="mixed precision: fp16 with a scaler on CUDA, bf16 elsewhere")
    dtype: Literal["float32", "bfloat16", "float16"] = flag(
        "float32", help="dtype of weights and input (pairs)", group="arithmetic"
    )
    checkpointing: bool = flag(
        False, help="recompute activations in the backward pass", group="arithmetic"
    )
    compile: bool = flag(False, help="torch.compile the model", group="arithmetic")
    channels_last: bool = flag(
        False, help="channels-last layout of images and weights", group="arithmetic"
    )
    cudnn_benchmark: bool = flag(
        False, help="let cuDNN time its algorithms first", group="arithmetic"
    )
    tf32: bool = flag(False, help="let CUDA use TF32 in float32 arithmetic", group="arithmetic")
    threads: Positive | None = flag(
        None, help="threads of torch on the CPU (default: torch's own)", group="arithmetic"
    )

    # checkpoints
    checkpoint_every: Positive | None = flag(
        None,
        help="steps between checkpoints within an epoch (default: only at its end)",
        group="checkpoints",
    )
    resume: bool = flag(
        False, help="go on from the last checkpoint in --output-dir; without one, begin"
    )
    overwrite: bool = flag(False, help="replace what an earlier run left in --output-dir")

    # trackers and profile
    track: Trackers = flag(
        (), help="comet, mlflow, tensorboard, wandb: the trackers of the run (default: none)"
    )
    track_every: Positive = flag(
        10, help="steps between two whose values go to the trackers", group="trackers and profile"
    )
    project: str = flag(
        "penstock",
        help="project (Comet, W&B) or experiment (MLflow) of the run",
        group="trackers and profile",
    )
    profile: bool = flag(False, help="record steps with torch's profiler")
    profile_steps: Positive = flag(
        5, help="steps that --profile records, after 5 others", group="trackers and profile"
    )

    # detector
    backbone: Literal["mobilenet", "resnet50"] = flag(
        "resnet50", help="backbone of the feature pyramid (detector)", group="detector"
    )
    background: Annotated[float, Field(ge=0)] = flag(
        0.5, help="chips without objects for each chip with objects (detector)", group="detector"
    )
    score_threshold: Annotated[float, Field(ge=0, le=1)] = flag(
        0.5, help="least score of a detection that counts (detector)", group="detector"
    )
    max_dets: Positive = flag(
        300,
        help="most boxes of a chip that the detector keeps and that AP counts, the surest first; "
        "COCO's own AP counts 100 (detector)",
        group="detector",
    )

    # pairs
    model: str = flag(
        "denoise-net",
        help="a model by name, package.module:function or file.py:function (pairs)",
        group="pairs",
    )
    trust_model: bool = flag(False, help=f"{TRUST_MODEL} (pairs)", group="pairs")
    channels: Positive | None = flag(
        None,
        help="channels that the model takes (pairs; default: those of its first layer)",
        group="pairs",
    )
    tile_size: Tile = flag(
        "64", help="tile of the arrays that the model sees: 64 or 32x64x64 (pairs)", group="pairs"
    )
    normalize: Literal["global", "fixed", "none"] = flag(
        "global",
        help="scale the input by its percentiles (global) or by a range (fixed); an intensity as "
        "target is scaled by its own percentiles, unless none (pairs)",
        group="pairs",
    )
    norm_lower: float = flag(
        0.5, help="lower percentile, or lower intensity when fixed (pairs)", group="pairs"
    )
    norm_upper: float = flag(
        99.9, help="upper percentile, or upper intensity when fixed (pairs)", group="pairs"
    )

    # spiral
    num_samples: Annotated[int, Field(ge=8)] = flag(
        10_000, help="points of the spirals (spiral)", group="spiral"
    )
    noise: Annotated[float, Field(ge=0)] = flag(
        0.05,
        help="standard deviation of the points; at 0.2 no model exceeds 57 % (spiral)",
        group="spiral",
    )
    hidden_dims: Annotated[tuple[Positive, ...], BeforeValidator(many), Field(min_length=1)] = flag(
        (64, 32, 16), help="widths of the hidden layers (spiral)", group="spiral"
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] = flag(
        0.2, help="share of activations dropped out (spiral)", unit="share", group="spiral"
    )

    # emulator
    latent_size: Positive = flag(
        64, help="width of every latent vector (emulator)", group="emulator"
    )
    chunks_per_epoch: Positive | None = flag(
        None,
        help="pieces of an epoch, each read and held in memory whole (emulator; default: read "
        "batch by batch, ahead)",
        group="emulator",
    )
    message_steps: Positive = flag(
        4, help="rounds of messages on the mesh (emulator)", group="emulator"
    )
    mesh_level: Natural = flag(
        3, help="refinements of the icosahedron (emulator)", group="emulator"
    )
    grid_step: Positive = flag(
        1, help="step between the rows and columns that are used (emulator)", group="emulator"
    )

    @model_validator(mode="after")
    def _goes_together(self) -> TrainConfig:
        if self.amp and self.dtype != "float32":
            raise ValueError(
                f"--amp casts float32 weights as it goes; it does not go with --dtype {self.dtype}"
            )
        lower, upper = self.norm_lower, self.norm_upper
        if not lower < upper or (self.normalize == "global" and not 0 <= lower < upper <= 100):
            raise ValueError(
                f"--norm-lower {lower} and --norm-upper {upper} must be two percentiles, or with "
                "--normalize fixed two intensities, the lower first"
            )
        return self


TRAIN_DEFAULTS: dict[str, dict[str, Any]] = {
    "spiral": {
        "epochs": 50,
        "batch_size": 32,
        "learning_rate": 1e-3,
        "optimizer": "adam",
        "weight_decay": 0.0,
        "schedule": "constant",
        "num_workers": 0,
        "seed": 42,
    },
    "emulator": {
        "batch_size": 1,
        "learning_rate": 1e-3,
        "optimizer": "adam",
        "weight_decay": 0.0,
        "schedule": "cosine",
        "clip_norm": 1.0,
    },
    "pairs": {
        "learning_rate": 1e-3,
        "optimizer": "adam",
        "weight_decay": 0.0,
        "schedule": "cosine",
        "clip_norm": 1.0,
    },
    "detector": {},
}
"""The defaults of each workload that differ from those above, which are the detector's."""
TRAIN_KNOBS: dict[str, frozenset[str]] = {
    "spiral": frozenset({"num_samples", "noise", "hidden_dims", "dropout"}),
    "emulator": frozenset(
        "train_data_root val_data_root latent_size chunks_per_epoch message_steps mesh_level "
        "grid_step".split()
    ),
    "pairs": frozenset(
        "in_spec target_spec target_kind loss axes series raw model trust_model channels tile_size "
        "normalize norm_lower norm_upper dtype checkpointing channels_last".split()
    ),
    "detector": frozenset(
        "train_data_root val_data_root train_label_file val_label_file train_chips_path "
        "val_chips_path checkpointing channels_last backbone background score_threshold "
        "max_dets".split()
    ),
}
"""Knobs that belong to a workload. Other workloads refuse them; one of the user's takes them all.
"""


def knobs_of_others(workload: str) -> frozenset[str]:
    """The knobs that a workload does not take; none for one of the user's."""
    if workload not in TRAIN_KNOBS:
        return frozenset()
    return frozenset().union(*TRAIN_KNOBS.values()) - TRAIN_KNOBS[workload]


TRAIN_FIXED = tuple(
    "batch_size grad_accum_steps optimizer learning_rate weight_decay schedule "
    "warmup_steps clip_norm seed amp dtype target_kind loss model channels tile_size "
    "normalize norm_lower norm_upper num_samples noise hidden_dims dropout latent_size "
    "message_steps mesh_level grid_step backbone background".split()
)
"""Knobs that may not change when a run is resumed: it would be another run."""


class SuiteConfig(DetectorData, OnWorkers, Labels):
    """The knobs of a benchmark of ``penstock suite``, beside its preset."""

    data_root: Path | None = flag(None, help="folder of the scenes, with train/ and validation/")
    output_dir: Path = flag(help="folder of the runs, their ledger and the report")

    effort: Literal["quick", "standard", "rigorous"] = flag(
        "quick", help="1, 5 or 10 launches of each run; one launch is never compared"
    )
    timeout: Annotated[float, Field(gt=0)] = flag(
        86_400.0, help="most seconds of a launch, a whole training, in all", unit="seconds"
    )
    seed: Natural = flag(0, help="seed of the order of launches, and of each training")
    anyway: bool = flag(False, help="run a preset for more devices on those that there are")
    resume: bool = flag(False, help="run only what the ledger in --output-dir lacks")
    overwrite: bool = flag(False, help="replace the suite in --output-dir")
