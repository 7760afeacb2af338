// FFI handlers of the two ops of sparse_all_reduce: decode, check, launch. Shapes are checked where the op is traced.
#include "bindings/decode.h"
#include "bindings/handlers.h"
#include "kernels/sparse/args.h"

namespace jax_ep {
namespace {

LaunchResult sparse_union_impl(Call call, I32 ids, I32 missing, ffi::Result<I32> indices, ffi::Result<I32> slots,
                               ffi::Result<I32> bounds, ffi::Result<I32> all_missing, ffi::Result<I32> scratch,
                               int64_t group, std::string_view site, int32_t num_rows, bool sharded) {
  const Caller caller = find_caller(call, group, site);
  if (caller.error) return fail_call(*caller.error);
  const int64_t ranks = caller.group->size();
  Shapes shapes("sparse_all_reduce");
  shapes.expect("missing", missing, {kMissing})
      .expect("slots", *slots, {ranks, dim(ids, 0)})
      .expect("bounds", *bounds, {ranks + 1})
      .expect("all_missing", *all_missing, {kMissing})
      .expect("scratch", *scratch, {bitmap_scratch(num_rows)})
      .require("the table must have rows", num_rows >= 0);
  if (shapes.error()) return fail_call(*shapes.error());
  SparseUnionArgs args{};
  args.entries = dim(ids, 0);
  args.num_rows = num_rows;
  args.capacity = dim(*indices, 0);
  args.sharded = sharded;
  args.ids = ids.typed_data();
  args.missing = missing.typed_data();
  args.indices = indices->typed_data();
  args.slots = slots->typed_data();
  args.bounds = bounds->typed_data();
  args.all_missing = all_missing->typed_data();
  args.scratch = scratch->typed_data();
  return launch(call, caller.group, caller.seat, caller.site, args);
}

LaunchResult sparse_reduce_impl(Call call, ffi::AnyBuffer values, I32 slots, I32 bounds,
                                ffi::Result<ffi::AnyBuffer> result, ffi::Result<I32> runs, ffi::Result<I32> heads,
                                ffi::Result<I32> next, ffi::Result<I32> members, ffi::Result<I32> begins,
                                ffi::Result<I32> listed, ffi::Result<I32> long_slots, ffi::Result<I32> long_lists,
                                ffi::Result<I32> sent, ffi::Result<ffi::Buffer<ffi::U8>> landing,
                                ffi::Result<F32> partials, int64_t group, std::string_view site, float scale,
                                bool by_count, bool sharded, bool drop) {
  const Caller caller = find_caller(call, group, site);
  if (caller.error) return fail_call(*caller.error);
  const std::optional<DType> dtype = dtype_of(values.element_type());
  if (!dtype) return fail_call(bad_dtype("sparse_all_reduce"));
  const int64_t ranks = caller.group->size(), entries = dim(values, 0), hidden = dim(values, 1), kept = dim(*heads, 0);
  Shapes shapes("sparse_all_reduce");
  shapes.expect("slots", slots, {ranks, entries})
      .expect("bounds", bounds, {ranks + 1})
      .expect("result", *result, {dim(*result, 0), hidden})
      .expect("runs", *runs, {ranks, kept, 2})
      .expect("next", *next, {entries})
      .expect("members", *members, {entries})
      .expect("begins", *begins, {kept})
      .expect("listed", *listed, {1})
      .expect("long_slots", *long_slots, {entries})
      .expect("long_lists", *long_lists, {1})
      .expect("sent", *sent, {ranks})
      .expect("landing", *landing,
              {sparse_landing_bytes(static_cast<int>(ranks), static_cast<int>(kept), static_cast<int>(entries), sharded,
                                    hidden * size_of(*dtype))})
      .expect("partials", *partials, {entries, hidden});
  if (shapes.error()) return fail_call(*shapes.error());
  SparseReduceArgs args{};
  args.dtype = *dtype;
  args.entries = dim(values, 0);
  args.hidden = dim(values, 1);
  args.capacity = dim(*result, 0);
  args.slots_kept = dim(*runs, 1);
  args.landing_room = sparse_landing_room(args.entries, caller.group->size(), sharded);
  args.sharded = sharded;
  args.drop = drop;
  args.by_count = by_count;
  args.scale = scale;
  args.values = bytes_of(values);
  args.slots = slots.typed_data();
  args.bounds = bounds.typed_data();
  args.result = bytes_of(result);
  args.runs = reinterpret_cast<Run*>(runs->typed_data());
  args.heads = heads->typed_data();
  args.next = next->typed_data();
  args.members = members->typed_data();
  args.begins = begins->typed_data();
  args.listed = listed->typed_data();
  args.long_slots = long_slots->typed_data();
  args.long_lists = long_lists->typed_data();
  args.sent = sent->typed_data();
  args.landing = reinterpret_cast<char*>(landing->typed_data());
  args.partials = partials->typed_data();
  return launch(call, caller.group, caller.seat, caller.site, args);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(sparse_union_handler, sparse_union_impl,
                              ffi::Ffi::Bind()
                                  .Ctx<Call>()
                                  .Arg<I32>()  // ids
                                  .Arg<I32>()  // missing
                                  .Ret<I32>()  // indices
                                  .Ret<I32>()  // slots
                                  .Ret<I32>()  // bounds
                                  .Ret<I32>()  // all_missing
                                  .Ret<I32>()  // scratch
                                  .Attr<int64_t>("group")
                                  .Attr<std::string_view>("site")
                                  .Attr<int32_t>("num_rows")
                                  .Attr<bool>("sharded"),
                              {kTraits});

XLA_FFI_DEFINE_HANDLER_SYMBOL(sparse_reduce_handler, sparse_reduce_impl,
                              ffi::Ffi::Bind()
                                  .Ctx<Call>()
                                  .Arg<ffi::AnyBuffer>()        // values
                                  .Arg<I32>()                   // slots
                                  .Arg<I32>()                   // bounds
                                  .Ret<ffi::AnyBuffer>()        // result
                                  .Ret<I32>()                   // runs
                                  .Ret<I32>()                   // heads
                                  .Ret<I32>()                   // next
                                  .Ret<I32>()                   // members
                                  .Ret<I32>()                   // begins
                                  .Ret<I32>()                   // listed
                                  .Ret<I32>()                   // long_slots
                                  .Ret<I32>()                   // long_lists
                                  .Ret<I32>()                   // sent
                                  .Ret<ffi::Buffer<ffi::U8>>()  // landing
                                  .Ret<F32>()                   // partials
                                  .Attr<int64_t>("group")
                                  .Attr<std::string_view>("site")
                                  .Attr<float>("scale")
                                  .Attr<bool>("by_count")
                                  .Attr<bool>("sharded")
                                  .Attr<bool>("drop"),
                              {kTraits});

}  // namespace jax_ep
