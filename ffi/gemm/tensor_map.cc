#include "gemm/tensor_map.h"

#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include "comm/text.h"

namespace jax_ep::gemm {
namespace {

constexpr int kBoxBytes = 128;  // of a row

// The driver's encoder, found at run time, because machines without a GPU have no driver to link with.
PFN_cuTensorMapEncodeTiled_v12000 find_encoder() {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult status{};
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &status);
  if (error != cudaSuccess || status != cudaDriverEntryPointSuccess) return nullptr;
  return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(found);
}

CUtensorMapDataType map_type(Element element) {
  switch (element) {
    case Element::float32:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    case Element::float16:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    default:
      return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  }
}

}  // namespace

std::optional<std::string> describe_boxes(const Matrices& matrices, int rows, CUtensorMap* map) {
  static const PFN_cuTensorMapEncodeTiled_v12000 encode = find_encoder();
  if (!encode) return "the CUDA driver has no cuTensorMapEncodeTiled: it must be of CUDA 12 or newer";
  const cuuint64_t bytes = matrices.element == Element::float32 ? 4 : 2;
  const cuuint64_t inner = matrices.inner / (matrices.element == Element::float8 ? 2 : 1), row_bytes = inner * bytes;
  const cuuint64_t sizes[] = {inner, static_cast<cuuint64_t>(matrices.outer), static_cast<cuuint64_t>(matrices.count)};
  const cuuint64_t strides[] = {row_bytes, row_bytes * matrices.outer};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(kBoxBytes / bytes), static_cast<cuuint32_t>(rows), 1};
  const cuuint32_t steps[] = {1, 1, 1};
  const CUresult result = encode(map, map_type(matrices.element), 3, const_cast<void*>(matrices.data), sizes, strides,
                                 box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return std::nullopt;
  return concat("TMA cannot describe [", matrices.count, ", ", matrices.outer, ", ", inner, "] values of ", bytes,
                " bytes: rows must be multiples of 16 bytes, the data aligned to 16 (driver error ", int{result}, ")");
}

}  // namespace jax_ep::gemm
