import re
from itertools import islice, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onescan.data.long_range import (
    PADDING,
    VOCABULARY,
    ListOps,
    ListOpsConfig,
    decode,
    encode,
    evaluate,
    read_listops,
    write_listops,
)

SMALL = ListOpsConfig(min_length=4, max_length=30, max_depth=4, max_args=4)
TINY = ListOpsConfig(min_length=4, max_length=4, max_depth=2, max_args=2)
OPERATIONS = {
    "[MAX": np.max,
    "[MIN": np.min,
    "[MED": lambda values: int(np.median(values)),
    "[SM": lambda values: np.sum(values) % 10,
}


def worth(text):
    """Work out an expression by looking for its innermost part, again and again."""
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


def most_args(text):
    """Most arguments of an operator, from the brackets."""
    counts, done = [0], []
    for symbol in text.split():
        if symbol == "]":
            done.append(counts.pop())
        else:
            counts[-1] += 1
            if symbol.startswith("["):
                counts.append(0)
    return max(done)


def test_examples_of_the_arena_are_expressions_with_their_worth():
    data, texts = ListOps(), []
    for split, index in product(("train", "val", "test"), range(5)):
        tokens, label = data.example(split, index)
        texts.append(decode(tokens))
        assert 500 < len(tokens) < 2000
        assert label == evaluate(tokens) == worth(texts[-1])
    assert max(map(depth, texts)) == 10
    assert max(map(most_args, texts)) == 10


def test_sizes_are_kept_and_reached():
    data = ListOps(SMALL)
    texts = [decode(data.example("train", index)[0]) for index in range(400)]
    lengths = [len(text.split()) for text in texts]
    assert (min(lengths), max(lengths)) == (4, 30)
    assert {depth(text) for text in texts} == {2, 3, 4}
    assert {most_args(text) for text in texts} == {2, 3, 4}


def test_a_quarter_of_the_nodes_are_operators():
    data = ListOps(ListOpsConfig(min_length=4, max_length=100, max_depth=3, max_args=4))
    arguments = []  # of the roots: whether they are operators
    for index in range(1500):
        level = 0
        for symbol in decode(data.example("train", index)[0]).split():
            arguments += [symbol in OPERATIONS] * (level == 1 and symbol != "]")
            level += (symbol in OPERATIONS) - (symbol == "]")
    assert np.mean(arguments) == pytest.approx(0.25, abs=4 * (0.25 * 0.75 / len(arguments)) ** 0.5)


def test_operators_and_digits_are_uniform():
    data = ListOps(ListOpsConfig(min_length=20, max_length=60, max_depth=5, max_args=5))
    examples = [data.example("train", index)[0] for index in range(150)]
    symbols = decode([token for tokens in examples for token in tokens]).split()
    for kind in ([*OPERATIONS], [*"0123456789"]):
        counts = np.array([symbols.count(symbol) for symbol in kind])
        assert counts == pytest.approx(counts.mean(), abs=4 * np.sqrt(counts.mean()))


def test_an_example_is_a_function_of_seed_split_and_index():
    data, again = ListOps(SMALL), ListOps(SMALL)
    forwards = [data.example("train", index) for index in range(20)]
    assert [again.example("train", index) for index in reversed(range(20))] == forwards[::-1]
    assert [data.example("val", index) for index in range(20)] != forwards
    other = ListOps(ListOpsConfig(min_length=4, max_length=30, max_depth=4, max_args=4, seed=1))
    assert [other.example("train", index) for index in range(20)] != forwards


def test_no_expression_is_in_two_splits():
    data = ListOps(TINY)  # has 400 expressions
    drawn = {
        split: {tuple(data.example(split, index)[0]) for index in range(700)}
        for split in ("train", "val", "test")
    }
    assert sum(map(len, drawn.values())) == len(set.union(*drawn.values())) > 380
    assert len(drawn["train"]) > 1.5 * max(len(drawn["val"]), len(drawn["test"]))


def test_every_label_occurs():
    data = ListOps(SMALL)
    labels = [data.example("train", index)[1] for index in range(500)]
    assert np.bincount(labels, minlength=10).min() > 15


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("[MAX 2 9 [MIN 4 7 ] 0 ]", 9),
        ("[MED 1 4 ]", 2),
        ("[MED 9 0 5 ]", 5),
        ("[MED 3 4 4 9 ]", 4),
        ("[SM 9 9 9 ]", 7),
        ("[MIN [SM 5 5 ] 3 ]", 0),
        ("( ( ( [SM 2 ) ( ( ( [MAX 3 ) 4 ) ] ) ) ] )", 6),
    ],
)
def test_expressions_are_worth(text, value):
    assert evaluate(encode(text)) == value


@given(st.lists(st.sampled_from(VOCABULARY[1:]), max_size=8))
def test_tokens_are_an_expression_or_refused(symbols):
    text = " ".join(symbols)
    tree = re.sub(r"\[[A-Z]+", "[", text)  # of Python's: a digit, or a list of trees
    while (less := re.sub(r"\[(?: \d)+ \]", "0", tree)) != tree:
        tree = less
    if re.fullmatch(r"\d", tree):
        assert evaluate(encode(text)) == worth(text)
    else:
        with pytest.raises(ValueError, match="tokens"):
            evaluate(encode(text))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "tokens are empty"),
        ("1 2", r"tokens\[1\] is '2', but the expression had ended"),
        ("[MAX 1 ] ]", r"tokens\[3\] is '\]', but the expression had ended"),
        ("]", r"tokens\[0\] is '\]', but no operator is open"),
        ("[MAX [MIN ] ]", r"tokens\[2\] is '\]', but \[MIN at tokens\[1\] has no arguments"),
        ("[MAX 1 [SM 2 3", r"tokens end after 5, and \[SM at tokens\[2\] has no end"),
    ],
)
def test_what_is_no_expression_is_refused_with_its_place(text, says):
    with pytest.raises(ValueError, match=says):
        evaluate(encode(text))


@pytest.mark.parametrize("token", [PADDING, 16, -1])
def test_other_tokens_are_refused_with_their_place(token):
    with pytest.raises(ValueError, match=rf"tokens\[2\] is {token}, expected 1 to 15"):
        evaluate([11, 3, token, 15])


def test_text_and_tokens_are_turned_into_each_other():
    assert encode(" ".join(VOCABULARY[1:])) == list(range(1, 16))
    assert decode([*range(1, 16), PADDING, PADDING]) == " ".join(VOCABULARY[1:])
    assert encode("( ( [MAX 2 ) ] )") == [11, 3, 15]
    with pytest.raises(ValueError, match=r"symbol 1 of the expression is '10', expected one of"):
        encode("[MAX 10 2 ]")
    with pytest.raises(ValueError, match=r"tokens\[1\] is 16, expected 0 to 15"):
        decode([11, 16])


def test_tables_are_read_as_they_were_written(tmp_path):
    data, path = ListOps(SMALL), tmp_path / "basic_train.tsv"
    examples = [data.example("train", index) for index in range(30)]
    write_listops(path, examples)
    assert list(read_listops(path)) == examples
    assert path.read_text().startswith("Source\tTarget\n[")


def test_published_tables_are_read(tmp_path):
    path = tmp_path / "basic_val.tsv"
    path.write_bytes(b"Source\tTarget\r\n( ( ( [SM 7 ) 8 ) ] )\t5\r\n( ( [MED 3 ) ] )\t3\r\n")
    assert list(read_listops(path)) == [([14, 8, 9, 15], 5), ([13, 4, 15], 3)]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("[MAX 1 2 ]", "1 cells between tabs"),
        ("[MAX 1 2 ]\t2\t2", "3 cells between tabs"),
        ("", "1 cells between tabs"),
        ("[MAX 1 2 ]\ttwo", "Target is 'two', expected 0 to 9"),
        ("[MAX 1 2 ]\t12", "Target is '12', expected 0 to 9"),
        ("[MAX 1 2 ]\t1", "the label is 1, but the expression evaluates to 2"),
        ("[MAX 1 X ]\t1", "symbol 2 of the expression is 'X'"),
        ("[MAX 1 2\t2", "tokens end after 3"),
        ("[MAX 1 \udcff ]\t2", "utf-8"),
    ],
)
def test_a_malformed_line_is_refused_with_file_and_number(tmp_path, line, says):
    path = tmp_path / "basic_test.tsv"
    text = f"Source\tTarget\n[MAX 1 2 ]\t2\n{line}\n"
    path.write_bytes(text.encode(errors="surrogateescape"))
    rows = read_listops(path)
    assert len(list(islice(rows, 1))) == 1
    with pytest.raises(ValueError, match=rf"basic_test\.tsv, line 3: .*{re.escape(says)}"):
        next(rows)


@pytest.mark.parametrize("text", ["", "[MAX 1 2 ]\t2\n", "Source,Target\n"])
def test_a_file_without_the_header_is_refused(tmp_path, text):
    path = tmp_path / "basic_test.tsv"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"basic_test\.tsv, line 1: .* expected 'Source\\tTarget'"):
        list(read_listops(path))


def test_no_wrong_label_is_written(tmp_path):
    examples = [([11, 2, 3, 15], 2), ([11, 2, 3, 15], 1)]
    with pytest.raises(ValueError, match="example 1: the label is 1, but"):
        write_listops(tmp_path / "basic_val.tsv", examples)
    with pytest.raises(ValueError, match=r"example 0: tokens\[0\] is '\]'"):
        write_listops(tmp_path / "basic_val.tsv", [([15], 1)])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"min_length": 0}, "min_length is 0, expected a whole number of at least 1"),
        ({"max_args": 1}, "max_args is 1, expected a whole number of at least 2"),
        ({"max_depth": 0}, "max_depth is 0, expected a whole number of at least 1"),
        ({"min_length": 9, "max_length": 8}, "max_length is 8, .* at least 9"),
        ({"max_depth": 2}, "min_length is 501, but with max_depth 2 and max_args 10 .* 12 tokens"),
    ],
)
def test_sizes_that_cannot_be_are_refused(changes, says):
    with pytest.raises(ValueError, match=says):
        ListOps(ListOpsConfig(**changes))


def test_sizes_that_no_expression_has_are_refused():
    data = ListOps(ListOpsConfig(min_length=2, max_length=3, max_depth=2, max_args=2))
    with pytest.raises(ValueError, match=r"min_length is 2 and max_length 3: .* expected a wider"):
        data.example("train", 0)


@pytest.mark.parametrize("index", [-1, True])
def test_a_place_that_is_none_is_refused(index):
    with pytest.raises(ValueError, match=f"index is {index}, expected a whole number"):
        ListOps(SMALL).example("train", index)
    with pytest.raises(ValueError, match=r"split .valid. is unknown.* there are: train, val"):
        ListOps(SMALL).example("valid", 0)
