"""``penstock dashboard FOLDER ...``: runs compared in a browser, while they go on and after."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..base import Replacing, add_flags

PORT = 5006
EXAMPLES = """
penstock dashboard outputs logs            # all runs in two folders, at http://localhost:5006/
penstock dashboard outputs --port 0        # at any port that is free
penstock dashboard outputs --static site   # the comparison as files, for a web server
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folders",
        type=Path,
        nargs="+",
        metavar="FOLDER",
        help="a folder that is searched for runs, ledgers, output of SLURM jobs and stores of "
        "MLflow; or one of these, or an export of Comet",
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="the address to listen on (default: this machine alone). Whoever reaches another "
        "address can read all that is shown: there is no login",
    )
    parser.add_argument(
        "--port", type=int, default=PORT, help=f"the port; 0 for any that is free (default: {PORT})"
    )
    parser.add_argument(
        "--static",
        type=Path,
        metavar="OUT",
        help="write the comparison as files into this folder, and serve nothing",
    )
    parser.add_argument(
        "--view",
        default="",
        metavar="LINK",
        help="the link of a view, which --static writes (default: the newest runs)",
    )
    add_flags(parser, Replacing)


def run(args: argparse.Namespace) -> int:
    from ..base import UsageError, check_local, from_flags, plural, require
    from ..dashboard import Catalogue

    for folder in args.folders:
        check_local(folder, "FOLDER")
    if not 0 <= args.port < 2**16:
        raise UsageError(f"--port {args.port}: a port is from 0 to 65535")
    if args.view and args.static is None:
        raise UsageError("--view belongs to --static; open the link in a browser")
    require("panel", "dashboard")
    catalogue = Catalogue(args.folders)
    catalogue.refresh()
    if args.static is not None:
        from ..dashboard import write_static

        replace = from_flags(Replacing, args).replace
        written = write_static(catalogue, args.static, args.view, replace)
        print(*written, sep="\n")
        return 0

    from ..dashboard import serve_dashboard

    def say(address: str) -> None:
        runs = plural(len(catalogue.runs), "run")
        print(f"{address}  {runs}; Ctrl-C ends it", flush=True)

    serve_dashboard(catalogue, args.host, args.port, say)
    return 0
