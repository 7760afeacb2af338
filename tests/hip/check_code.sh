#!/usr/bin/env bash
# Reads what the kernels for AMD GPUs compile to, as there is none here to run them on:
#
#     tests/hip/check_code.sh [gfx942]        HIP_CLANG="<compiler and flags>" for another than clang++-19
#
# - Warnings are errors.
# - A release writes back, and an acquire invalidates, at system scope (sc0 sc1): a weaker one would work on one GPU and
#   lose data between two. What stays in a rank is of its GPU (sc1).
# - No vector register is spilled, no stack grows, and no LDS is taken besides what the launch gives. Scratch holds
#   records of ops and arguments of calls: 2 KiB a lane at most.
set -euo pipefail
cd "$(dirname "$0")/../.."
gpu=${1:-gfx942}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for headers in "${ROCM_PATH:-}/include" /opt/rocm/include /usr/include; do
  [ -e "$headers/hip/hip_runtime.h" ] && break
done

compile() {
  # shellcheck disable=SC2086
  ${HIP_CLANG:-clang++-19} -x hip "--offload-arch=$gpu" -nogpulib -std=c++17 -O3 -Wall -Wextra -Werror \
    -idirafter "$headers" -Iffi -Iffi/runtime/hip "$@"
}

# assemble <source> <file>: without arrays of a lane in LDS, as ffi/CMakeLists.txt has it.
assemble() { compile -mllvm -disable-promote-alloca-to-lds --cuda-device-only -S "$1" -o "$2"; }

assemble tests/hip/order.hip "$work/order.s"
body() { sed -n "/^$1:/,/s_endpgm/p" "$work/order.s" | tr '\n' ' '; }
expect() {
  if ! body "$1" | grep -Eq "$2"; then
    echo "FAILED: in $1, expected: $2" >&2
    body "$1" >&2
    exit 1
  fi
}
expect publish 'buffer_wbl2 sc0 sc1.*s_waitcnt.*global_store_dwordx2[^;]*sc0 sc1'
expect observe 'global_load_dwordx2[^;]*sc0 sc1.*s_waitcnt.*buffer_inv sc0 sc1'
expect claim 'buffer_wbl2 sc0 sc1.*s_waitcnt.*global_atomic_cmpswap_x2[^;]* sc1.*s_waitcnt.*buffer_inv sc0 sc1'
expect publish_here 'buffer_wbl2 sc1.*s_waitcnt.*global_store_dwordx2[^;]*sc1'
expect count_here 'buffer_wbl2 sc1.*s_waitcnt.*global_atomic_add_x2.*s_waitcnt.*buffer_inv sc1'

(cd "$work" && cmake -P "$OLDPWD/ffi/kernel_instances.cmake")
sources=(ffi/runtime/gpu/kernels.cu "$work"/instances/row_kernels_*.cu)
compilers=()
for source in "${sources[@]}"; do
  { compile --cuda-host-only -fsyntax-only "$source" && assemble "$source" "$work/$(basename "$source").s"; } &
  compilers+=($!)
done
for compiler in "${compilers[@]}"; do wait "$compiler"; done

echo "| kernels | of | vector registers, most | scratch of a lane, bytes, most |"
echo "|---|---|---|---|"
for source in "${sources[@]}"; do
  awk -v source="${source##*/}" '
    function bound(what, most) {
      if ($2 == "true" || $2 + 0 > most) {
        printf "FAILED: %s, a kernel has %s %s, at most %d\n", source, what, $2, most > "/dev/stderr"
        failed = 1
      }
    }
    $1 == ".vgpr_count:" {kernels++; if ($2 > registers) registers = $2; bound("registers", 512)}
    $1 == ".private_segment_fixed_size:" {if ($2 > scratch) scratch = $2; bound("bytes of scratch", 2048)}
    $1 == ".group_segment_fixed_size:" {bound("bytes of LDS", 0)}
    $1 == ".vgpr_spill_count:" {bound("spilled registers", 0)}
    $1 == ".uses_dynamic_stack:" {bound("a stack that grows:", 0)}
    END {
      printf "| %s | %d | %d | %d |\n", source, kernels, registers, scratch
      exit failed || !kernels
    }' "$work/$(basename "$source").s"
done
echo "$gpu: memory order is system-scope between ranks, no register is spilled"
