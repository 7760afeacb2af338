// FFI handlers of the grouped products. They need no group of ranks: everything is on the device of the call.
#include "gemm/gemm.h"

#include <string_view>

#include "runtime/extra.h"
#include "runtime/gpu/kernel_launch.h"

namespace jax_ep {
namespace {

namespace ffi = xla::ffi;
using Sizes = ffi::Buffer<ffi::S32>;
using Scales = ffi::Buffer<ffi::F32>;
using Counter = ffi::Buffer<ffi::U32>;

std::optional<DType> dtype_of(ffi::DataType type) {
  if (type == ffi::BF16) return DType::bfloat16;
  if (type == ffi::F16) return DType::float16;
  if (type == ffi::F32) return DType::float32;
  return std::nullopt;
}

int dim(ffi::AnyBuffer buffer, size_t axis) { return static_cast<int>(buffer.dimensions()[axis]); }

ffi::Error start(gemm::Arguments arguments, cudaStream_t stream, ffi::AnyBuffer a, ffi::AnyBuffer b, Sizes sizes,
                 ffi::AnyBuffer out) {
  const auto in = dtype_of(a.element_type()), result = dtype_of(out.element_type());
  if (!in || !result || a.element_type() != b.element_type())
    return {ffi::ErrorCode::kInvalidArgument, "grouped product: operands must be bfloat16 or float16, both alike"};
  arguments.in = *in;
  arguments.out = *result;
  arguments.a = a.untyped_data();
  arguments.b = b.untyped_data();
  arguments.out_data = out.untyped_data();
  arguments.group_sizes = sizes.typed_data();
  arguments.groups = static_cast<int>(sizes.element_count());
  if (const auto error = gemm::launch(arguments, stream))
    return {ffi::ErrorCode::kInvalidArgument, "grouped product: " + *error};
  return ffi::Error::Success();
}

// lhs [m, k], rhs [groups, k, n], or [groups, n, k] if transposed -> [m, n]. A counter is memory.
ffi::Error grouped_matmul_impl(cudaStream_t stream, ffi::AnyBuffer lhs, ffi::AnyBuffer rhs, Sizes sizes,
                               ffi::Result<ffi::AnyBuffer> out, ffi::Result<Counter> counter, bool transpose_rhs) {
  gemm::Arguments arguments{};
  arguments.grouping = gemm::Grouping::m_grouped;
  arguments.m = dim(lhs, 0);
  arguments.k = dim(lhs, 1);
  arguments.n = dim(*out, 1);
  arguments.b_is_k_by_n = !transpose_rhs;
  arguments.counter = counter->typed_data();
  return start(arguments, stream, lhs, rhs, sizes, *out);
}

std::optional<gemm::Activation> activation_of(std::string_view name) {
  if (name == "silu") return gemm::Activation::silu;
  if (name == "gelu") return gemm::Activation::gelu;
  if (name == "relu") return gemm::Activation::relu;
  return std::nullopt;
}

// rows [m, k], gate and up [groups, k, n], or twice both in one array [groups, k, 2 n], gate in front
// -> activation(rows gate) * (rows up) [m, n]. A counter is memory.
ffi::Error gated_matmul_impl(cudaStream_t stream, ffi::AnyBuffer rows, ffi::AnyBuffer gate, ffi::AnyBuffer up,
                             Sizes sizes, ffi::Result<ffi::AnyBuffer> out, ffi::Result<Counter> counter,
                             std::string_view activation) {
  const auto dtype = dtype_of(rows.element_type());
  const auto known = activation_of(activation);
  for (const auto type : {gate.element_type(), up.element_type(), out->element_type()})
    if (!dtype || type != rows.element_type())
      return {ffi::ErrorCode::kInvalidArgument, "gated product: all must be bfloat16 or float16, alike"};
  if (!known) return {ffi::ErrorCode::kInvalidArgument, "gated product: no activation " + std::string(activation)};
  const int n = dim(*out, 1), columns = dim(gate, 2);
  if (columns != dim(up, 2) || (columns != n && columns != 2 * n))
    return {ffi::ErrorCode::kInvalidArgument,
            "gated product: gate and up must have the columns of the result, or both"};
  const gemm::GatedArguments arguments{dim(rows, 0),
                                       n,
                                       dim(rows, 1),
                                       static_cast<int>(sizes.element_count()),
                                       *dtype,
                                       *known,
                                       rows.untyped_data(),
                                       gate.untyped_data(),
                                       up.untyped_data(),
                                       columns,
                                       columns == n ? 0 : n,
                                       out->untyped_data(),
                                       sizes.typed_data(),
                                       counter->typed_data()};
  if (const auto error = gemm::launch(arguments, stream))
    return {ffi::ErrorCode::kInvalidArgument, "gated product: " + *error};
  return ffi::Error::Success();
}

// lhs [rows, m], rhs [rows, n] -> [groups, m, n]: lhs' x rhs over the rows of each group.
ffi::Error grouped_outer_impl(cudaStream_t stream, ffi::AnyBuffer lhs, ffi::AnyBuffer rhs, Sizes sizes,
                              ffi::Result<ffi::AnyBuffer> out) {
  gemm::Arguments arguments{};
  arguments.grouping = gemm::Grouping::k_grouped;
  arguments.m = dim(lhs, 1);
  arguments.k = dim(lhs, 0);
  arguments.n = dim(rhs, 1);
  arguments.a_is_k_by_m = arguments.b_is_k_by_n = true;
  return start(arguments, stream, lhs, rhs, sizes, *out);
}

// lhs [m, k], its scales [m, k / 128], rhs [groups, n, k], its scales [groups, n / 128, k / 128] -> [m, n].
ffi::Error grouped_matmul_float8_impl(cudaStream_t stream, ffi::AnyBuffer lhs, Scales lhs_scales, ffi::AnyBuffer rhs,
                                      Scales rhs_scales, Sizes sizes, ffi::Result<ffi::AnyBuffer> out) {
  gemm::Float8Arguments arguments{};
  arguments.m = dim(lhs, 0);
  arguments.n = dim(rhs, 1);
  arguments.k = dim(lhs, 1);
  arguments.groups = dim(rhs, 0);
  const auto result = dtype_of(out->element_type());
  if (!result || lhs.element_type() != ffi::F8E4M3FN || rhs.element_type() != ffi::F8E4M3FN)
    return {ffi::ErrorCode::kInvalidArgument, "float8 product: operands must be float8_e4m3fn"};
  arguments.out = *result;
  arguments.a = lhs.untyped_data();
  arguments.a_scales = lhs_scales.typed_data();
  arguments.b = rhs.untyped_data();
  arguments.b_scales = rhs_scales.typed_data();
  arguments.out_data = out->untyped_data();
  arguments.group_sizes = sizes.typed_data();
  if (const auto error = gemm::launch(arguments, stream))
    return {ffi::ErrorCode::kInvalidArgument, "float8 product: " + *error};
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(grouped_matmul_handler, grouped_matmul_impl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()  // lhs
                                  .Arg<ffi::AnyBuffer>()  // rhs
                                  .Arg<Sizes>()           // group_sizes
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<Counter>()
                                  .Attr<bool>("transpose_rhs"),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(gated_matmul_handler, gated_matmul_impl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()  // rows
                                  .Arg<ffi::AnyBuffer>()  // gate
                                  .Arg<ffi::AnyBuffer>()  // up
                                  .Arg<Sizes>()           // group_sizes
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<Counter>()
                                  .Attr<std::string_view>("activation"),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(grouped_outer_handler, grouped_outer_impl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()  // lhs
                                  .Arg<ffi::AnyBuffer>()  // rhs
                                  .Arg<Sizes>()           // group_sizes
                                  .Ret<ffi::AnyBuffer>(),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(grouped_matmul_float8_handler, grouped_matmul_float8_impl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()  // lhs
                                  .Arg<Scales>()          // its scales
                                  .Arg<ffi::AnyBuffer>()  // rhs
                                  .Arg<Scales>()          // its scales
                                  .Arg<Sizes>()           // group_sizes
                                  .Ret<ffi::AnyBuffer>(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace

std::vector<NamedHandler> extra_handlers() {
  return {{"grouped_matmul", grouped_matmul_handler},
          {"gated_matmul", gated_matmul_handler},
          {"grouped_outer", grouped_outer_handler},
          {"grouped_matmul_float8", grouped_matmul_float8_handler}};
}

std::optional<std::string> load_extra_kernels() {
#define JAX_EP_LOAD(Args) &ProductKernel<Args>::load,
  for (const auto load : {&gemm::load, &gemm::load_gated, &gemm::load_float8, JAX_EP_PRODUCT_OPS(JAX_EP_LOAD)})
    if (const cudaError_t error = load(); error != cudaSuccess) return cudaGetErrorString(error);
  return std::nullopt;
}

}  // namespace jax_ep
