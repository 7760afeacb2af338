"""Makes the checkpoints of tests/model_cases.py: a small random model of each family in its published layout, and
what transformers computes with it in float32.

    python -m pip install torch transformers accelerate safetensors
    python tests/models/make_fixtures.py

Each folder has the config.json of its model. No test runs this. It takes the first seed for which greedy decoding
chooses clearly, and does not repeat itself.
"""

# pyright: reportMissingImports=false

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers

HERE = Path(__file__).parent
SEQUENCES, LENGTH, GREEDY = 2, 24, 64
Tensor = Any  # torch.Tensor, where torch is installed
State = Iterator[tuple[str, Tensor]]


def normal(*shape: int, std: float | None = None) -> Tensor:
    """bfloat16, by default with 1 / sqrt(fan in) as the standard deviation, for a matrix [out, in]."""
    return (torch.randn(shape) * (shape[-1] ** -0.5 if std is None else std)).bfloat16()


def norm(width: int) -> Tensor:
    return (1 + 0.2 * torch.randn(width)).bfloat16()


def qwen3_moe(c: dict[str, Any]) -> State:
    h, d = c["hidden_size"], c["head_dim"]
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}."
        for name in ("q", "k", "v"):
            heads = c["num_attention_heads" if name == "q" else "num_key_value_heads"]
            yield at + f"self_attn.{name}_proj.weight", normal(heads * d, h)
        yield at + "self_attn.o_proj.weight", normal(h, c["num_attention_heads"] * d)
        yield at + "self_attn.q_norm.weight", norm(d)
        yield at + "self_attn.k_norm.weight", norm(d)
        yield at + "input_layernorm.weight", norm(h)
        yield at + "post_attention_layernorm.weight", norm(h)
        yield at + "mlp.gate.weight", normal(c["num_experts"], h)
        for expert in range(c["num_experts"]):
            for name in ("gate", "up", "down"):
                shape = (c["moe_intermediate_size"], h)
                yield at + f"mlp.experts.{expert}.{name}_proj.weight", normal(*shape[:: -1 if name == "down" else 1])


def gpt_oss(c: dict[str, Any]) -> State:
    h, d, f, e = c["hidden_size"], c["head_dim"], c["intermediate_size"], c["num_local_experts"]
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}."
        for name in ("q", "k", "v"):
            heads = c["num_attention_heads" if name == "q" else "num_key_value_heads"]
            yield at + f"self_attn.{name}_proj.weight", normal(heads * d, h)
            yield at + f"self_attn.{name}_proj.bias", normal(heads * d, std=0.5)
        yield at + "self_attn.o_proj.weight", normal(h, c["num_attention_heads"] * d)
        yield at + "self_attn.o_proj.bias", normal(h, std=0.1)
        yield at + "self_attn.sinks", normal(c["num_attention_heads"], std=1.0)
        yield at + "input_layernorm.weight", norm(h)
        yield at + "post_attention_layernorm.weight", norm(h)
        yield at + "mlp.router.weight", normal(e, h)
        yield at + "mlp.router.bias", normal(e, std=0.5)
        for name, rows, columns in (("gate_up_proj", 2 * f, h), ("down_proj", h, f)):
            blocks = e, rows, columns // 32, 16
            yield at + f"mlp.experts.{name}_blocks", torch.randint(256, blocks, dtype=torch.uint8)
            yield at + f"mlp.experts.{name}_scales", torch.randint(122, 126, blocks[:-1], dtype=torch.uint8)
            yield at + f"mlp.experts.{name}_bias", normal(e, rows, std=0.3)


def deepseek_v3(c: dict[str, Any]) -> State:
    h, heads, rank, rope = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"], c["qk_rope_head_dim"]
    nope, v, e = c["qk_nope_head_dim"], c["v_head_dim"], c["n_routed_experts"]

    def float8(name: str, *shape: int) -> State:
        weight = torch.randn(shape) * shape[-1] ** -0.5 * 1.3
        grid = [-(-size // 128) for size in shape]
        scales = torch.empty(grid)
        for i in range(grid[0]):
            for j in range(grid[1]):
                block = (slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1)))
                scales[i, j] = weight[block].abs().max() / 448
                weight[block] /= scales[i, j]
        yield name + ".weight", weight.to(torch.float8_e4m3fn)
        yield name + ".weight_scale_inv", scales

    def mlp(at: str, width: int) -> State:
        for name in ("gate", "up", "down"):
            yield from float8(f"{at}.{name}_proj", *(width, h)[:: -1 if name == "down" else 1])

    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}."
        yield from float8(at + "self_attn.q_a_proj", c["q_lora_rank"], h)
        yield from float8(at + "self_attn.q_b_proj", heads * (nope + rope), c["q_lora_rank"])
        yield from float8(at + "self_attn.kv_a_proj_with_mqa", rank + rope, h)
        yield from float8(at + "self_attn.kv_b_proj", heads * (nope + v), rank)
        yield from float8(at + "self_attn.o_proj", h, heads * v)
        yield at + "self_attn.q_a_layernorm.weight", norm(c["q_lora_rank"])
        yield at + "self_attn.kv_a_layernorm.weight", norm(rank)
        yield at + "input_layernorm.weight", norm(h)
        yield at + "post_attention_layernorm.weight", norm(h)
        if i < c["first_k_dense_replace"]:
            yield from mlp(at + "mlp", c["intermediate_size"])
            continue
        yield at + "mlp.gate.weight", normal(e, h)
        yield at + "mlp.gate.e_score_correction_bias", 0.1 * torch.randn(e)
        yield from mlp(at + "mlp.shared_experts", c["moe_intermediate_size"] * c["n_shared_experts"])
        for expert in range(e):
            yield from mlp(at + f"mlp.experts.{expert}", c["moe_intermediate_size"])
    at = f"model.layers.{c['num_hidden_layers']}."  # multi-token prediction: a few of its tensors
    yield at + "enorm.weight", norm(h)
    yield at + "eh_proj.weight", normal(8, 2 * h)
    yield at + "shared_head.norm.weight", norm(h)


FAMILIES: dict[str, Callable[[dict[str, Any]], State]] = {
    "qwen3_moe": qwen3_moe,
    "gpt_oss": gpt_oss,
    "deepseek_v3": deepseek_v3,
}
DEQUANTIZED = {
    "gpt_oss": lambda: transformers.Mxfp4Config(dequantize=True),
    "deepseek_v3": lambda: transformers.FineGrainedFP8Config(dequantize=True),
}


def write_checkpoint(folder: Path, state: dict[str, Tensor]) -> None:
    """In two files and an index."""
    names = list(state)
    files = {name: f"model-{1 + (i >= len(names) // 2):05}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in sorted(set(files.values())):
        part = {name: tensor for name, tensor in state.items() if files[name] == file}
        safetensors.torch.save_file(part, folder / file, metadata={"format": "pt"})
    size = sum(tensor.nbytes for tensor in state.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(files.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index) + "\n")


def expected(name: str, folder: Path, config: dict[str, Any]) -> dict[str, Tensor] | None:
    """Logits, the routers' choices in ascending order, and greedy tokens, in float32. None if they are not clear."""
    options = {"quantization_config": DEQUANTIZED[name]()} if name in DEQUANTIZED else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", **options
    ).eval()
    assert all(each.dtype == torch.float32 for each in model.parameters())
    ids = torch.randint(config["vocab_size"], (SEQUENCES, LENGTH))
    choices: list[Tensor] = []
    routers = [m for n, m in model.named_modules() if type(m).__name__.lower().endswith("topkrouter")]
    hooks = [each.register_forward_hook(lambda _, __, out: choices.append(out[2].sort()[0])) for each in routers]
    with torch.no_grad():
        logits = model(ids).logits
        expert_ids = torch.stack(choices).reshape(len(routers), SEQUENCES, LENGTH, -1)
        for hook in hooks:
            hook.remove()
        options = {"attention_mask": torch.ones_like(ids), "eos_token_id": None, "pad_token_id": 0}
        greedy = model.generate(ids, do_sample=False, max_new_tokens=GREEDY, **options)
        best = model(greedy).logits[:, LENGTH - 1 : -1].topk(2).values
    margin = float((best[..., 0] - best[..., 1]).min())
    print(f"{name}: greedy choices differ by {margin:.4f}, logits up to {float(logits.abs().max()):.1f}")
    if margin < 5e-4 or len(expert_ids.unique()) < 8 or any(len(each.unique()) < 8 for each in greedy[:, LENGTH:]):
        return None
    return {
        "ids": ids.int(),
        "logits": logits.contiguous(),
        "expert_ids": expert_ids.int(),
        "greedy": greedy[:, LENGTH:].int().contiguous(),
    }


def main() -> None:
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    for name, family in FAMILIES.items():
        folder = HERE / name
        config = json.loads((folder / "config.json").read_text())
        for seed in itertools.count():
            torch.manual_seed(seed)
            ends = {"model.norm.weight": norm(config["hidden_size"])}
            ends |= {"model.embed_tokens.weight": normal(config["vocab_size"], config["hidden_size"], std=1.0)}
            ends |= {"lm_head.weight": normal(config["vocab_size"], config["hidden_size"])}
            write_checkpoint(folder, ends | dict(family(config)))
            if found := expected(name, folder, config):
                safetensors.torch.save_file(found, folder / "expected.safetensors", metadata=versions)
                break
        size = sum(file.stat().st_size for file in folder.iterdir())
        print(f"{name}: {size} bytes")
        assert size <= 2**20, "at most 1 MB"
    (HERE / "versions.json").write_text(json.dumps(versions, indent=1) + "\n")


if __name__ == "__main__":
    main()
