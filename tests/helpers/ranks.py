"""Run checks in several processes on one machine, for the tests of ops over several ranks."""

import itertools
import os
import sys
import time
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.tensor  # here, or each process imports it in its first assert_close

from onescan.ops.parallel import sequence_parallel

TIMEOUT_S = 60
GRACE_S = 2  # for the other ranks after one has failed
TIMEOUT = timedelta(seconds=TIMEOUT_S / 2)  # of a collective


def run_ranks(size, check, folder, *, smallest=2):
    """Call check(group) in `size` processes, with groups of the first 2, 3, ... of them."""

    def check_groups(rank):
        for count in range(smallest, size + 1):
            group = dist.new_group(range(count), timeout=TIMEOUT)
            if rank < count:
                torch.manual_seed(0)
                check(group)
        dist.barrier()

    run_processes(size, check_groups, folder)


def run_processes(size, work, folder, *, timeout=TIMEOUT_S, grace=GRACE_S):
    """Call work(rank) in `size` processes of one process group.

    They have `timeout` seconds, and `grace` seconds after one has failed.
    """
    folder.mkdir(exist_ok=True)
    ranks = []
    for rank in range(size):
        if not (pid := os.fork()):
            _run_rank(rank, size, work, folder, timeout / 2)
        ranks.append(pid)
    failed = _failed(ranks, timeout, grace)
    errors = "\n".join(path.read_text() for path in sorted(folder.glob("rank*")))
    assert not failed, f"ranks {failed} failed\n{errors}"


def _run_rank(rank, size, work, folder, timeout):
    """Run the work in a child process, and exit without pytest's cleanup."""
    code = 1
    try:
        store = dist.FileStore(str(folder / "store"), size)
        options = {"store": store, "rank": rank, "world_size": size}
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout), **options)
        work(rank)
        code = 0
    except BaseException:
        (folder / f"rank{rank}").write_text(f"rank {rank}:\n{traceback.format_exc()}")
    finally:
        sys.stdout.flush()
        os._exit(code)


def _failed(pids, timeout, grace):
    """Wait for all processes, and return the ranks of those that failed or had to be killed."""
    failed, until = {}, time.monotonic() + timeout
    waiting = dict(enumerate(pids))
    while waiting:
        for rank, pid in [*waiting.items()]:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del waiting[rank]
                if status:
                    failed[rank], until = status, min(until, time.monotonic() + grace)
            elif time.monotonic() > until:
                os.kill(pid, 9)
                os.waitpid(pid, 0)
                del waiting[rank]
                failed[rank] = "timeout"
        time.sleep(0.005)
    return failed


def split(tokens, ranks):
    """Return uneven lengths of shards: short ones, and empty ones at both ends and between."""
    half = tokens // 2
    return {2: [0, tokens], 3: [1, tokens - 3, 2], 4: [half, 0, tokens - half, 0]}[ranks]


def assert_same_over_ranks(op, tokens, shared, lengths, group, *, per_position=1, prefix=0):
    """An op on shards of its tokens equals the op on all of them, and so do its gradients.

    Args:
        op: Function of the tensors in `tokens` and `shared`, and of a group or None. Returns its
            outputs, [B, T, ...], and a list of states, which are the same on every rank.
        tokens: Tensors with a T axis, by name; `angles` has it first, all others second.
        shared: Tensors that are the same on every rank.
        lengths: Positions of each rank.
        group: The process group.
        per_position: Tokens per position.
        prefix: Additional tokens of the first rank.
    """
    rank = dist.get_rank(group)
    ends = [*itertools.accumulate(lengths, initial=0)]
    ends = [0, *(prefix + end * per_position for end in ends[1:])]
    at = slice(ends[rank], ends[rank + 1])

    def share(name, x):
        return x[at] if name == "angles" else x[:, at]

    whole, own = _differentiable(tokens | shared), _differentiable(shared)
    own |= _differentiable({name: share(name, x) for name, x in tokens.items()})
    want, want_states = op(**whole, group=None)
    weights = [torch.rand_like(x) for x in (want, *want_states)]
    sum((x * w).sum() for x, w in zip((want, *want_states), weights, strict=True)).backward()

    got, got_states = op(**own, group=group)
    close = {"atol": 1e-9, "rtol": 1e-9}
    torch.testing.assert_close(got, want[:, at], **close)
    loss = (got * weights[0][:, at]).sum()
    for x, y, weight in zip(got_states, want_states, weights[1:], strict=True):
        torch.testing.assert_close(x, y, **close)
        loss = loss + (x * weight).sum() * (2 * rank + 1) / len(lengths) ** 2  # a sum of 1
    loss.backward()
    for name, x in own.items():
        if not x.requires_grad:
            continue
        slope = whole[name].grad
        if name in shared:
            total = torch.zeros_like(x) if x.grad is None else x.grad.clone()
            dist.all_reduce(total, group=group)
            torch.testing.assert_close(total, slope, msg=f"gradient of {name}", **close)
        else:
            torch.testing.assert_close(x.grad, share(name, slope), **close)


class OneProcess:
    """Outputs and gradients of a model on one process, to compare with those over ranks.

    Args:
        model: The model.
        call: Function of the model and the inputs, by name. Returns its outputs by name, each with
            its sharded axis, or None if it is the same on every rank.
        inputs: Tensors by name, each with its sharded axis, or None.
    """

    def __init__(self, model, call, inputs):
        self.model, self.call, self.inputs = model, call, inputs
        whole = _differentiable({name: x for name, (x, _) in inputs.items()})
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.outputs = call(model, **whole)
        self.weights = {name: torch.rand_like(x) for name, (x, _) in self.outputs.items()}
        sum((x * self.weights[name]).sum() for name, (x, _) in self.outputs.items()).backward()
        self.gradients = {name: x.grad for name, x in whole.items()} | self._parameter_gradients()

    def assert_same_over_ranks(self, lengths, group):
        """The outputs and gradients of all ranks are the same.

        The backward pass runs outside of the context of the group.

        Args:
            lengths: Units of each rank: tokens, patches or frames.
            group: The process group.
        """
        rank = dist.get_rank(group)

        def share(x, axis):
            unit = 0 if axis is None else x.shape[axis] // sum(lengths)
            return x if axis is None else x.split([n * unit for n in lengths], dim=axis)[rank]

        own = _differentiable({name: share(*given) for name, given in self.inputs.items()})
        with torch.random.fork_rng(), sequence_parallel(group):
            torch.manual_seed(1 + rank)  # the first rank's draws count
            outputs = self.call(self.model, **own)
        part = (2 * rank + 1) / len(lengths) ** 2  # of a shared output's loss; a sum of 1
        loss = 0
        assert outputs.keys() == self.outputs.keys()
        for name, (x, axis) in outputs.items():
            _assert_close(x, share(self.outputs[name][0], axis), name)
            weighted = (x * share(self.weights[name], axis)).sum()
            loss = loss + weighted * (part if axis is None else 1)
        loss.backward()
        shared = self._parameter_gradients()
        for name, (_, axis) in self.inputs.items():
            if own[name].requires_grad and axis is None:
                shared[name] = own[name].grad
            elif own[name].requires_grad:
                expected = share(self.gradients[name], axis)
                _assert_close(own[name].grad, expected, f"gradient of {name}")
        for name, gradient in shared.items():
            dist.all_reduce(gradient, group=group)
            _assert_close(gradient, self.gradients[name], f"gradient of {name}")

    def _parameter_gradients(self):
        """Return the gradients of all parameters, and reset them."""
        gradients = {
            name: torch.zeros_like(x) if x.grad is None else x.grad
            for name, x in self.model.named_parameters()
        }
        self.model.zero_grad()
        return gradients


def _differentiable(tensors):
    return {
        name: x.detach().clone().requires_grad_(x.is_floating_point())
        for name, x in tensors.items()
    }


def _assert_close(x, expected, name):
    close = {"atol": 1e-8, "rtol": 1e-8, "msg": lambda message: f"{name}: {message}"}
    torch.testing.assert_close(x, expected, **close)
