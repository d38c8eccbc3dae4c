"""Parametrize a test with few rows in which any two values of different columns meet."""

import random
from itertools import combinations, product

import pytest


def pairwise_rows(*columns):
    """Return rows that hold every pair of values of two columns, chosen greedily.

    The rows are the same in every process. A column may hold tuples: its values stay together.
    """
    rng = random.Random(0)
    missing = {
        (i, a, j, b): None  # ordered, unlike a set
        for i, j in combinations(range(len(columns)), 2)
        for a in range(len(columns[i]))
        for b in range(len(columns[j]))
    }

    def pairs(row):
        return [(i, row[i], j, row[j]) for i, j in combinations(range(len(row)), 2)]

    rows = []
    while missing:
        i, a, j, b = next(iter(missing))
        candidates = []
        for _ in range(30):
            row = [rng.randrange(len(column)) for column in columns]
            row[i], row[j] = a, b
            candidates.append(row)
        best = max(candidates, key=lambda row: sum(pair in missing for pair in pairs(row)))
        for pair in pairs(best):
            missing.pop(pair, None)
        rows.append([column[at] for column, at in zip(columns, best, strict=True)])
    return rows


def pairwise(columns, *, rest_is_slow=False, **options):
    """Return the mark that parametrizes over `pairwise_rows`.

    A key may name several arguments, "causal, form", and its values are then tuples. With
    `rest_is_slow` all other rows of the product are there too, marked slow.
    """
    names = [key.replace(" ", "").split(",") for key in columns]
    values = [list(column) for column in columns.values()]

    def flat(row):
        pairs = zip(names, row, strict=True)
        return [x for key, value in pairs for x in (value if len(key) > 1 else [value])]

    rows = pairwise_rows(*values)
    cases = [flat(row) for row in rows]
    if rest_is_slow:
        rest = [flat(row) for row in product(*values) if list(row) not in rows]
        cases += [pytest.param(*case, marks=pytest.mark.slow) for case in rest]
    return pytest.mark.parametrize([name for key in names for name in key], cases, **options)
