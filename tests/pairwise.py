"""Parametrize a test with few rows in which any two values of different columns meet."""

import random
from itertools import combinations

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


def pairwise(columns, **options):
    """Return the mark that parametrizes over `pairwise_rows`.

    A key may name several arguments, "causal, form", and its values are then tuples.
    """
    names = [key.replace(" ", "").split(",") for key in columns]
    rows = [
        [
            x
            for key, value in zip(names, row, strict=True)
            for x in (value if len(key) > 1 else [value])
        ]
        for row in pairwise_rows(*map(list, columns.values()))
    ]
    return pytest.mark.parametrize([name for key in names for name in key], rows, **options)
