"""``penstock plan``: the flags of ``infer``, and nothing touched."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..config import InferConfig, add_flags, from_flags
from ..registry import check
from .infer import print_plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE.yaml", help="settings; flags win")
    add_flags(parser, InferConfig)


def run(args: argparse.Namespace) -> int:
    config = from_flags(InferConfig, args, args.config)
    check(config.model_type, "--model-type")
    from ..job import Job

    plan = Job(config).plan
    print_plan(plan)
    plan.refuse()
    return 0
