// dispatch_ragged_dot for every dtype that the core multiplies: the dispatch on few SMs, and behind it the product,
// which begins at once on the others and waits for its rows. Compiled for Hopper alone.
#include "comm/target/ptx/grid.h"
#include "gemm/gemm.h"
#include "kernels/moe/dispatch_dot.h"
#include "runtime/cuda/gemm_launch.h"
#include "runtime/gpu/kernel_launch.h"

namespace jax_ep {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads, 1)
    dispatch_kernel(const __grid_constant__ Comm comm, const __grid_constant__ DispatchDotArgs args, int senders,
                    int warp_bytes) {
  if (threadIdx.x == 0) ptx::let_next_kernel_begin();
  dispatch_in_order(comm, args, this_coop(senders, warp_bytes));
}

gemm::Beside beside_dispatch(const DispatchDotArgs& args) {
  const ArrivalWords at(args.capacity);
  gemm::Beside beside;
  beside.arrived = args.words + at.arrived();
  beside.laid_out = args.words + at.laid_out();
  beside.over = args.words + at.over();
  return beside;
}

uint32_t* counter_of(const DispatchDotArgs& args) {
  return reinterpret_cast<uint32_t*>(args.words + ArrivalWords(args.capacity).tiles());
}

std::optional<std::string> start_plain(const gemm::Config& config, gpu::Stream stream, const DispatchDotArgs& args,
                                       const gemm::Problem& problem) {
  const gemm::Arguments product{problem.grouping,
                                problem.m,
                                problem.n,
                                problem.k,
                                problem.groups,
                                args.dtype,
                                args.dtype,
                                /*a_is_k_by_m=*/false,
                                /*b_is_k_by_n=*/true,
                                args.received,
                                args.rhs,
                                args.product,
                                args.sizes,
                                counter_of(args),
                                beside_dispatch(args)};
  return launch_swapped(product, config, stream);
}

std::optional<std::string> start_product(const gemm::Config& config, gpu::Stream stream, const DispatchDotArgs& args,
                                         const gemm::Problem& problem) {
  if (args.capacity == 0) return std::nullopt;  // there are no tiles
  if (!args.gated) return start_plain(config, stream, args, problem);
  return launch(gemm::GatedArguments{problem.m, problem.n, problem.k, problem.groups, args.dtype, args.activation,
                                     args.keeps_products, args.received, args.rhs, args.pair ? args.up : args.rhs,
                                     args.columns, args.columns - problem.n, args.product, args.of_gate, args.of_up,
                                     args.sizes, counter_of(args), beside_dispatch(args)},
                stream);
}

}  // namespace

template <>
std::optional<std::string> ProductKernel<DispatchDotArgs>::start(const DotConfig& config, gpu::Stream stream,
                                                                 const Comm& comm, const DispatchDotArgs& args) {
  if (args.dtype == DType::float32) return "tokens must be bfloat16 or float16";
  const LaunchConfig& rows = config.dispatch;
  const auto launch = gemm::launch_of(rows.blocks, rows.threads, rows.threads / Coop::lanes * rows.warp_bytes, stream);
  const std::size_t words = ArrivalWords(args.capacity).count() * sizeof(uint64_t);
  auto error = gemm::describe_error(cudaMemsetAsync(args.words, 0, words, stream));
  const std::size_t sizes = args.num_experts / comm.size * sizeof(int32_t);
  if (!error) error = gemm::describe_error(cudaMemsetAsync(args.sizes, 0, sizes, stream));
  if (!error)
    error = gemm::describe_error(
        gemm::start(&dispatch_kernel, launch, gemm::Follows::ended, comm, args, rows.senders_per_cta, rows.warp_bytes));
  if (!error) error = start_product(config.product, stream, args, product_of(args, comm.size, config.product.band));
  return error ? std::optional(config.describe() + ": " + *error) : std::nullopt;
}

template <>
gpu::Error ProductKernel<DispatchDotArgs>::load() {
  return gemm::load_all(std::array{gemm::Variant{std::tuple(), &dispatch_kernel, 0}});
}

}  // namespace jax_ep
