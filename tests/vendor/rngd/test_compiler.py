"""The vendor's NPU compiler: it needs no card, but the aarch64 cross compiler, and minutes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from support.checkpoints import TINY, change_rows, negate, write_tiny
from support.owners import running_owner
from support.rngd import digests, model_of

from rowlock.bindings.rngd.engine import CardEngine
from rowlock.bindings.rngd.program import DecoderProgram, StepInputs
from rowlock.bindings.rngd.programs import build_program
from rowlock.bindings.rngd.shape import ModelShape, ProgramShape
from rowlock.bindings.weights import weight_dtype

CROSS = "aarch64-linux-gnu-gcc"
# The smallest decoder that has everything: compiling takes minutes.
SMALL = {
    "num_hidden_layers": 1,
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
SHAPE = ProgramShape(1, 64)

pytestmark = [
    pytest.mark.skipif(
        shutil.which(CROSS) is None,
        reason=f"{CROSS} is not there: apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross",
    ),
    pytest.mark.timeout(3600),
]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("small") / "base", **{**TINY, **SMALL})


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiler")


@pytest.fixture(scope="module")
def binary(small: Path, cache: Path) -> bytes:
    """One program, compiled for a card."""
    return build_program(CardEngine(0, cache), ModelShape.of(*model_of(small)), SHAPE)


def test_a_binary_is_built_and_found_again(small: Path, cache: Path, binary: bytes) -> None:
    assert len(binary) > 10_000
    files = digests(cache)
    assert files, "the compiler keeps what it made"
    assert build_program(CardEngine(0, cache), ModelShape.of(*model_of(small)), SHAPE) == binary
    assert digests(cache) == files


def test_other_weights_give_the_same_binary(small: Path, cache: Path, binary: bytes, tmp_path: Path) -> None:
    """Before and after a row update: the bytes that the owner holds go into the compilation as example inputs."""
    model, files = ModelShape.of(*model_of(small)), digests(cache)
    target = change_rows(small, tmp_path / "target", "model.layers.0.self_attn.q_proj.weight", [0, 5], negate)
    with running_owner(tmp_path / "state", small) as owner:
        for expected in ({}, {"0.qkv": 2}):
            if expected:
                assert owner.transition(target).rows_written == 2
            resident = owner.owner.view.resident
            assert resident is not None
            memory = owner.core.binding.memory._inner
            weights = [memory.tensor(item).clone() for item in resident.runtime.allocations.values()]
            assert compile_with(model, weights, cache) == binary
    assert digests(cache) == files, "nothing was compiled anew"


def compile_with(model: ModelShape, weights: list[torch.Tensor], cache: Path) -> bytes:
    dtype = weight_dtype(model.parents[0])
    example = StepInputs(model.config, dtype).example(model.config, SHAPE)
    module = DecoderProgram(model.config, tuple(parent.name for parent in model.parents))
    return CardEngine(0, cache).build(module, (*example, *weights))
