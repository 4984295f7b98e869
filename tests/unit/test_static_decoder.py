"""The decoder of fixed shapes computes what the resident decoder does: the text of RNGD's programs, run by torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import TINY, random_tensors
from support.reference import new_table

from rowlock.bindings.model.config import ModelConfig, parse_config
from rowlock.bindings.model.decoder import Decoder, Span
from rowlock.bindings.model.layout import build_layout
from rowlock.bindings.rngd.program import DecoderProgram, StepInputs, new_keys_values
from rowlock.bindings.rngd.shape import ProgramShape

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def model(**changes: Any) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    full = {**TINY, **changes}
    config = parse_config(Path(), full)
    layout = build_layout(config, "F32")
    values = {info.name: data for info, data in random_tensors(full, 7, "F32").items()}
    weights = {}
    for name, parent in layout.parents.items():
        data = b"".join(values[item.tensor.name] for item in layout.in_parent(name))
        weights[name] = torch.frombuffer(bytearray(data), dtype=torch.float32).view(parent.rows, -1)
    return config, weights


def run(
    config: ModelConfig, weights: dict[str, torch.Tensor], lengths: list[int], tokens: list[int], capacity: int = 40
) -> torch.Tensor:
    """Logits of the last token, computed in steps of programs of these lengths."""
    program, inputs = DecoderProgram(config, tuple(weights)), StepInputs(config, torch.float32)
    keys_values = new_keys_values(config, ProgramShape(1, capacity), torch.float32)
    past, logits = 0, torch.empty(0)
    for length in lengths:
        shape, chunk = ProgramShape(length, capacity), tokens[past : past + length]
        step = inputs.of(shape, chunk, past)
        with torch.inference_mode():
            logits, states = program(*step, keys_values, *weights.values())
        keys_values[:, :, :, past : past + len(chunk)] = states[:, :, :, : len(chunk)]
        past += len(chunk)
    assert past == len(tokens)
    return logits[0]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": False},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1},
        {"rope_scaling": LLAMA3},
    ],
    ids=["tied", "head", "no-groups", "one-kv-head", "llama3"],
)
@pytest.mark.parametrize("lengths", [[1] * 21, [8, 8, 8], [32], [16, 1, 1, 1, 1, 1], [16, 8]])
def test_logits_are_those_of_the_resident_decoder(changes: dict[str, Any], lengths: list[int]) -> None:
    config, weights = model(**changes)
    tokens = [(7 * index) % 250 for index in range(21)]
    decoder = Decoder(config, weights)
    expected = decoder.forward([Span(torch.tensor(tokens), new_table(decoder, 40))])[0]
    found = run(config, weights, lengths, tokens)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert found.argmax() == expected.argmax()


def test_a_step_that_is_not_full_is_as_good() -> None:
    config, weights = model()
    torch.testing.assert_close(
        run(config, weights, [8], [1, 2, 3]), run(config, weights, [3], [1, 2, 3]), rtol=1e-5, atol=1e-5
    )


def test_what_lies_beyond_the_past_is_not_seen() -> None:
    config, weights = model()
    program, inputs = DecoderProgram(config, tuple(weights)), StepInputs(config, torch.float32)
    shape = ProgramShape(1, 16)
    clean = new_keys_values(config, shape, torch.float32)
    dirty = clean.clone()
    dirty[:, :, :, 5:] = 1e4
    step = inputs.of(shape, [9], past=5)
    with torch.inference_mode():
        assert torch.equal(program(*step, clean, *weights.values())[0], program(*step, dirty, *weights.values())[0])


def test_a_step_stays_in_its_bounds() -> None:
    config, _ = model()
    inputs = StepInputs(config, torch.float32)
    for tokens, past in [([], 0), ([1] * 5, 0), ([1], 16), ([1, 1], 15)]:
        with pytest.raises(AssertionError):
            inputs.of(ProgramShape(4, 16), tokens, past)
