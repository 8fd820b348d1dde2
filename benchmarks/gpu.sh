#!/usr/bin/env bash
# What a GPU does with the refiner: memory and throughput, variants, the largest batch that fits; and
# with the detector: the suite on generated scenes, ResNet-50 FPN in mixed precision, batch by batch;
# and how near `penstock infer` comes to what the card computes alone.
#
#     bash benchmarks/gpu.sh [FOLDER [PART...]]    about 40 minutes on one card; it goes on where it ended
#
# Parts: check limits variants tiles suite infer (default: all). What is kept lands in FOLDER (default
# benchmarks/results/gpu): ledgers of raw records, CSV, reports, figures, settings. Each part can be
# killed and run again: --resume measures only what is missing. Scenes, chips and weights of the
# suite lie in WORK (default /tmp/penstock-gpu) and are not kept. A launch that crashes is a row like
# any other; the exit code is then 1, at the end.
#
# DEVICE, PRESET, SCENES, CUT and SMOKE are there for tests/test_gpu.py, which runs a small suite and
# a small infer on a CPU.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-benchmarks/results/gpu}
parts=("${@:2}")
((${#parts[@]})) || parts=(check limits variants tiles suite infer)
device=${DEVICE:-cuda}
preset=$(realpath "${PRESET:-benchmarks/gpu_suite.json}")
work=${WORK:-/tmp/penstock-gpu}
read -ra scenes <<<"${SCENES:---scenes 10 --validation 2 --size 4000 4000 --objects 200}"
read -ra cut <<<"${CUT:---chip-size 800 --overlap 64}"
mkdir -p "$folder" "$work"
worst=0

penstock() { "${PYTHON:-python3}" -m penstock "$@"; }
crashed() { # STATUS: 1 says that a launch crashed, and anything else is an end.
    (($1 == 1)) || exit "$1"
    worst=1
}
bench() { # NAME FLAGS...: one sweep and its figure
    local name=$1
    shift
    penstock bench model --device "$device" --resume --launch-seconds 3 \
        --output "$folder/$name.csv" "$@" || crashed $?
    penstock plot "$folder/$name.csv" --output "$folder/$name.png"
}

check() {
    penstock doctor --json "$folder/doctor.json"
}

limits() { # The largest batch of each tile, verified on both sides.
    local size
    for size in 100m 300m; do
        penstock bench model --device "$device" --model "prithvi-refiner-$size" --mode train --amp \
            --tile-sizes 256 384 --find-limit --output "$folder/limit-$size.csv" |
            tee "$folder/limit-$size.txt"
    done
}

variants() { # Precision and layout, at one tile and batch. Five launches: these are compared.
    bench variants --model prithvi-refiner-100m --tile-sizes 256 --batch-sizes 8 \
        --amp off on --compile off on --channels-last off on
}

tiles() { # Tile against batch, inference and training.
    local size
    for size in 100m 300m; do
        bench "inference-$size" --effort quick --model "prithvi-refiner-$size" --amp \
            --tile-sizes 256 384 512 --batch-sizes 1 4 16
        bench "train-$size" --effort quick --model "prithvi-refiner-$size" --amp --mode train \
            --tile-sizes 256 384 --batch-sizes 1 4 16
    done
}

suite() { # In the folder of its data, so that no record holds a path of this machine.
    local kept
    kept=$(realpath "$folder")/suite
    pushd "$work" >/dev/null
    if [[ ! -d scenes ]]; then
        rm -rf scenes.part
        penstock generate xview3 scenes.part "${scenes[@]}"
        mv scenes.part scenes
    fi
    local data=(--data-root scenes --train-labels scenes/labels/train.csv
        --val-labels scenes/labels/validation.csv)
    penstock suite preprocess "${data[@]}" --output-dir chips "${cut[@]}"
    penstock suite benchmark --config "$preset" "${data[@]}" --train-chips chips/train \
        --val-chips chips/val --output-dir suite --resume || crashed $?
    mkdir -p "$kept"
    cp -R suite/suite.ledger suite/system_info.json suite/benchmark_report* "$kept/"
    popd >/dev/null
}

infer() { # Nets at each arithmetic, beside the limits of the same minutes; traces of copies.
    "${PYTHON:-python3}" benchmarks/gpu_infer.py --device "$device" --folder "$folder/infer" \
        --work "$work/infer" ${SMOKE:+--smoke} | tee "$work/infer.txt" || crashed $?
    cp "$work/infer.txt" "$folder/infer/"
}

for part in "${parts[@]}"; do
    case $part in
    check | limits | variants | tiles | suite | infer) "$part" ;;
    *)
        echo "there is no part $part; there are check, limits, variants, tiles, suite, infer" >&2
        exit 2
        ;;
    esac
done
exit "$worst"
