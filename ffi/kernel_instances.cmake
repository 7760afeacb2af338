# How CUDA kernels are compiled. Those that take up to a minute each are a file for each instance, so that they compile in
# parallel.
#
# kernel_instances(<result> <header> <statement> <instances>...): files with the statement for each @instance@.
function(kernel_instances result header statement)
  set(files)
  foreach(instance ${ARGN})
    set(file ${CMAKE_CURRENT_BINARY_DIR}/instances/${result}_${instance}.cu)
    file(CONFIGURE OUTPUT ${file} CONTENT "#include \"${header}\"\n\nnamespace jax_ep {\n${statement}\n}\n" @ONLY)
    list(APPEND files ${file})
  endforeach()
  set(${result} ${files} PARENT_SCOPE)
endfunction()

# CMake knows nvcc's option for C++20 since 3.26.
set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)

kernel_instances(row_kernels runtime/gpu/define_kernels.h
  "#define JAX_EP_INSTANTIATE(Args) template struct Kernel<@instance@, Args>;\nJAX_EP_VALUE_KERNELS(JAX_EP_INSTANTIATE)"
  float BFloat16 Float16)
kernel_instances(grouped_matmul runtime/cuda/grouped_matmul_tables.h
  "template struct gemm::Kernels<gemm::Family::@instance@>;" tiles swapped gated gathered float8)
kernel_instances(collective_matmul runtime/cuda/overlap_launch.h
  "template struct OverlapKernel<@instance@>;" MatmulReduceArgs AllGatherMatmulArgs MatmulExchangeArgs)
