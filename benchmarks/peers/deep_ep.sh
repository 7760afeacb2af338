#!/bin/bash
# deep_ep.sh DIR: builds DeepEP V1 in DIR, for Hopper. Clones it first, where DIR is empty and there is a network. Needs
# nvcc, torch with the NVSHMEM that it brings, and the headers of libibverbs-dev, in the system's or in DIR's include/.
set -euo pipefail
dir=${1:?a folder for DeepEP}
[ -e "$dir/setup.py" ] || { git clone https://github.com/deepseek-ai/DeepEP "$dir" && git -C "$dir" checkout 567632d; }
cd "$dir"
cuda=$(python3 -c 'from torch.utils.cpp_extension import CUDA_HOME as home; print(home or "/usr/local/cuda")')
mapped='next(line.split()[-1] for line in open("/proc/self/maps") if "libcuda.so" in line)'
mkdir -p lib && ln -sf "$(python3 -c "import ctypes; ctypes.CDLL('libcuda.so.1'); print($mapped)")" lib/libcuda.so
export CUDA_HOME=$cuda CPATH=$cuda/include/cccl:$PWD/include LIBRARY_PATH=$PWD/lib
export TORCH_CUDA_ARCH_LIST=9.0 DISABLE_AGGRESSIVE_PTX_INSTRS=0
env -u NVSHMEM_DIR python3 setup.py build_ext --inplace
python3 -c 'import torch, deep_ep; print(deep_ep.__file__)'
