"""Reads a file of torch.export (.pt2) without torch, and without running code from it.

`torch.export.load` unpickles parts of such a file, evaluates its symbolic expressions, looks up
operators by name in whole modules, and writes Python from its names. So a file from elsewhere can
run any code as soon as it is opened. Here the file is read as what it should be: a list of
operators with their arguments, and tensors as raw bytes. Anything else is refused with `Unchecked`;
``--trust-model`` gives the file to torch.

    zip of stored entries -> JSON -> operators of the list below, names, numbers, few short words

`exported` makes a module of it.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base import UsageError

MAJOR = 8
"""The version of the schema that torch 2.6 and later write; 2.5 wrote 7."""
_DESCRIPTION_BYTES = 2**28
"""Most bytes of a description in JSON; one of a net of 10,000 operators has 15 million."""


class Unchecked(UsageError):
    """A model file holds something that may do harm."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(
            f"--model-type {path} {what}: such a file may run any code, and is only read with "
            "--trust-model, if you trust who made it"
        )


@dataclass(frozen=True)
class Archive:
    """The parts of a file that are read."""

    path: Path
    program: Mapping[str, Any]
    """The graph and its signature."""
    tensors: Mapping[str, Mapping[str, Any]]
    """The description of each parameter, buffer and constant in raw bytes, by its name."""
    states: Sequence[bytes]
    """Whole state dicts as torch saved them up to 2.7, to be read as tensors only."""
    entries: Mapping[str, str]
    """The entry of the zip that holds a tensor of `tensors`, by its name."""

    def read(self, name: str) -> bytes:
        """The raw bytes of a tensor."""
        with zipfile.ZipFile(self.path) as file:
            return file.read(self.entries[name])


def open_archive(path: Path) -> Archive:
    """Read all of a file but its tensors.

    Raises `Unchecked` for one that holds more than tensors and operators, and errors of many types
    for one that is damaged.
    """
    with zipfile.ZipFile(path) as file:
        check_names(path, file)
        for entry in file.infolist():
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
                raise Unchecked(
                    path, f"keeps {entry.filename!r} compressed, which torch never does"
                )
        names = file.namelist()
        if "serialized_exported_program.json" in names:
            return _old(path, file)
        root = names[0].partition("/")[0]
        inside = {name.removeprefix(f"{root}/") for name in names}
        if any(name.startswith("data/aotinductor/") for name in inside):
            raise Unchecked(path, "holds compiled machine code")
        models = [name for name in inside if name.startswith("models/")]
        if models != ["models/model.json"]:
            raise ValueError(f"it holds {len(models)} programs, not one")
        tensors, entries = _tensors(path, file, root, inside)
        return Archive(path, _json(file, f"{root}/models/model.json"), tensors, [], entries)


def _tensors(
    path: Path, file: zipfile.ZipFile, root: str, inside: Collection[str]
) -> tuple[dict[str, Mapping[str, Any]], dict[str, str]]:
    """The description of each tensor and the entry that holds it, both by its name."""
    tensors: dict[str, Mapping[str, Any]] = {}
    entries: dict[str, str] = {}
    for folder in ("weights", "constants"):
        if f"data/{folder}/model.pt" in inside:
            raise Unchecked(path, f"keeps its {folder} in a pickle")
        config = _json(file, f"{root}/data/{folder}/model_{folder}_config.json")["config"]
        for name, payload in config.items():
            where = payload["path_name"]
            if payload["use_pickle"] or not re.fullmatch(r"(weight|tensor)_\d+", where):
                raise Unchecked(path, f"keeps {name!r} as a pickled object")
            if name in tensors:
                raise ValueError(f"it holds {name!r} twice")
            tensors[name] = payload
            entries[name] = f"{root}/data/{folder}/{where}"
    return tensors, entries


def _old(path: Path, file: zipfile.ZipFile) -> Archive:
    """The archive of a file that torch wrote up to 2.7."""
    states = [file.read(f"serialized_{part}.pt") for part in ("state_dict", "constants")]
    return Archive(path, _json(file, "serialized_exported_program.json"), {}, states, {})


def check_names(path: Path, file: zipfile.ZipFile) -> None:
    """Refuse an entry that stands twice, or whose name leads out of the archive."""
    names = set()
    for entry in file.infolist():
        if entry.filename in names:
            raise Unchecked(path, f"has two entries called {entry.filename!r}")
        names.add(entry.filename)
        parts = entry.filename.replace("\\", "/").split("/")
        if parts[0] == "" or ".." in parts or ":" in parts[0]:
            raise Unchecked(path, f"has an entry called {entry.filename!r}, outside of itself")


def _json(file: zipfile.ZipFile, name: str) -> Any:
    if file.getinfo(name).file_size > _DESCRIPTION_BYTES:
        raise ValueError(f"its {name} is larger than any description")
    return json.loads(file.read(name))


NAME = re.compile(r"[A-Za-z0-9_\-]+(\.[A-Za-z0-9_\-]+)*")
"""A parameter or buffer in its submodules."""
TEXT = re.compile(r"[A-Za-z0-9_ ,.>\-]{0,200}")
"""A mode, a rounding or the equation of an einsum."""
OPERATOR = re.compile(r"torch\.ops\.aten\.([a-z0-9_]+)\.([A-Za-z0-9_]+)")

OPERATORS = frozenset(
    """
    abs acos acosh adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d
    adaptive_max_pool2d adaptive_max_pool3d add addbmm addcdiv addcmul addmm addmv addr
    affine_grid_generator alias all allclose alpha_dropout amax amin aminmax angle any arange argmax
    argmin argsort argwhere as_strided asin asinh atan atan2 atanh atleast_1d atleast_2d atleast_3d
    avg_pool1d avg_pool2d avg_pool3d baddbmm batch_norm bernoulli bilinear bincount bitwise_and
    bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor block_diag bmm
    broadcast_tensors broadcast_to bucketize cartesian_prod cat cdist ceil celu chain_matmul
    channel_shuffle chunk clamp clamp_max clamp_min clip clone col2im column_stack complex concat
    concatenate conj conj_physical constant_pad_nd contiguous conv1d conv2d conv3d conv_depthwise3d
    conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution copy copy_ copysign cos
    cosh cosine_similarity count_nonzero cross cummax cummin cumprod cumsum deg2rad det detach diag
    diag_embed diagflat diagonal diff digamma dim dist div divide dot dropout dsplit dstack einsum
    elu embedding embedding_bag empty empty_like empty_permuted empty_strided eq equal erf erfc
    erfinv exp exp2 expand expand_as expm1 eye feature_alpha_dropout feature_dropout fft_fft
    fft_fft2 fft_fftfreq fft_fftn fft_fftshift fft_hfft fft_ifft fft_ifft2 fft_ifftn fft_ifftshift
    fft_ihfft fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftfreq fft_rfftn fill
    fill_diagonal fix flatten flip fliplr flipud float_power floor floor_divide fmax fmin fmod frac
    frobenius_norm full full_like gather ge gelu glu greater greater_equal grid_sampler
    grid_sampler_2d grid_sampler_3d group_norm gru gru_cell gt hann_window hardshrink hardsigmoid
    hardswish hardtanh heaviside histc hsplit hstack hypot im2col imag index index_add index_copy
    index_fill index_put index_reduce index_select inner instance_norm inverse is_complex
    is_floating_point isclose isfinite isin isinf isnan isneginf isposinf item kthvalue l1_loss
    layer_norm ldexp le leaky_relu lerp less less_equal lgamma lift lift_fresh lift_fresh_copy
    linalg_cross linalg_det linalg_inv linalg_matmul linalg_matrix_norm linalg_norm linalg_solve
    linalg_vecdot linalg_vector_norm linear linspace log log10 log1p log2 log_sigmoid log_softmax
    logaddexp logaddexp2 logcumsumexp logical_and logical_not logical_or logical_xor logit logspace
    logsumexp lstm lstm_cell lt masked_fill masked_scatter masked_select matmul max max_pool1d
    max_pool1d_with_indices max_pool2d max_pool2d_with_indices max_pool3d max_pool3d_with_indices
    max_unpool2d max_unpool3d maximum mean median meshgrid min minimum mish mm mode moveaxis movedim
    mse_loss mul multiply mv nan_to_num nanmean nanmedian nansum narrow narrow_copy
    native_batch_norm native_channel_shuffle native_dropout native_group_norm native_layer_norm ne
    neg negative new_empty new_empty_strided new_full new_ones new_zeros nonzero nonzero_static norm
    normal not_equal numel one_hot ones ones_like outer pad pairwise_distance permute pixel_shuffle
    pixel_unshuffle polar positive pow prelu prod quantile rad2deg rand rand_like randint randn
    randn_like randperm ravel real reciprocal reflection_pad1d reflection_pad2d reflection_pad3d
    relu relu6 remainder renorm repeat repeat_interleave replication_pad1d replication_pad2d
    replication_pad3d reshape reshape_as resolve_conj resolve_neg rms_norm rnn_relu rnn_tanh roll
    rot90 round rrelu rsqrt rsub scalar_tensor scaled_dot_product_attention scatter scatter_add
    scatter_reduce searchsorted select select_scatter selu sgn sigmoid sign signbit silu sin sinc
    sinh size slice slice_scatter softmax softplus softshrink sort special_erf special_erfc
    special_expit special_expm1 special_log1p special_log_softmax special_softmax special_xlogy
    split split_with_sizes sqrt square squeeze stack std std_mean stride sub subtract sum swapaxes
    swapdims sym_constrain_range sym_constrain_range_for_size sym_numel sym_size sym_storage_offset
    sym_stride t take take_along_dim tan tanh tensor_split tensordot threshold tile to topk trace
    transpose trapezoid tril tril_indices triu triu_indices true_divide trunc type_as unbind
    unflatten unfold unsafe_chunk unsafe_split unsqueeze upsample_bicubic2d upsample_bilinear2d
    upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d
    var var_mean vdot view view_as view_as_complex view_as_real vsplit vstack where xlogy zero zeros
    zeros_like
    __and__ __or__ __xor__ __lshift__ __rshift__ _adaptive_avg_pool2d _adaptive_avg_pool3d
    _addmm_activation _assert_async _assert_scalar _assert_tensor_metadata _cast_Float _cast_Half
    _convolution _fft_c2c _fft_c2r _fft_r2c _local_scalar_dense _log_softmax
    _native_batch_norm_legit _native_batch_norm_legit_functional
    _native_batch_norm_legit_no_training _pdist_forward _prelu_kernel _reshape_alias _safe_softmax
    _scaled_dot_product_efficient_attention
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu _softmax
    _to_copy _trilinear _unsafe_view _upsample_bicubic2d_aa _upsample_bilinear2d_aa
    _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d _weight_norm
    _weight_norm_interface
    """.split()
)
"""Operators of aten that only compute tensors and numbers from tensors and numbers; each may also
work in place. Left out are `from_file`, `save`, `set_`, `resize_` and others that reach files, or
memory beyond their arguments."""


def is_operator(name: str) -> bool:
    """Whether an operator, or the one that it is the in-place form of, is in `OPERATORS`."""
    return name in OPERATORS or name.removesuffix("_") in OPERATORS
