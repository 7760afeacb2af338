#!/usr/bin/env bash
# For you who have an AMD GPU: builds the library for it, runs the tests, and prints a report to paste into an issue.
#
#     tests/hip/report.sh [minutes] | tee report.txt
#
# Needs ROCm with its compiler, and an environment of Python in which jax finds the GPUs. Nobody of us has such a GPU: the
# library compiles and its machine code is inspected (check_code.sh), but it has never run.
set -uo pipefail
cd "$(dirname "$0")/../.."
minutes=${1:-20}

section() { printf '\n== %s\n' "$1"; }

# try <seconds> <command...>: the last lines of what it prints, and how it ended, whatever that is.
try() {
  timeout --signal=INT --kill-after=60 "$1" "${@:2}" 2>&1 | tail -n "${lines:-60}"
  echo "-- ended with ${PIPESTATUS[0]}"
}

section "machine"
date --utc +%F
git rev-parse HEAD 2>/dev/null || grep version jax_ep/version.py
if [ ! -e /dev/kfd ]; then
  echo "no AMD GPU: there is no /dev/kfd"
  exit 1
fi
gpu=$(rocm_agent_enumerator 2>/dev/null | grep -v gfx000 | sort -u | paste -sd ';')
echo "GPUs: ${gpu:-rocm_agent_enumerator found none}"
lines=8 try 60 "${ROCM_PATH:-/opt/rocm}/bin/amdclang++" --version
try 60 rocm-smi --showproductname --showdriverversion --showtopo

section "build"
try 3600 python -m pip install --quiet -C cmake.define.JAX_EP_GPU=hip \
  -C "cmake.define.JAX_EP_HIP_ARCHITECTURES=${gpu:-gfx942}" ".[test]"
try 300 python -m jax_ep info

section "two GPUs exchange tokens"
# The least that must work. After a timeout it names who waited for whom.
JAX_EP_TIMEOUT=30 try 600 python -m pytest -q -x -o addopts= tests/ops/test_dispatch.py tests/ops/test_combine.py

section "all tests, and random programs: $minutes minutes"
lines=200 try $((120 * minutes + 600)) python -m tests.gpu --minutes "$minutes" --out "$(mktemp -u).json"

section "times"
try 900 python -m jax_ep bench moe --quick --repeats 3
