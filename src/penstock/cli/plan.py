"""``penstock plan``: say what ``infer`` would do with the same flags, and touch nothing."""

from __future__ import annotations

import argparse

from ..base import InferConfig, add_flags, from_flags
from ..models import check_model_name
from .infer import print_plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, InferConfig, config_file=True)


def run(args: argparse.Namespace) -> int:
    config = from_flags(InferConfig, args, args.config)
    check_model_name(config.model_type, "--model-type")
    from ..inference import Job

    plan = Job(config).plan
    print_plan(plan)
    plan.refuse()
    return 0
