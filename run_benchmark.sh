#!/bin/sh
# The suite of detection benchmarks: ./run_benchmark.sh laptop --help
# Its Python is $PYTHON, else the one of .venv beside this script, which make builds, else python3.
own=$(dirname "$0")/.venv/bin/python
test -n "$PYTHON" || { test -x "$own" && PYTHON=$own || PYTHON=python3; }
"$PYTHON" -c 'import importlib.util as u; raise SystemExit(not u.find_spec("penstock"))' || {
    echo "run_benchmark.sh: $PYTHON has no penstock; make demo builds .venv with it," \
        "and PYTHON=... names another" >&2
    exit 2
}
exec "$PYTHON" -m penstock suite "$@"
