"""MaxText's own train loop with and without jax_ep, for tiny models on 8 virtual CPU devices: equal losses.

    python tests/maxtext_train.py [configuration...]

Needs what `.ci/run nightly` installs for it, in an environment of its own.
"""

# pyright: reportMissingImports=false

import contextlib
import importlib.resources
import importlib.util
import io
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

os.environ |= {
    "DECOUPLE_GCLOUD": "TRUE",
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
}
sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import numpy as np
from maxtext.layers.moe import RoutedMoE
from maxtext.layers.nnx_decoders import NNXDecoder
from maxtext.trainers.pre_train import train
from maxtext.utils import maxtext_utils

import jax_ep
from examples import integrations

STEPS = 5
IN_TREE = importlib.util.find_spec("maxtext.layers.jax_ep_moe") is not None  # docs/maxtext.patch is applied
TINY = (
    "run_name=tiny dataset_type=synthetic enable_checkpointing=false enable_goodput_recording=false log_config=false "
    f"steps={STEPS} per_device_batch_size=1 max_target_length=32 vocab_size=256 override_model_config=true "
    "base_emb_dim=64 base_moe_mlp_dim=64 base_mlp_dim=64 base_num_decoder_layers=2 base_num_query_heads=4 "
    "base_num_kv_heads=4 head_dim=16 attention=dot_product dtype=float32 weight_dtype=float32 matmul_precision=highest "
    "scan_layers=true remat_policy=none num_experts=8 num_experts_per_tok=2 load_balance_loss_weight=0.01 "
    "model_name=mixtral-8x7b ici_expert_parallelism=4 ici_fsdp_parallelism=2 megablox=false learning_rate=1e-3"
)
LATENT = "q_lora_rank=32 kv_lora_rank=32 qk_nope_head_dim=16 qk_rope_head_dim=16 v_head_dim=16 first_num_dense_layers=1"
BUFFER = "moe_dropless_fallback=step use_ring_of_experts=true use_ragged_sort=true moe_log_max_load_ratio=true"
CONFIGURATIONS = {
    "mixtral": "",
    # MaxText's own `sparse_matmul` by `jax_ep.lax.ragged_all_to_all`. Its balance loss is that of one device.
    "exchange": "load_balance_loss_weight=0.0",
    "unscanned": "scan_layers=false",
    "bfloat16": "dtype=bfloat16",
    "deepseek3": f"model_name=deepseek3-test base_num_decoder_layers=3 {LATENT}",
    "gpt_oss": "model_name=gpt-oss-20b",
    "llama4": "model_name=llama4-17b-16e base_num_decoder_layers=4 num_experts_per_tok=1",
    "tensor": "ici_fsdp_parallelism=1 ici_tensor_parallelism=2",
    "context": "ici_fsdp_parallelism=1 ici_context_parallelism=2",
    "fsdp_transpose": "ici_fsdp_parallelism=1 ici_fsdp_transpose_parallelism=2",
    "uneven": "per_device_batch_size=0.75",  # 6 sequences over fsdp 2 and expert 4
    "one_rank": "per_device_batch_size=0.5 ici_fsdp_parallelism=8 ici_expert_parallelism=1",
    "accumulation": "gradient_accumulation_steps=2",
    "pipeline": "ici_fsdp_parallelism=1 ici_pipeline_parallelism=2 num_pipeline_microbatches=2 per_device_batch_size=2",
    "remat": "remat_policy=custom moe_x_sorted=device moe_mlpwi_0=device",
    "explicit": "shard_mode=explicit",
    "buffer": f"ragged_buffer_factor=0.75 {BUFFER}",  # drops in every step, and runs it again without
}
DENSE = {"explicit": "", "buffer": ""}  # MaxText's dense path cannot run these
REPLACED = {RoutedMoE: "sparse_matmul", NNXDecoder: "get_remat_policy", jax.lax: "ragged_all_to_all"}


def losses(name: str, *, by_jax_ep: bool) -> list[float]:
    """Those of MaxText's train loop; without jax_ep by `dense_matmul`, because CPUs have no ragged all-to-all."""
    options = CONFIGURATIONS[name] if by_jax_ep else DENSE.get(name, CONFIGURATIONS[name])
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as opened:
        for owner, what in REPLACED.items():  # the patch puts back what MaxText finds now
            opened.enter_context(mock.patch.object(owner, what, getattr(owner, what)))
        base, metrics = importlib.resources.files("maxtext.configs") / "base.yml", Path(folder, "metrics.json")
        given = dict(word.split("=") for word in f"{TINY} {options}".split())
        given |= {"metrics_file": metrics, "base_output_directory": folder, "sparse_matmul": by_jax_ep}
        if by_jax_ep and IN_TREE:
            given["use_jax_ep"] = True
        config, recorder = train.initialize(["", str(base), *(f"{key}={value}" for key, value in given.items())])
        if by_jax_ep and not IN_TREE:
            group = opened.enter_context(jax_ep.Group(maxtext_utils.get_mesh_from_config(config), "expert"))
            if name == "exchange":
                jax.lax.ragged_all_to_all = jax_ep.lax.ragged_all_to_all
            else:
                integrations.patch("maxtext", group)
        train.run(config, recorder)
        return [json.loads(line)["learning/loss"] for line in metrics.read_text().splitlines()]


def main() -> int:
    failed = 0
    jax.config.update("jax_disable_most_optimizations", True)  # compiling takes most of the time
    for name in sys.argv[1:] or CONFIGURATIONS:
        start = time.monotonic()
        with contextlib.redirect_stdout(io.StringIO()):
            wanted, found = losses(name, by_jax_ep=False), losses(name, by_jax_ep=True)
        jax.clear_caches()
        error = np.abs(np.subtract(found, wanted)).max()
        passed = len(found) == STEPS and error < (1e-3 if name == "bfloat16" else 2e-5)
        failed += not passed
        ends = " ".join(f"{values[0]:.5f} .. {values[-1]:.5f}" for values in (wanted, found))
        print(
            f"{name:15} {ends} off {error:.1e} {time.monotonic() - start:4.0f} s{'' if passed else ' FAILED'}",
            flush=True,
        )
    return failed


if __name__ == "__main__":
    sys.exit(main())
