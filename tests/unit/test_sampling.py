"""Choosing tokens."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from rowlock.bindings.device import Sampling
from rowlock.bindings.model.generation import Sampler

LOGITS = torch.tensor([0.0, 3.0, 1.0, 2.0, -5.0])


def draws(sampling: Sampling, count: int = 400) -> Counter[int]:
    sampler = Sampler(sampling)
    return Counter(sampler.choose(LOGITS) for _ in range(count))


def test_greedy_takes_the_largest() -> None:
    assert draws(Sampling(), 3) == {1: 3}


def test_top_k_keeps_k() -> None:
    assert set(draws(Sampling(temperature=2, top_k=2))) == {1, 3}
    assert set(draws(Sampling(temperature=2, top_k=99), 3000)) >= {0, 1, 2, 3}


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    # softmax: token 1 has 0.64, token 3 has 0.24, token 2 has 0.09
    assert set(draws(Sampling(temperature=1, top_p=0.5))) == {1}
    assert set(draws(Sampling(temperature=1, top_p=0.7))) == {1, 3}
    assert set(draws(Sampling(temperature=1, top_p=0.9), 2000)) == {1, 3, 2}


def test_frequencies_follow_the_softmax() -> None:
    found = draws(Sampling(temperature=1, seed=3), 4000)
    for token, share in enumerate(LOGITS.softmax(-1).tolist()):
        assert found[token] / 4000 == pytest.approx(share, abs=0.03)


def test_a_seed_repeats_and_another_differs() -> None:
    def sequence(seed: int) -> list[int]:
        sampler = Sampler(Sampling(temperature=1.5, seed=seed))
        return [sampler.choose(LOGITS) for _ in range(50)]

    assert sequence(1) == sequence(1)
    assert sequence(1) != sequence(2)
