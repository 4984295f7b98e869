"""For each tensor of a model, one changed row by B2 is as good as a fresh load, in every prepared shape."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.checkpoints import FAMILIES, change_rows, negate, random_tensors, write_tiny
from support.owners import OwnerHarness, running_owner
from support.reference import decoder_of, new_table

from rowlock.bindings.checkpoint.directory import Checkpoint
from rowlock.bindings.device import Variant
from rowlock.bindings.model.decoder import Span
from rowlock.bindings.plan import Require

TOKENS = torch.tensor([1, 50, 99, 7, 200, 3, 3, 128])
CONFIGS = {
    "llama": FAMILIES["llama"],
    "qwen3": FAMILIES["qwen3"],
    "gemma3": {**FAMILIES["gemma3"], "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
}
VARIANTS = (Variant(1, 8), Variant(3, 5), Variant(4, 17))
TENSORS = [(family, info.name) for family, config in CONFIGS.items() for info in random_tensors(config, 0)]


def logits(owner: OwnerHarness) -> dict[str, torch.Tensor]:
    """Bits of all logits ``[T, vocab]`` of a prompt, and what the programs that answer requests give in each variant.

    Of a variant: the last token of each prompt, and the token that follows it, all sequences in one step.
    """
    runtime = owner.core.resident.runtime._inner
    decoder = decoder_of(runtime)
    found = {"the plain decoder": decoder.forward([Span(TOKENS, new_table(decoder, len(TOKENS)))], last_only=False)}
    for variant in VARIANTS:
        prompts = [TOKENS.roll(number).repeat(3)[: variant.length] for number in range(variant.batch)]
        tables = [new_table(decoder, variant.capacity) for _ in prompts]
        spans = [Span(prompt, table, len(prompt)) for prompt, table in zip(prompts, tables, strict=True)]
        found[f"prompts of {variant}"] = runtime._programs.forward(spans)
        found[f"a step of {variant}"] = runtime._programs.forward([Span(TOKENS[:1], table) for table in tables])
    return {name: part.clone().view(torch.int16) for name, part in found.items()}


def equal_in(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Where two of them are the same, bit by bit."""
    return [name for name, part in one.items() if torch.equal(part, other[name])]


@pytest.fixture(scope="module", params=CONFIGS)
def resident(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[OwnerHarness, Path]]:
    """An owner, and the checkpoint that it holds."""
    base = write_tiny(tmp_path_factory.mktemp("base") / request.param, family=request.param, **CONFIGS[request.param])
    with running_owner(tmp_path_factory.mktemp("owner") / "state", base, variants=VARIANTS) as owner:
        yield owner, base


@pytest.mark.parametrize(("resident", "tensor"), TENSORS, indirect=["resident"])
def test_one_row_by_b2_equals_a_fresh_load(resident: tuple[OwnerHarness, Path], tmp_path: Path, tensor: str) -> None:
    owner, base = resident
    before = logits(owner)
    with Checkpoint.open(base) as checkpoint:
        row = checkpoint.tensors[tensor].rows // 2
    if tensor == "model.embed_tokens.weight":
        row = 99  # a token of the prompt
    target = change_rows(base, tmp_path / "target", tensor, [row], negate)
    record = owner.transition(target, Require.B2)
    assert (record.state, record.rows_written) == ("PUBLISHED", 1)
    after = logits(owner)
    with running_owner(tmp_path / "fresh", target, variants=VARIANTS) as fresh:
        assert equal_in(after, logits(fresh)) == list(before), "a B2 is what a fresh load is, everywhere"
    assert equal_in(after, before) == [], "the change reaches the logits, everywhere"
    assert owner.rollback().state == "PUBLISHED"
    assert equal_in(logits(owner), before) == list(before), "a rollback is what was before, everywhere"
    assert owner.verify().ok


@pytest.mark.campaign
def test_a_few_tensors_of_the_real_model(real_model: Path, tmp_path: Path) -> None:
    """The same on real weights; `benchmarks/every_tensor.py` does all of them."""
    with running_owner(tmp_path / "state", real_model) as owner:
        before = logits(owner)
        for index, tensor in enumerate(
            (
                "model.embed_tokens.weight",
                "model.layers.29.self_attn.v_proj.weight",
                "model.layers.3.mlp.up_proj.weight",
            )
        ):
            row = 99 if "embed" in tensor else 5
            target = change_rows(real_model, tmp_path / f"target{index}", tensor, [row], negate)
            assert owner.transition(target, Require.B2).rows_written == 1
            after = logits(owner)
            with running_owner(tmp_path / f"fresh{index}", target) as fresh:
                assert equal_in(after, logits(fresh)) == list(before)
            assert equal_in(after, before) == []
            assert owner.rollback().state == "PUBLISHED"
            assert equal_in(logits(owner), before) == list(before)
