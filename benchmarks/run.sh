#!/usr/bin/env bash
# mfubench against its peers on this machine's first GPU: benchmarks/run.sh --data FOLDER [--case NAME …] [--minutes M]
# [--torchtitan PATH] [--nanogpt PATH] [--litgpt PATH]. On a CPU, to prove the harness: benchmarks/run.sh --tiny.
# Results go to benchmarks/results/, with --tiny below build/benchmarks/. PYTHON names another interpreter than the project's own.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
[ -x "$(command -v "$python")" ] || python=python3
export PYTHONPATH="$PWD:$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m benchmarks.compare "$@"
