// What row_kernels.h declares; for the file of each dtype alone.
#pragma once

#include "runtime/gpu/row_kernels.h"
#include "runtime/gpu/start_kernel.h"

namespace jax_ep {

template <class T>
gpu::Error RowKernels<T>::start(const LaunchConfig& config, gpu::Stream stream, const Comm& comm, const RowArgs& args) {
  return std::visit([&](const auto& each) { return start_kernel<T>(config, stream, comm, each); }, args);
}

template <class T>
gpu::Error RowKernels<T>::load(int shared_bytes) {
  for (const auto each : {&load_kernel<T, DispatchArgs>, &load_kernel<T, ScatterArgs>, &load_kernel<T, CombineArgs>,
                          &load_kernel<T, LongCombineArgs>, &load_kernel<T, SparseReduceArgs>})
    if (const gpu::Error error = each(shared_bytes); error != gpu::kSuccess) return error;
  return gpu::kSuccess;
}

}  // namespace jax_ep
