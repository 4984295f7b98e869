"""What the programs compute, and who computes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import write_tiny
from support.owners import OwnerHarness
from support.rngd import SHORT, greedy, load, opened

from rowlock.bindings.cpu.binding import CpuBinding
from rowlock.bindings.device import DeviceError, DeviceFault, Sampling
from rowlock.v1.errors import OwnerError, Reason

PROMPTS = [(5,), (104, 101, 108, 108, 111), tuple(range(64)), tuple(range(65)), (200,) * 150]
# Where the vendor's custom operation gets the executor of a graph from.
EXECUTOR = "furiosa.torch._module.dfg.DfgExecutor"


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_tokens_are_those_of_the_cpu_binding(tmp_path: Path, programs: Path, seed: int) -> None:
    checkpoint = write_tiny(tmp_path / "model", seed=seed, dtype="F32", **SHORT)
    cpu, rngd = CpuBinding(threads=1), opened(programs)
    expected, found = load(cpu, checkpoint), load(rngd, checkpoint)
    for prompt in PROMPTS:
        assert greedy(found, prompt) == greedy(expected, prompt), f"seed {seed}, prompt {prompt}"
    assert rngd.counters.compiles == 0, "the weights decide no program"
    cpu.close()
    rngd.close()


def test_neighbours_do_not_disturb(base: Path, programs: Path) -> None:
    binding = opened(programs)
    runtime = load(binding, base)
    alone = [greedy(runtime, prompt, 4) for prompt in PROMPTS[:3]]
    sequences = [runtime.open_sequence(prompt, Sampling(), 100) for prompt in PROMPTS[:3]]
    together: list[list[Any]] = [[] for _ in sequences]
    for _ in range(4):
        for tokens, step in zip(together, runtime.advance(sequences), strict=True):
            tokens.append(step)
    assert together == alone
    binding.close()


def test_each_token_is_one_execution(base: Path, programs: Path) -> None:
    binding = opened(programs)
    runtime = load(binding, base)
    for prompt, executions in [((5,), 10), (tuple(range(64)), 10), (tuple(range(65)), 11), ((1,) * 150, 12)]:
        before = binding.counters.executions
        greedy(runtime, prompt, 10)
        assert binding.counters.executions - before == executions, f"a prompt of {len(prompt)}"
    binding.close()


def test_a_graph_that_raises_fails_the_request(owner: OwnerHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    before = owner.tokens()

    class Broken:
        def __init__(self, dfg: object) -> None:
            raise RuntimeError("planted: no evaluator")

    with monkeypatch.context() as patch:
        patch.setattr(EXECUTOR, Broken)
        with pytest.raises(OwnerError, match="planted: no evaluator") as caught:
            owner.tokens()
        assert caught.value.reason is Reason.DEVICE_FAILED
    assert owner.tokens() == before


def test_what_the_graph_answers_is_believed(base: Path, programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the vendor's evaluator says is what comes out: nothing of ours computes beside it."""
    from furiosa.torch._module import dfg  # noqa: PLC0415

    real = dfg.DfgExecutor

    class Liar:
        def __init__(self, graph: object) -> None:
            self._inner = real(graph)

        def execute(self, inputs: object, **parameters: object) -> list[torch.Tensor]:
            logits, states = self._inner.execute(inputs, **parameters)
            return [torch.nn.functional.one_hot(torch.tensor([77]), logits.shape[1]).to(logits.dtype), states]

    binding = opened(programs)
    runtime = load(binding, base)
    assert greedy(runtime, (5,), 3) != [77, 77, 77]
    monkeypatch.setattr(EXECUTOR, Liar)
    assert greedy(runtime, (5,), 3) == [77, 77, 77]
    binding.close()


def test_a_panic_of_the_evaluator_is_a_device_error(base: Path, programs: Path) -> None:
    binding = opened(programs)
    runtime = load(binding, base)
    binding.memory._live[runtime.allocations["norm"].id].tensor = torch.zeros(1, 3)  # the program wants another shape
    with pytest.raises(DeviceError, match="decoder-1x256") as caught:
        greedy(runtime, (5,))
    assert caught.value.fault is DeviceFault.LOST
    binding.close()
