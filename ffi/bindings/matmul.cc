// FFI handlers of the matrix products with a collective.
#include "bindings/decode.h"
#include "bindings/handlers.h"
#include "kernels/matmul/args.h"

namespace jax_ep {
namespace {

// What both ops are told alike; false if a dtype is none of ours.
template <class Args>
bool decode_factors(ffi::AnyBuffer a, ffi::AnyBuffer b, ffi::AnyBuffer result, bool transpose_b, Args* args) {
  const auto in = dtype_of(a.element_type()), out = dtype_of(result.element_type());
  if (!in || !out || a.element_type() != b.element_type()) return false;
  args->operand_dtype = *in;
  args->dtype = *out;
  args->m = dim(a, 0);
  args->k = dim(a, 1);
  args->n = dim(b, transpose_b ? 0 : 1);
  args->transpose_b = transpose_b;
  args->a = bytes_of(a);
  args->b = bytes_of(b);
  return true;
}

LaunchResult matmul_reduce_impl(Call call, ffi::AnyBuffer a, ffi::AnyBuffer b, ffi::Result<ffi::AnyBuffer> result,
                                ffi::Result<ffi::AnyBuffer> partial, int64_t group, std::string_view site,
                                bool transpose_b, bool scatter) {
  const Caller caller = find_caller(call, group, site);
  if (caller.error) return fail_call(*caller.error);
  MatmulReduceArgs args{};
  if (!decode_factors(a, b, *result, transpose_b, &args)) return fail_call(bad_dtype("matmul with a reduction"));
  const int64_t ranks = caller.group->size();
  Shapes shapes("matmul with a reduction");
  shapes.expect("b", b, {transpose_b ? args.n : args.k, transpose_b ? args.k : args.n})
      .expect("result", *result, {scatter ? args.m / ranks : args.m, args.n})
      .expect("partial", *partial, {args.m, args.n})
      .require("the rows must be a multiple of the ranks", !scatter || args.m % ranks == 0);
  if (shapes.error()) return fail_call(*shapes.error());
  args.scatter = scatter;
  args.result = bytes_of(result);
  args.partial = bytes_of(partial);
  return launch_matmul(call, caller.group, caller.seat, caller.site, args);
}

LaunchResult gather_matmul_impl(Call call, ffi::AnyBuffer a, ffi::AnyBuffer b, ffi::Result<ffi::AnyBuffer> result,
                                ffi::Result<ffi::AnyBuffer> gathered, int64_t group, std::string_view site,
                                bool transpose_b) {
  const Caller caller = find_caller(call, group, site);
  if (caller.error) return fail_call(*caller.error);
  GatherMatmulArgs args{};
  if (!decode_factors(a, b, *result, transpose_b, &args)) return fail_call(bad_dtype("all_gather_matmul"));
  const int64_t ranks = caller.group->size();
  Shapes shapes("all_gather_matmul");
  shapes.expect("b", b, {transpose_b ? args.n : args.k, transpose_b ? args.k : args.n})
      .expect("result", *result, {ranks * args.m, args.n})
      .expect("gathered", *gathered, {ranks * args.m, args.k});
  if (shapes.error()) return fail_call(*shapes.error());
  args.result = bytes_of(result);
  args.gathered = bytes_of(gathered);
  return launch_matmul(call, caller.group, caller.seat, caller.site, args);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(matmul_reduce_handler, matmul_reduce_impl,
                              ffi::Ffi::Bind()
                                  .Ctx<Call>()
                                  .Arg<ffi::AnyBuffer>()  // a
                                  .Arg<ffi::AnyBuffer>()  // b
                                  .Ret<ffi::AnyBuffer>()  // result
                                  .Ret<ffi::AnyBuffer>()  // partial
                                  .Attr<int64_t>("group")
                                  .Attr<std::string_view>("site")
                                  .Attr<bool>("transpose_b")
                                  .Attr<bool>("scatter"),
                              {kTraits});

XLA_FFI_DEFINE_HANDLER_SYMBOL(gather_matmul_handler, gather_matmul_impl,
                              ffi::Ffi::Bind()
                                  .Ctx<Call>()
                                  .Arg<ffi::AnyBuffer>()  // a
                                  .Arg<ffi::AnyBuffer>()  // b
                                  .Ret<ffi::AnyBuffer>()  // result
                                  .Ret<ffi::AnyBuffer>()  // gathered
                                  .Attr<int64_t>("group")
                                  .Attr<std::string_view>("site")
                                  .Attr<bool>("transpose_b"),
                              {kTraits});

}  // namespace jax_ep
