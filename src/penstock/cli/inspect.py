"""``penstock inspect MODEL``: how far a network sees, and the overlap at which tiles are exact."""

from __future__ import annotations

import argparse

from ..base import NetworkKnobs, UsageError, add_flags, from_flags, plural
from ..data import in_words
from ..models import check_model_name

EXAMPLES = """
penstock inspect denoise-tiny
penstock inspect net.py:make --weights net.safetensors
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="as --model-type of infer names it")
    parser.add_argument(
        "--axes", type=int, choices=(2, 3), help="axes to give a model that takes either"
    )
    parser.add_argument("--compile", action="store_true", help="compare bits with torch.compile")
    add_flags(parser, NetworkKnobs)


def run(args: argparse.Namespace) -> int:
    from ..inference import least_overlap, reach_of
    from ..models import BITS_SIDE, bits_that_vary, load_model

    check_model_name(args.model, "MODEL")
    knobs = from_flags(NetworkKnobs, args)
    model = load_model(
        args.model, knobs.weights, knobs.in_channels, untrained=True, trust=knobs.trust_model
    )
    axes = args.axes or model.spatial_axes or 3
    if model.spatial_axes not in (None, axes):
        raise UsageError(
            f"--axes {axes}: {model.name} is made of {model.spatial_axes}-D convolutions"
        )
    reach = reach_of(model, axes)
    overlap = least_overlap(reach) if reach.exact else None
    bits = bits_that_vary(model, axes, args.compile)
    print(f"model     {model.name}, {plural(axes, 'axis')}")
    if overlap is None:
        print(f"tiling    {reach.line()}")
    else:
        seen, after = in_words(reach.seen_before), in_words(reach.seen_after)
        print(f"sees      {seen} voxels before, {after} after")
        period, step = in_words(reach.period), in_words(reach.step)
        print(f"grid      {period}; sides of patches: multiples of {step}")
        print(f"context   {in_words(reach.before)} before a core, {in_words(reach.after)} after")
        print(f"tiling    exact with --overlap {' '.join(map(str, overlap))}, checked at "
              f"{plural(reach.places, 'place')}")  # fmt: skip
    for what, varies in bits.items():
        words = {True: "depend on it", False: "do not depend on it", None: "not known"}
        print(f"{what:<9} bits {words[varies]} (patches of {BITS_SIDE})")
    return 0
