#!/bin/sh
# The suite of detection benchmarks: ./run_benchmark.sh laptop --help
exec "${PYTHON:-python3}" -m penstock suite "$@"
