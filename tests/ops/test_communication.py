"""Communication and memory of sequence parallelism: the benchmark's formulas and figures."""

import subprocess
import sys
from pathlib import Path

import pytest
import sequence_parallel as benchmark
import torch
import torch.distributed as dist
from communication import LAYERS, Sizes, count
from ranks import run_ranks

from onescan.models.presets import preset

ROOT = Path(__file__).parents[2]
LENGTHS = 24**2, 48**2  # square images; shards of 4 ranks are longer than LDN's kernels


@pytest.mark.slow
def test_layers_receive_as_much_as_their_formulas(tmp_path):
    def assert_received(group, node=None, nodes=None):
        for name, layer in LAYERS.items():
            for tokens, narrow in zip(LENGTHS, (2, 4), strict=True):
                sizes = Sizes(group.size(), tokens, 16, 2, narrow=narrow, node=node)
                most = torch.tensor(count(layer, sizes, group, nodes))
                dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
                assert tuple(most.tolist()) == layer.received(sizes), (name, sizes)

    def check(group):
        if group.size() != 3:
            assert_received(group)
        if group.size() == 4:
            levels = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
            nodes = tuple(dist.new_subgroups_by_enumeration(level)[0] for level in levels)
            assert_received(group, 2, nodes)

    run_ranks(4, check, tmp_path)


def test_only_layers_on_images_and_softmax_attention_exchange_all_tokens():
    for name, layer in LAYERS.items():
        short, long = (layer.received(Sizes(4, tokens, 64, 4)) for tokens in LENGTHS)
        assert (short < long) == (layer.is_image or name == "softmax, causal")


def test_calculated_bytes():
    (header, *rows) = benchmark.Calculated(gpus=(8, 32), tokens=2**20).table()
    config = preset("lightnet_lm_1450m")
    assert (config.width, config.mixer.num_heads) == (2048, 16)
    table = {name: cells for name, *cells in rows}
    each = 2**20 * 2048 * 2  # bytes of the queries, keys, values or outputs
    assert header == ["layer", "8 GPUs", "32 GPUs"]
    assert table["softmax, ring attention"] == [
        benchmark.in_units(6 * each * share) for share in (7 / 8, 31 / 32)
    ]
    assert table["softmax, Ulysses"] == [
        benchmark.in_units(8 * each / 8 * 7 / 8), "not possible"
    ]  # fmt: skip
    state = 8 * 2048 + 4 * 2048 * 2 * 128  # log-normalizers, and matrices with LRPE
    others = 7, 7 + 3  # ranks of the node, and other nodes
    assert table["LightNet, causal"] == [benchmark.in_units(2 * n * state) for n in others]


def saved_bytes(config, tokens, group):
    """Return the bytes of all tensors that the backward pass of a model needs."""
    torch.manual_seed(0)
    model, storages = config.build(), {}

    def pack(x):
        storage = x.untyped_storage()
        storages[storage.data_ptr()] = storage  # kept alive, so that no other has its address
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        benchmark.backward(model, torch.zeros(1, tokens + 1, dtype=torch.long), group)
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", benchmark.MODELS)
def test_memory_of_a_rank_depends_on_its_shard(tmp_path, name):
    """Memory grows with the shard at most 10% faster than on one process, for any group size."""
    config, short, long = benchmark.MODELS[name], 512, 1024
    alone = saved_bytes(config, long, None) - saved_bytes(config, short, None)
    growths = []

    def check(group):
        growths.append(saved_bytes(config, long, group) - saved_bytes(config, short, group))
        assert growths[-1] < 1.1 * alone
        assert growths[-1] == growths[0]

    run_ranks(4, check, tmp_path)


COMMANDS = {
    "measured --processes 2 --tokens 576 --width 16 --num-heads 2": [*LAYERS],
    "memory --processes 2 --tokens 2048": ["single process", "rank 0 of 2", "rank 1 of 2"],
}


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_commands(command):
    script = [sys.executable, "benchmarks/sequence_parallel.py", *command.split()]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    _, line, *rows = done.stdout.splitlines()
    assert set(line) == {"|", "-"}
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == COMMANDS[command]
