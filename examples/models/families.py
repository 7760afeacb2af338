"""The models by the `model_type` of their config.json."""

import json
from pathlib import Path
from typing import Any

from . import deepseek_v3, gpt_oss, qwen3_moe

FAMILIES = {"qwen3_moe": qwen3_moe.Config, "gpt_oss": gpt_oss.Config, "deepseek_v3": deepseek_v3.Config}


def config_of(folder: Path) -> Any:
    """The model that a folder's config.json describes.

    Raises:
      ValueError: the model is another, or a field is unknown.
    """
    name = json.loads((folder / "config.json").read_text()).get("model_type")
    if name not in FAMILIES:
        raise ValueError(f"{folder}/config.json: model_type must be one of {', '.join(FAMILIES)}, got {name!r}")
    return FAMILIES[name].from_json(folder)
