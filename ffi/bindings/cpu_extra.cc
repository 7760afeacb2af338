#include "bindings/handlers.h"
#include "runtime/extra.h"

namespace jax_ep {

std::vector<NamedHandler> extra_handlers() {
  return {{"matmul_reduce", matmul_reduce_handler}, {"gather_matmul", gather_matmul_handler}};
}
std::optional<std::string> load_extra_kernels() { return std::nullopt; }

}  // namespace jax_ep
