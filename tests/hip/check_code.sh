#!/usr/bin/env bash
# Reads the machine code of the kernels for AMD GPUs, because there is no AMD GPU here:
#
#     tests/hip/check_code.sh [gfx942]        set HIP_CLANG to use another compiler than clang++-19, and its flags
#
# - Warnings are errors.
# - A word that a peer reads or writes needs system scope (sc0 sc1): a release writes back and an acquire invalidates at
#   system scope. A weaker scope would work on one GPU and lose data between two. What stays in a rank needs the scope
#   of its GPU (sc1).
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

# assemble <source> <file>: keeps arrays of a lane out of LDS, by the same flag as ffi/CMakeLists.txt.
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
expect put 'global_store_dwordx2[^;]*sc0 sc1'
expect look 'global_load_dwordx2[^;]*sc0 sc1'
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

echo "| file | kernels | vector registers, most | scratch of a lane, bytes, most |"
echo "|---|---|---|---|"
for source in "${sources[@]}"; do
  awk -v source="${source##*/}" '
    BEGIN {
      most[".private_segment_fixed_size:"] = 2048  # bytes of scratch
      most[".group_segment_fixed_size:"] = most[".vgpr_spill_count:"] = most[".uses_dynamic_stack:"] = 0
    }
    $1 == ".vgpr_count:" {kernels++; if ($2 > registers) registers = $2}
    $1 in most {
      seen[$1]++
      if ($1 ~ /private/ && $2 > scratch) scratch = $2
      if ($2 == "true" || $2 + 0 > most[$1]) fail($1 " " $2 ", at most " most[$1])
    }
    function fail(what) {
      printf "FAILED: %s: a kernel has %s\n", source, what > "/dev/stderr"
      failed = 1
    }
    END {
      for (key in most)
        if (seen[key] != kernels) fail("no " key)
      printf "| %s | %d | %d | %d |\n", source, kernels, registers, scratch
      exit failed || !kernels
    }' "$work/$(basename "$source").s"
done
echo "$gpu: words of peers have system scope, no vector register is spilled"
