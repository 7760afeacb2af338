// The FFI handlers of the ops on rows, and of marks.
#include "bindings/handler.h"
#include "kernels/moe/args.h"
#include "kernels/ragged/args.h"
#include "kernels/sparse/args.h"

namespace jax_ep {

namespace {

// The results are the operands, in place. So a mark comes after what makes them, and before what takes them.
ffi::Error execute_mark(Call call, ffi::RemainingArgs arguments, ffi::RemainingRets returned,
                        ffi::Dictionary attributes) {
  const CallBuffers buffers(arguments, returned);
  std::optional<std::string> error = compare({buffers.results.size(), buffers.results.size()}, buffers);
  for (size_t i = 0; i < buffers.results.size() && !error; ++i)
    error = compare_places("a result", buffers.operands[i], buffers.results[i]);
  if (error) return {ffi::ErrorCode::kInvalidArgument, "mark: " + *error};
  const Attributes settings(attributes);
  const Caller caller = find_caller(call, "mark", settings.integer("group"));
  if (caller.error) return *caller.error;
  return mark(call, caller.group->marks(caller.rank_id), settings.option("begins").value_or(false),
              number_of_site(settings.text("site").value_or("")));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(mark_handler, execute_mark,
                              ffi::Ffi::Bind().Ctx<Call>().RemainingArgs().RemainingRets().Attrs(), {kTraits});

std::vector<BoundOp> bind_row_ops() { return {JAX_EP_ROW_OPS(JAX_EP_BIND)}; }

}  // namespace jax_ep
