#!/usr/bin/env bash
# On gfx942 a release must write back, and an acquire invalidate, at system scope (sc0 sc1): a weaker one would work
# on one GPU and lose data between two. Reads the assembly, as there is no such GPU here to run on.
set -euo pipefail
cd "$(dirname "$0")/../.."
assembly=$(mktemp)
trap 'rm -f "$assembly"' EXIT
"${HIP_CLANG:-clang++-19}" -x hip --offload-arch=gfx942 -nogpulib -std=c++17 -O3 -Iffi --cuda-device-only \
  -S tests/hip/order.hip -o "$assembly"

body() { sed -n "/^$1:/,/s_endpgm/p" "$assembly" | tr '\n' ' '; }
expect() {
  if ! body "$1" | grep -Eq "$2"; then
    echo "FAILED: in $1, expected: $2" >&2
    body "$1" >&2
    exit 1
  fi
}
expect publish 'buffer_wbl2 sc0 sc1.*s_waitcnt.*global_store_dwordx2[^;]*sc0 sc1'
expect observe 'global_load_dwordx2[^;]*sc0 sc1.*s_waitcnt.*buffer_inv sc0 sc1'
echo "HIP memory order: release and acquire are system-scope on gfx942"
