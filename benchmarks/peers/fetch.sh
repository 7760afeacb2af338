#!/bin/bash
# Packs what SonicMoE needs besides torch into peers.tar.xz (some 60 MiB, mostly the compiler of the CuTe DSL).
set -euo pipefail
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
platforms=(any manylinux2014_x86_64)
for glibc in 17 24 27 28; do platforms+=("manylinux_2_${glibc}_x86_64"); done
python3 -m pip install --target "$site" --no-deps --no-compile --ignore-requires-python --only-binary=:all: \
  --python-version 3.12 --implementation cp "${platforms[@]/#/--platform=}" \
  sonic-moe==0.1.2.post1 quack-kernels==0.3.11 apache-tvm-ffi==0.1.15.post2 einops==0.8.2 \
  nvidia-cutlass-dsl-libs-cu13==4.4.2 # the version that this sonic-moe pins
tar -cJf peers.tar.xz -C "$site" .
