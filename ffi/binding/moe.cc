// FFI handlers of dispatch, scatter and combine: decode, check, launch. Shapes are checked where the op is traced.
#include "binding/decode.h"
#include "binding/handlers.h"

namespace jax_ep {
namespace {

LaunchResult dispatch_impl(Call call, ffi::AnyBuffer tokens, I32 expert_ids, F32 weights,
                           ffi::Result<ffi::AnyBuffer> received, ffi::Result<F32> scales, ffi::Result<I32> group_sizes,
                           ffi::Result<I32> targets, ffi::Result<I32> rows, ffi::Result<F32> arrived,
                           ffi::Result<I32> counts, ffi::Result<I32> dropped, ffi::Result<I32> invalid,
                           ffi::Result<I32> scratch, ffi::Result<U8> landing, int64_t group, int32_t alignment,
                           bool drop, bool wire_float8) {
  const Caller caller = find_caller(call, group);
  if (caller.error) return fail_call(*caller.error);
  const std::optional<DType> dtype = dtype_of(tokens.element_type());
  if (!dtype) return fail_call(bad_dtype("dispatch"));
  DispatchArgs args{};
  args.dtype = *dtype;
  args.num_tokens = dim(expert_ids, 0);
  args.top_k = dim(expert_ids, 1);
  args.hidden = dim(tokens, 1);
  args.num_experts = dim(*group_sizes, 0) * caller.group->size();
  args.capacity = dim(*received, 0);
  args.alignment = alignment;
  args.drop = drop;
  args.wire_float8 = wire_float8;
  args.rows_float8 = dim(*scales, 1) > 0;
  args.tokens = bytes_of(tokens);
  args.expert_ids = expert_ids.typed_data();
  args.weights = weights.typed_data();
  args.received = bytes_of(received);
  args.scales = scales->typed_data();
  args.group_sizes = group_sizes->typed_data();
  args.targets = targets->typed_data();
  args.rows = rows->typed_data();
  args.arrived = arrived->typed_data();
  args.counts = counts->typed_data();
  args.dropped = dropped->typed_data();
  args.invalid = invalid->typed_data();
  args.scratch = scratch->typed_data();
  args.few = are_few(args.num_tokens, args.top_k);
  args.early = early_tokens(args.num_tokens, args.top_k, args.wire_float8, args.rows_float8);
  args.landing = reinterpret_cast<char*>(landing->typed_data());
  args.landing_bytes = static_cast<int64_t>(landing->size_bytes());
  return launch(call, caller.group, caller.seat, args);
}

LaunchResult scatter_impl(Call call, ffi::AnyBuffer tokens, I32 targets, I32 rows, I32 counts,
                          ffi::Result<ffi::AnyBuffer> received, int64_t group, int32_t alignment) {
  const Caller caller = find_caller(call, group);
  if (caller.error) return fail_call(*caller.error);
  const std::optional<DType> dtype = dtype_of(tokens.element_type());
  if (!dtype) return fail_call(bad_dtype("combine's backward pass"));
  ScatterArgs args{};
  args.dtype = *dtype;
  args.num_tokens = dim(targets, 0);
  args.top_k = dim(targets, 1);
  args.hidden = dim(tokens, 1);
  args.local_experts = dim(counts, 1);
  args.capacity = dim(*received, 0);
  args.alignment = alignment;
  args.tokens = bytes_of(tokens);
  args.targets = targets.typed_data();
  args.rows = rows.typed_data();
  args.counts = counts.typed_data();
  args.received = bytes_of(received);
  return launch(call, caller.group, caller.seat, args);
}

LaunchResult combine_impl(Call call, ffi::AnyBuffer outputs, F32 weights, F32 scalars, I32 targets, I32 rows,
                          ffi::Result<ffi::AnyBuffer> combined, ffi::Result<F32> returned,
                          ffi::Result<ffi::AnyBuffer> landing, int64_t group) {
  const Caller caller = find_caller(call, group);
  if (caller.error) return fail_call(*caller.error);
  const std::optional<DType> dtype = dtype_of(outputs.element_type());
  if (!dtype) return fail_call(bad_dtype("combine"));
  CombineArgs args{};
  args.dtype = *dtype;
  args.num_tokens = dim(targets, 0);
  args.top_k = dim(targets, 1);
  args.hidden = dim(outputs, 1);
  args.capacity = dim(outputs, 0);
  args.outputs = bytes_of(outputs);
  args.weights = data_or_null(weights);
  args.scalars = data_or_null(scalars);
  args.targets = targets.typed_data();
  args.rows = rows.typed_data();
  args.combined = bytes_of(combined);
  args.returned = data_or_null(*returned);
  args.landing = bytes_of(landing);
  return launch(call, caller.group, caller.seat, args);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(dispatch_handler, dispatch_impl,
                              ffi::Ffi::Bind()
                                  .Ctx<Call>()
                                  .Arg<ffi::AnyBuffer>()  // tokens
                                  .Arg<I32>()             // expert_ids
                                  .Arg<F32>()             // weights
                                  .Ret<ffi::AnyBuffer>()  // received
                                  .Ret<F32>()             // scales
                                  .Ret<I32>()             // group_sizes
                                  .Ret<I32>()             // targets
                                  .Ret<I32>()             // rows
                                  .Ret<F32>()             // arrived
                                  .Ret<I32>()             // counts
                                  .Ret<I32>()             // dropped
                                  .Ret<I32>()             // invalid
                                  .Ret<I32>()             // scratch
                                  .Ret<U8>()              // landing
                                  .Attr<int64_t>("group")
                                  .Attr<int32_t>("alignment")
                                  .Attr<bool>("drop")
                                  .Attr<bool>("wire_float8"),
                              {kTraits});

XLA_FFI_DEFINE_HANDLER_SYMBOL(scatter_handler, scatter_impl,
                              ffi::Ffi::Bind()
                                  .Ctx<Call>()
                                  .Arg<ffi::AnyBuffer>()  // tokens
                                  .Arg<I32>()             // targets
                                  .Arg<I32>()             // rows
                                  .Arg<I32>()             // counts
                                  .Ret<ffi::AnyBuffer>()  // received
                                  .Attr<int64_t>("group")
                                  .Attr<int32_t>("alignment"),
                              {kTraits});

XLA_FFI_DEFINE_HANDLER_SYMBOL(combine_handler, combine_impl,
                              ffi::Ffi::Bind()
                                  .Ctx<Call>()
                                  .Arg<ffi::AnyBuffer>()  // outputs
                                  .Arg<F32>()             // weights
                                  .Arg<F32>()             // scalars
                                  .Arg<I32>()             // targets
                                  .Arg<I32>()             // rows
                                  .Ret<ffi::AnyBuffer>()  // combined
                                  .Ret<F32>()             // returned
                                  .Ret<ffi::AnyBuffer>()  // landing
                                  .Attr<int64_t>("group"),
                              {kTraits});

}  // namespace jax_ep
