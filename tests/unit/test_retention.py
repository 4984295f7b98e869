"""What of the past is kept: by count and bytes, and never less than the offered rollback needs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rowlock.daemon.owner.retention import Kept, Retention, keep
from rowlock.journal.rows import GenerationRow


def row(number: int, undo: str = "DURABLE") -> GenerationRow:
    level = "B1" if undo == "NONE" else "B2"
    return GenerationRow(number, f"t{number}", number - 1 or None, "p", "a", f"w{number}", "/c", "", level, undo)


def judged(
    rows: list[GenerationRow], retention: Retention, size: int = 10, cut_before: frozenset[str] = frozenset()
) -> Kept:
    return keep(rows, rows[0] if rows else None, cut_before, lambda _: size, retention)


def numbers(rows: tuple[GenerationRow, ...]) -> list[int]:
    return [item.generation for item in rows]


ROWS = [row(5), row(4), row(3), row(2), row(1, "NONE")]


def test_by_count_and_by_bytes() -> None:
    by_count = judged(ROWS, Retention(2, 10**9))
    assert (numbers(by_count.undos), numbers(by_count.cut)) == ([5, 4], [3, 2])
    assert set(numbers(by_count.generations)) == {5, 4, 3}, "the undo of 4 leads to 3"
    by_bytes = judged(ROWS, Retention(8, 30))
    assert (numbers(by_bytes.undos), numbers(by_bytes.cut)) == ([5, 4, 3], [2])
    everything = judged(ROWS, Retention())
    assert (numbers(everything.undos), everything.cut) == ([5, 4, 3, 2], ())


def test_the_undo_of_the_current_generation_is_kept_whatever_it_weighs() -> None:
    kept = judged(ROWS, Retention(1, 0), size=10**12)
    assert (numbers(kept.undos), numbers(kept.cut)) == ([5], [4, 3, 2])
    assert {4, 5} <= set(numbers(kept.generations))


def test_an_undo_behind_a_repair_is_the_one_that_rollback_needs() -> None:
    """A repair leads nowhere: its evidence is kept, and so is the undo of the generation that it repaired."""
    rows = [row(6, "EVIDENCE"), row(5, "EVIDENCE"), *ROWS[1:]]
    kept = judged(rows, Retention(1, 0))
    assert (numbers(kept.undos), numbers(kept.cut)) == ([6, 5, 4], [3, 2])
    after_a_reload = judged([row(6, "NONE"), *ROWS], Retention(1, 0))
    assert (numbers(after_a_reload.undos), numbers(after_a_reload.cut)) == ([], [5, 4, 3, 2])


def test_what_was_let_go_stays_so_and_is_not_let_go_twice() -> None:
    kept = judged(ROWS, Retention(), cut_before=frozenset({"t3", "t2"}))
    assert (numbers(kept.undos), kept.cut) == ([5, 4], ())


@given(
    st.lists(st.sampled_from(["DURABLE", "MEMORY", "NONE"]), max_size=12),
    st.integers(1, 5), st.integers(0, 60), st.integers(0, 12),
)  # fmt: skip
def test_the_kept_undos_are_the_newest_without_a_gap(undos: list[str], count: int, nbytes: int, gone: int) -> None:
    rows = [row(len(undos) - index, undo) for index, undo in enumerate(undos)]
    durable = [item for item in rows if item.undo == "DURABLE"]
    cut_before = frozenset(item.transition_id for item in durable[len(durable) - gone :] if item != rows[0])
    kept = judged(rows, Retention(count, nbytes), cut_before=cut_before)
    assert list(kept.undos) == durable[: len(kept.undos)]
    assert list(kept.undos) + list(kept.cut) == [item for item in durable if item.transition_id not in cut_before]
    assert len(kept.undos) <= count
    assert 10 * len(kept.undos) <= max(nbytes, 10)
    for item in kept.undos:
        assert item in kept.generations
        assert item.previous is None or any(other.generation == item.previous for other in kept.generations)
    if rows and rows[0].undo == "DURABLE":
        assert kept.undos[0] == rows[0]
