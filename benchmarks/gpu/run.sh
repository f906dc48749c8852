#!/bin/sh
# Measure a GPU: attention, steps with and without graphs, throughput, and the conformance kit, in under 9 minutes.
#
#   [OUT=folder] [PYTHON=python3] benchmarks/gpu/run.sh [--device cuda] [--limit-s 530] [--phases attention,kit] [--tiny]
#
# Needs Python with torch, triton, transformers, tokenizers, safetensors, pluggy, huggingface-hub, jinja2, filelock and
# pytest; isthmus itself need not be installed, and nothing is fetched. Weights are random. `--device cpu --tiny` is a
# dry run anywhere. results.json, results.md and the kit's report come into $OUT (reports/gpu).
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-python3}
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
"$python" "$root/benchmarks/gpu/entry_points.py" "$site"
for platform in "$root"/platforms/*/; do
    site_path=${site_path:-}:${platform%/}
done
PYTHONPATH="$root/engine$site_path:$site${PYTHONPATH:+:$PYTHONPATH}"
HF_HUB_OFFLINE=1
PYTHONUNBUFFERED=1
export PYTHONPATH HF_HUB_OFFLINE PYTHONUNBUFFERED
"$python" "$root/benchmarks/gpu/run.py" --out "${OUT:-$root/reports/gpu}" "$@"
