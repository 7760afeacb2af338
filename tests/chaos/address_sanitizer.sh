#!/usr/bin/env bash
# The fuzzer, and calls that do not fit their op, under AddressSanitizer:
# address_sanitizer.sh <python with jax_ep[dev]> <empty folder> [arguments of fuzz].
# XLA's buffers come from malloc, so what a kernel writes or reads beyond them, or after they are freed, ends the run.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=$1 folder=$2
shift 2
flags=(-fsanitize=address -fno-omit-frame-pointer -g)

"$python" -m pip wheel --quiet --no-deps -w "$folder" -C cmake.define.JAX_EP_GPU=none \
  -C "cmake.define.CMAKE_CXX_FLAGS=${flags[*]}" .
"$python" -m zipfile -e "$folder"/jax_ep-*.whl "$folder/wheel"
headers=$("$python" -c "import jaxlib, os; print(os.path.dirname(jaxlib.__file__) + '/include')")
c++ -std=c++17 -shared -fPIC -O1 "${flags[@]}" -isystem "$headers" tests/chaos/overrun.cc -o "$folder/overrun.so"

sanitized() {
  LD_PRELOAD="$(c++ -print-file-name=libasan.so) $(c++ -print-file-name=libstdc++.so)" JAX_PLATFORMS=cpu \
    ASAN_OPTIONS=protect_shadow_gap=0:detect_leaks=0:allocator_may_return_null=1:handle_segv=0 \
    PYTHONPATH="$folder/wheel" "$python" "$@"
}

for bytes in 1 64 1000 65536; do
  sanitized -m tests.chaos.overrun "$folder/overrun.so" "$bytes" >"$folder/planted" 2>&1 || true
  if ! grep -q "heap-buffer-overflow" "$folder/planted"; then
    echo "an overrun of one byte behind $bytes was not caught:"
    cat "$folder/planted"
    exit 1
  fi
done
echo "planted overruns were caught"
sanitized -m pytest -q -n0 tests/ops/test_bindings.py
sanitized -m tests.chaos.fuzz "$@"
