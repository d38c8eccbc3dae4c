"""ListOps: expressions, their values, and tables of them."""

import re
from itertools import islice, product

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from onescan.experiments.data.long_range import (
    ListOps,
    ListOpsConfig,
    evaluate,
    read_listops,
    write_listops,
)
from onescan.inputs.listops import PADDING, VOCABULARY, decode, encode

SMALL = ListOpsConfig(min_length=4, max_length=30, max_depth=4, max_args=4)
OPERATIONS = {
    "[MAX": np.max,
    "[MIN": np.min,
    "[MED": lambda values: int(np.median(values)),
    "[SM": lambda values: np.sum(values) % 10,
}


def slow_value(text):
    """Evaluate an expression by replacing its innermost part, again and again."""
    innermost = re.compile(r"(\[[A-Z]+) ([0-9 ]+?) \]")
    while not text.isdigit():
        operator, arguments = innermost.search(text).groups()
        value = OPERATIONS[operator]([int(digit) for digit in arguments.split()])
        text = innermost.sub(str(value), text, count=1)
    return int(text)


def depth(text):
    """Levels of a tree, from its brackets."""
    steps = [symbol.startswith("[") - (symbol == "]") for symbol in text.split()]
    return 1 + max(np.cumsum(steps))


def max_args(text):
    """Maximum arguments of an operator, from its brackets."""
    counts, done = [0], []
    for symbol in text.split():
        if symbol == "]":
            done.append(counts.pop())
        else:
            counts[-1] += 1
            if symbol.startswith("["):
                counts.append(0)
    return max(done)


@pytest.mark.slow
def test_examples_have_correct_values_and_sizes():
    data, texts = ListOps(), []
    for split, index in product(("train", "val", "test"), range(5)):
        tokens, label = data.example(split, index)
        texts.append(decode(tokens))
        assert 500 < len(tokens) < 2000
        assert label == evaluate(tokens) == slow_value(texts[-1])
    assert max(map(depth, texts)) == max(map(max_args, texts)) == 10
    examples = [ListOps(SMALL).example("train", index) for index in range(500)]
    texts = [decode(tokens) for tokens, _ in examples]
    lengths = [len(text.split()) for text in texts]
    assert (min(lengths), max(lengths)) == (4, 30)
    assert {depth(text) for text in texts} == {max_args(text) for text in texts} == {2, 3, 4}
    assert np.bincount([label for _, label in examples], minlength=10).min() > 15


def test_operators_and_digits_have_the_published_probabilities():
    data = ListOps(ListOpsConfig(min_length=4, max_length=100, max_depth=3, max_args=4))
    is_operator = []  # of the root's arguments, which the size does not bias
    for index in range(1500):
        level = 0
        for symbol in decode(data.example("train", index)[0]).split():
            is_operator += [symbol in OPERATIONS] * (level == 1 and symbol != "]")
            level += (symbol in OPERATIONS) - (symbol == "]")
    share = np.mean(is_operator)
    assert share == pytest.approx(0.25, abs=4 * (0.25 * 0.75 / len(is_operator)) ** 0.5)
    data = ListOps(ListOpsConfig(min_length=20, max_length=60, max_depth=5, max_args=5))
    examples = [data.example("train", index)[0] for index in range(150)]
    symbols = decode([token for tokens in examples for token in tokens]).split()
    for kind in ([*OPERATIONS], [*"0123456789"]):
        counts = np.array([symbols.count(symbol) for symbol in kind])
        assert counts == pytest.approx(counts.mean(), abs=4 * np.sqrt(counts.mean()))


def test_examples_depend_only_on_seed_split_and_index():
    data, again = ListOps(SMALL), ListOps(SMALL)
    forwards = [data.example("train", index) for index in range(20)]
    assert [again.example("train", index) for index in reversed(range(20))] == forwards[::-1]
    other = ListOps(ListOpsConfig(min_length=4, max_length=30, max_depth=4, max_args=4, seed=1))
    for different, split in ((data, "val"), (other, "train")):
        assert [different.example(split, index) for index in range(20)] != forwards


def test_splits_are_disjoint():
    data = ListOps(ListOpsConfig(min_length=4, max_length=4, max_depth=2, max_args=2))
    drawn = {  # of 400 expressions
        split: {tuple(data.example(split, index)[0]) for index in range(700)}
        for split in ("train", "val", "test")
    }
    assert sum(map(len, drawn.values())) == len(set.union(*drawn.values())) > 380
    assert len(drawn["train"]) > 1.5 * max(len(drawn["val"]), len(drawn["test"]))


@given(st.lists(st.sampled_from(VOCABULARY[1:]), max_size=8))
@example(["[MAX", "2", "9", "[MIN", "4", "7", "]", "0", "]"])
@example(["[MED", "1", "4", "]"])
@example(["[MED", "9", "0", "5", "]"])
@example(["[MIN", "[SM", "5", "5", "]", "3", "]"])
def test_any_tokens_are_evaluated_or_rejected(symbols):
    text = " ".join(symbols)
    tree = re.sub(r"\[[A-Z]+", "[", text)  # a digit, or a list of trees
    while (less := re.sub(r"\[(?: \d)+ \]", "0", tree)) != tree:
        tree = less
    if re.fullmatch(r"\d", tree):
        assert evaluate(encode(text)) == slow_value(text)
    else:
        with pytest.raises(ValueError, match="tokens"):
            evaluate(encode(text))


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        (encode(""), "empty"),
        (encode("1 2"), r"tokens\[1\] is '2'"),
        (encode("[MAX 1 ] ]"), r"tokens\[3\] is '\]'"),
        (encode("]"), r"tokens\[0\] is '\]'"),
        (encode("[MAX [MIN ] ]"), r"tokens\[2\] is '\]', but \[MIN at tokens\[1\]"),
        (encode("[MAX 1 [SM 2 3"), r"\[SM at tokens\[2\]"),
        ([11, 3, PADDING, 15], r"tokens\[2\] is 0, expected 1 to 15"),
        ([11, 3, -1, 15], r"tokens\[2\] is -1, expected 1 to 15"),
    ],
)
def test_malformed_expressions_are_rejected_with_their_position(tokens, found):
    with pytest.raises(ValueError, match=found):
        evaluate(tokens)


def test_encode_and_decode():
    assert encode(" ".join(VOCABULARY[1:])) == list(range(1, 16))
    published = "( ( ( [SM 2 ) ( ( ( [MAX 3 ) 4 ) ] ) ) ] )"
    assert encode(published) == encode("[SM 2 [MAX 3 4 ] ]")
    assert decode([*range(1, 16), PADDING, PADDING]) == " ".join(VOCABULARY[1:])
    with pytest.raises(ValueError, match="symbol 1 of the expression is '10'"):
        encode("[MAX 10 2 ]")
    with pytest.raises(ValueError, match=r"tokens\[1\] is 16, expected 0 to 15"):
        decode([11, 16])


def test_tables_are_written_and_read(tmp_path):
    path = tmp_path / "basic_train.tsv"
    examples = [ListOps(SMALL).example("train", index) for index in range(30)]
    write_listops(path, examples)
    assert list(read_listops(path)) == examples
    path.write_bytes(b"Source\tTarget\r\n( ( ( [SM 7 ) 8 ) ] )\t5\r\n( ( [MED 3 ) ] )\t3\r\n")
    assert list(read_listops(path)) == [([14, 8, 9, 15], 5), ([13, 4, 15], 3)]
    with pytest.raises(ValueError, match="example 1: the label is 1"):
        write_listops(path, [([11, 2, 3, 15], 2), ([11, 2, 3, 15], 1)])


GOOD = "Source\tTarget\n[MAX 1 2 ]\t2\n"


@pytest.mark.parametrize(
    ("text", "line", "found"),
    [
        ("", 1, "Source"),
        ("[MAX 1 2 ]\t2\n", 1, "Source"),
        ("Source,Target\n", 1, "Source"),
        *(
            (f"{GOOD}{line}\n", 3, found)
            for line, found in (
                ("[MAX 1 2 ]", "1 cell separated"),
                ("[MAX 1 2 ]\t2\t2", "3 cells"),
                ("", "1 cell separated"),
                ("[MAX 1 2 ]\t12", "'12', expected 0 to 9"),
                ("[MAX 1 2 ]\t1", "1, but .* 2"),
                ("[MAX 1 X ]\t1", "'X'"),
                ("[MAX 1 2\t2", "tokens end"),
                ("[MAX 1 \udcff ]\t2", "utf-8"),
            )
        ),
    ],
)
def test_malformed_lines_are_rejected_with_file_and_line(tmp_path, text, line, found):
    path = tmp_path / "basic_test.tsv"
    path.write_bytes(text.encode(errors="surrogateescape"))
    rows = read_listops(path)
    assert len(list(islice(rows, line // 2))) == line // 2
    with pytest.raises(ValueError, match=rf"basic_test\.tsv, line {line}: .*{found}"):
        next(rows)


@pytest.mark.parametrize(
    ("changes", "example", "found"),
    [
        ({"min_length": 0}, (), "min_length is 0"),
        ({"max_args": 1}, (), "max_args is 1"),
        ({"max_depth": 0}, (), "max_depth is 0"),
        ({"min_length": 9, "max_length": 8}, (), "max_length is 8, .* at least 9"),
        ({"max_depth": 2}, (), "min_length is 501, .* max_depth 2 .* max_args 10 .* 12"),
        (
            {"min_length": 2, "max_length": 3, "max_depth": 2, "max_args": 2},
            ("train", 0),
            "min_length is 2 and max_length is 3",
        ),
        ({}, ("train", -1), "index is -1"),
        ({}, ("train", True), "index is True"),
        ({}, ("valid", 0), "split 'valid'"),
    ],
)
def test_impossible_sizes_and_examples_are_rejected(changes, example, found):
    with pytest.raises(ValueError, match=found):
        ListOps(ListOpsConfig(**changes)).example(*example)
