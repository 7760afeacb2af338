"""Whole models, to read and to copy: Qwen3-MoE, GPT-OSS and DeepSeek-V3."""
