"""Tables of tests: every pair of values is in a row, in far fewer rows than the product has."""

from itertools import combinations, product

from pairwise import pairwise, pairwise_rows


def test_every_pair_of_values_is_in_a_row():
    columns = [range(6), "abcd", (True, False), ("x", "y", "z")]
    rows = pairwise_rows(*columns)

    def pairs(rows):
        return {pair for row in rows for pair in combinations(enumerate(row), 2)}

    assert pairs(rows) == pairs(product(*columns))
    assert 24 <= len(rows) <= 30  # of 144
    assert rows == pairwise_rows(*columns)


def test_values_of_one_column_may_be_for_several_arguments():
    names, rows = pairwise(
        {"causal, form": [(True, "full"), (False, "chunk")], "size": [1, 2]}
    ).args
    assert names == ["causal", "form", "size"]
    assert {tuple(row) for row in rows} == {
        (True, "full", 1), (True, "full", 2), (False, "chunk", 1), (False, "chunk", 2),
    }  # fmt: skip


def test_all_other_rows_of_the_product_may_be_slow():
    columns = {"a": range(3), "b": range(3), "c": range(3)}
    fast, cases = pairwise(columns).args[1], pairwise(columns, rest_is_slow=True).args[1]
    rest = [tuple(case.values) for case in cases[len(fast) :]]
    assert cases[: len(fast)] == fast
    assert sorted([*map(tuple, fast), *rest]) == list(product(range(3), repeat=3))
    assert all(mark.name == "slow" for case in cases[len(fast) :] for mark in case.marks)
