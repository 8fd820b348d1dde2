#!/usr/bin/env bash
# What a GPU does with the refiner: memory and throughput, variants, the largest batch that fits.
#
#     bash benchmarks/gpu.sh [FOLDER]          about 25 minutes on one card; it goes on where it ended
#
# Everything lands in FOLDER (default benchmarks/results/gpu): ledgers of raw records, CSV, figures,
# settings. Each part can be killed and run again: --resume measures only what is missing.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-benchmarks/results/gpu}
mkdir -p "$folder"
penstock() { "${PYTHON:-python3}" -m penstock "$@"; }
bench() { # NAME FLAGS...: one sweep and its figure
    local name=$1
    shift
    penstock bench model --device cuda --resume --launch-seconds 3 --output "$folder/$name.csv" "$@"
    penstock plot "$folder/$name.csv" --output "$folder/$name.png"
}

penstock doctor --device cuda --effort quick --ledger "$folder/doctor.ledger" \
    --json "$folder/doctor.json"

# 1. The largest batch of each tile, verified on both sides.
for size in 100m 300m; do
    penstock bench model --device cuda --model prithvi-refiner-$size --mode train --amp \
        --tile-sizes 256 384 --find-limit --output "$folder/limit-$size.csv" | tee "$folder/limit-$size.txt"
done

# 2. Precision and layout, at one tile and batch. Five launches: these are compared.
bench variants --model prithvi-refiner-100m --tile-sizes 256 --batch-sizes 8 \
    --amp off on --compile off on --channels-last off on

# 3. Tile against batch, inference and training.
for size in 100m 300m; do
    bench "inference-$size" --effort quick --model prithvi-refiner-$size --amp \
        --tile-sizes 256 384 512 --batch-sizes 1 4 16
    bench "train-$size" --effort quick --model prithvi-refiner-$size --amp --mode train \
        --tile-sizes 256 384 --batch-sizes 1 4 16
done
