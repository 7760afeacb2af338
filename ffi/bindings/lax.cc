// FFI handler of ragged_all_to_all. XLA has already copied `output` into the result, which aliases it.
#include "bindings/decode.h"
#include "bindings/handlers.h"

namespace jax_ep {
namespace {

LaunchResult ragged_all_to_all_impl(Call call, ffi::AnyBuffer operand, ffi::AnyBuffer, I32 input_offsets,
                                    I32 send_sizes, I32 output_offsets, I32 recv_sizes,
                                    ffi::Result<ffi::AnyBuffer> result, int64_t group, std::string_view site) {
  const Caller caller = find_caller(call, group, site);
  if (caller.error) return fail_call(*caller.error);
  const int64_t ranks = caller.group->size(), entries = dim(send_sizes, 0);
  Shapes shapes("ragged_all_to_all");
  shapes.expect("input_offsets", input_offsets, {entries})
      .expect("output_offsets", output_offsets, {entries})
      .expect("recv_sizes", recv_sizes, {entries})
      .require("the slices must be a multiple of the ranks", entries % ranks == 0)
      .require("there are more slices than a mailbox holds", entries / ranks <= kMaxExperts);
  if (shapes.error()) return fail_call(*shapes.error());
  RaggedArgs args{};
  args.slices = dim(send_sizes, 0) / caller.group->size();
  args.operand_rows = dim(operand, 0);
  args.result_rows = dim(*result, 0);
  args.row_bytes = args.result_rows ? static_cast<int64_t>(result->size_bytes()) / args.result_rows : 0;
  args.operand = bytes_of(operand);
  args.input_offsets = input_offsets.typed_data();
  args.send_sizes = send_sizes.typed_data();
  args.output_offsets = output_offsets.typed_data();
  args.recv_sizes = recv_sizes.typed_data();
  args.result = bytes_of(result);
  return launch(call, caller.group, caller.seat, caller.site, args);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(ragged_all_to_all_handler, ragged_all_to_all_impl,
                              ffi::Ffi::Bind()
                                  .Ctx<Call>()
                                  .Arg<ffi::AnyBuffer>()  // operand
                                  .Arg<ffi::AnyBuffer>()  // output
                                  .Arg<I32>()             // input_offsets
                                  .Arg<I32>()             // send_sizes
                                  .Arg<I32>()             // output_offsets
                                  .Arg<I32>()             // recv_sizes
                                  .Ret<ffi::AnyBuffer>()  // result
                                  .Attr<int64_t>("group")
                                  .Attr<std::string_view>("site"),
                              {kTraits});

}  // namespace jax_ep
