"""What a user may set: YAML, flags and Python arguments in one validated, frozen model.

Each knob has one default, and it stands here. A validator may refuse what the user said; it
never edits it: what is fitted to the data is fitted in `plan`, and shown there.
"""

from .bench import BenchLoaderConfig, BenchModelConfig, BenchQueueConfig, TuneLoaderConfig
from .cluster import SLURM_PRESETS, SimulateConfig, SlurmConfig, TorchrunConfig
from .data import (
    CHIP_OVERLAP,
    PRESET_SAMPLES,
    GenerateConfig,
    LoaderConfig,
    PredictConfig,
    PreprocessConfig,
    ScoreConfig,
    XView3Rules,
)
from .infer import InferConfig
from .knobs import (
    Knobs,
    Natural,
    Positive,
    Replacing,
    add_flags,
    as_settings,
    build,
    from_flags,
    read_yaml,
)
from .spoken import speaks_python
from .train import TRAIN_DEFAULTS, TRAIN_FIXED, TRAIN_KNOBS, SuiteConfig, TrainConfig

__all__ = [
    "CHIP_OVERLAP",
    "PRESET_SAMPLES",
    "SLURM_PRESETS",
    "TRAIN_DEFAULTS",
    "TRAIN_FIXED",
    "TRAIN_KNOBS",
    "BenchLoaderConfig",
    "BenchModelConfig",
    "BenchQueueConfig",
    "GenerateConfig",
    "InferConfig",
    "Knobs",
    "LoaderConfig",
    "Natural",
    "Positive",
    "PredictConfig",
    "PreprocessConfig",
    "Replacing",
    "ScoreConfig",
    "SimulateConfig",
    "SlurmConfig",
    "SuiteConfig",
    "TorchrunConfig",
    "TrainConfig",
    "TuneLoaderConfig",
    "XView3Rules",
    "add_flags",
    "as_settings",
    "build",
    "from_flags",
    "read_yaml",
    "speaks_python",
]
