#!/bin/sh
# The suite of detection benchmarks: ./run_benchmark.sh laptop --help
# Its Python is $PYTHON, else that of the environment you are in where it has penstock, else the one
# of .venv beside this script, which make builds.
own=$(dirname "$0")/.venv/bin/python
has_penstock() { "$1" -c 'from penstock import __version__' 2>/dev/null; }
test -n "$PYTHON" || { PYTHON=python3; has_penstock python3 || { test -x "$own" && PYTHON=$own; }; }
has_penstock "$PYTHON" || {
    echo "run_benchmark.sh: $PYTHON has no penstock; make test builds .venv with it," \
        "and PYTHON=... names another" >&2
    exit 2
}
exec "$PYTHON" -m penstock suite "$@"
