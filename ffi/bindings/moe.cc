// FFI handlers of dispatch, scatter and combine: decode, check, launch. Shapes are checked where the op is traced.
#include "bindings/decode.h"
#include "bindings/handlers.h"

namespace jax_ep {
namespace {

LaunchResult dispatch_impl(Call call, ffi::AnyBuffer tokens, I32 expert_ids, F32 weights,
                           ffi::Result<ffi::AnyBuffer> received, ffi::Result<F32> scales, ffi::Result<I32> group_sizes,
                           ffi::Result<I32> targets, ffi::Result<I32> rows, ffi::Result<F32> arrived,
                           ffi::Result<I32> counts, ffi::Result<I32> dropped, ffi::Result<I32> invalid,
                           ffi::Result<I32> scratch, ffi::Result<U8> landing, int64_t group, std::string_view site,
                           int32_t alignment, bool drop, bool wire_float8) {
  const Caller caller = find_caller(call, group, site);
  if (caller.error) return fail_call(*caller.error);
  const std::optional<DType> dtype = dtype_of(tokens.element_type());
  if (!dtype) return fail_call(bad_dtype("dispatch"));
  const int64_t ranks = caller.group->size(), num_tokens = dim(expert_ids, 0), top_k = dim(expert_ids, 1);
  const int64_t capacity = dim(*received, 0), hidden = dim(tokens, 1), local = dim(*group_sizes, 0);
  const bool rows_float8 = dim(*scales, 1) > 0;
  const int early = early_tokens(num_tokens, top_k, wire_float8, rows_float8);
  Shapes shapes("dispatch");
  shapes.expect("tokens", tokens, {num_tokens, hidden})
      .expect("weights", weights, {num_tokens, top_k})
      .expect("received", *received, {capacity, hidden})
      .expect("scales", *scales, {capacity, rows_float8 ? hidden / kScaleBlock : 0})
      .expect("targets", *targets, {num_tokens, top_k})
      .expect("rows", *rows, {ranks, num_tokens, top_k})
      .expect("arrived", *arrived, {ranks, num_tokens, top_k})
      .expect("counts", *counts, {ranks, local})
      .expect("scratch", *scratch, {route_scratch(static_cast<int>(local * ranks))})
      .expect("landing", *landing,
              {ranks * early, landing_slot_bytes(hidden, size_of(*dtype), wire_float8, rows_float8)})
      .require("there are more experts than a mailbox holds", local * ranks <= kMaxExperts)
      .require("alignment must be positive", alignment > 0);
  if (shapes.error()) return fail_call(*shapes.error());
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
  args.rows_float8 = rows_float8;
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
  args.early = early;
  args.landing = reinterpret_cast<char*>(landing->typed_data());
  args.landing_bytes = static_cast<int64_t>(landing->size_bytes());
  return launch(call, caller.group, caller.seat, caller.site, args);
}

LaunchResult scatter_impl(Call call, ffi::AnyBuffer tokens, I32 targets, I32 rows, I32 counts,
                          ffi::Result<ffi::AnyBuffer> received, int64_t group, std::string_view site,
                          int32_t alignment) {
  const Caller caller = find_caller(call, group, site);
  if (caller.error) return fail_call(*caller.error);
  const std::optional<DType> dtype = dtype_of(tokens.element_type());
  if (!dtype) return fail_call(bad_dtype("combine's backward pass"));
  const int64_t ranks = caller.group->size(), num_tokens = dim(targets, 0), top_k = dim(targets, 1);
  Shapes shapes("combine's backward pass");
  shapes.expect("tokens", tokens, {num_tokens, dim(tokens, 1)})
      .expect("rows", rows, {ranks, num_tokens, top_k})
      .expect("counts", counts, {ranks, dim(counts, 1)})
      .expect("received", *received, {dim(*received, 0), dim(tokens, 1)})
      .require("alignment must be positive", alignment > 0);
  if (shapes.error()) return fail_call(*shapes.error());
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
  return launch(call, caller.group, caller.seat, caller.site, args);
}

LaunchResult combine_impl(Call call, ffi::AnyBuffer outputs, F32 weights, F32 scalars, I32 targets, I32 rows,
                          ffi::Result<ffi::AnyBuffer> combined, ffi::Result<F32> returned,
                          ffi::Result<ffi::AnyBuffer> landing, int64_t group, std::string_view site) {
  const Caller caller = find_caller(call, group, site);
  if (caller.error) return fail_call(*caller.error);
  const std::optional<DType> dtype = dtype_of(outputs.element_type());
  if (!dtype) return fail_call(bad_dtype("combine"));
  const int64_t ranks = caller.group->size(), num_tokens = dim(targets, 0), top_k = dim(targets, 1);
  Shapes shapes("combine");
  shapes.expect("rows", rows, {ranks, num_tokens, top_k})
      .expect("combined", *combined, {num_tokens, dim(outputs, 1)})
      .expect("landing", *landing, {ranks, num_tokens, dim(outputs, 1)});
  if (weights.element_count()) shapes.expect("weights", weights, {ranks, num_tokens, top_k});
  if (scalars.element_count())
    shapes.expect("scalars", scalars, {ranks, num_tokens, top_k}).expect("returned", *returned, {num_tokens, top_k});
  if (shapes.error()) return fail_call(*shapes.error());
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
  return launch(call, caller.group, caller.seat, caller.site, args);
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
                                  .Attr<std::string_view>("site")
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
                                  .Attr<std::string_view>("site")
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
                                  .Attr<int64_t>("group")
                                  .Attr<std::string_view>("site"),
                              {kTraits});

}  // namespace jax_ep
