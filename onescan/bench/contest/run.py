"""A benchmark from its options to its JSON file: sizes from small to large, one heat at a time."""

import importlib
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import NamedTuple, Never, TypeVar

from tqdm import tqdm

from onescan import configs
from onescan.bench.contest.figures import forecast_mib, growth, ratio, spread
from onescan.bench.contest.machine import (
    COPY,
    MATMUL,
    YARDSTICKS,
    device_of,
    find_machine,
    matmul_dtype,
    prepare_yardstick,
)
from onescan.bench.contest.outcome import (
    Heat,
    Missing,
    Outcome,
    Results,
    Yardsticks,
    going_on,
)
from onescan.bench.contest.rival import KilledError, Ready, RefusedError, Rival, TrialError
from onescan.bench.contest.trial import Field
from onescan.bench.contests import CONTESTS, Contest, ContestOptions
from onescan.checks import check_choice
from onescan.training.folder import write_json

MIB_A_GIB = 1024
LEFT_OUT = "left out"
THREE_FIGURES = 100
DoneT = TypeVar("DoneT")
Times = dict[tuple[str, str], list[float]]  # by contestant and work


class Entry(NamedTuple):
    """A contestant, or a yardstick, in a heat."""

    rival: Rival
    work: str
    ready: Ready

    @property
    def key(self) -> tuple[str, str]:
        """Of its times."""
        return self.rival.name, self.work


def run_contest(
    benchmark: str,
    options: ContestOptions,
    folder: Path,
    *,
    progress: bool = False,
    after: Callable[[Results], object] | None = None,
    contest: Contest | None = None,
) -> Results:
    """Measure contestants over sizes, and keep what is measured in the folder's BENCHMARK.json.

    Heats that the file holds already are not measured again, but for sizes where a contestant
    failed that may not fail the next time: there all take turns anew.

    Args:
        benchmark: a name, of `CONTESTS` if `contest` is not given.
        options: what to measure.
        folder: where the file is, or will be.
        progress: whether to draw a bar on stderr.
        after: what to do with the results after each heat, once they are on the disk.
        contest: a benchmark that is not in `CONTESTS`.

    Raises:
        ValueError: an option is out of its range, there is no such contestant or device, or the
            folder holds measurements with other options or of another machine.
        OSError: the file cannot be written.
    """
    options.check()
    contest = CONTESTS[benchmark] if contest is None else contest
    field: Field = importlib.import_module(contest.module).contestants(options)
    field = field._replace(names=_chosen(options.candidates, field.names))
    machine = find_machine(options)
    fresh = Results(benchmark=benchmark, names=field.names, options=options, machine=machine)
    path = folder / f"{benchmark}.json"
    results = going_on(path, fresh)
    write_json(path, configs.to_dict(results))  # or it fails before the first measurement
    plan = [(size, work) for size in sorted(options.sizes) for work in field.works]
    with tqdm(total=len(plan) * len(field.names), unit=" trials", disable=not progress) as bar:
        for size in sorted(options.sizes):
            asked = _asked(results, field.works, size)
            bar.update((len(field.works) - len(asked)) * len(field.names))
            for heat in _heats(results, field, size, asked, bar):
                results = _with(results, heat)
                write_json(path, configs.to_dict(results))
                if after is not None:
                    after(results)
    return results


def _chosen(asked: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    for name in asked:
        check_choice("name", name, known)
    return tuple(asked or known)


def _asked(results: Results, works: Sequence[str], size: int) -> list[str]:
    """What is to be measured at a size."""
    heats = {work: results.heat(work, size) for work in works}
    if any(heat is not None and _is_stale(results, heat) for heat in heats.values()):
        return list(works)
    return [work for work, heat in heats.items() if heat is None]


def _is_stale(results: Results, heat: Heat) -> bool:
    """Whether somebody is to be tried again; smaller sizes may tell by now that it is no use."""
    return any(
        missing.again
        and not (
            missing.why.startswith(LEFT_OUT)
            and _left_out(results, missing.name, heat.work, heat.size)
        )
        for missing in heat.missing
    )


def _with(results: Results, heat: Heat) -> Results:
    """Add a heat, in place of an older one, and see anew how times grow."""
    heats = {(each.work, each.size): each for each in (*results.heats, heat)}
    results = replace(results, heats=tuple(heats.values()))
    grown = (
        growth(name, work, results.of(name, work))
        for work in results.works
        for name in results.names
    )
    return replace(results, growth=tuple(each for each in grown if each is not None))


def _heats(
    results: Results, field: Field, size: int, works: Sequence[str], bar: "tqdm[Never]"
) -> Iterator[Heat]:
    """Every heat of one size: the same processes do one work after the other."""
    out = {work: _all_left_out(results, work, size) for work in works}
    tried = [name for name in field.names if any(name not in out[work] for work in works)]
    with _started(tried, size, field, results.options) as rivals:
        for work in works:
            there = [rival for rival in rivals if rival.name not in out[work]]
            yield _heat(results, there, work, size, out[work], bar)


@contextmanager
def _started(
    names: Sequence[str], size: int, field: Field, options: ContestOptions
) -> Iterator[list[Rival]]:
    """A process for each contestant, and a last one for the yardsticks."""
    makers = [(name, field.prepare) for name in names]
    makers += [(YARDSTICKS, prepare_yardstick)] if names else []
    with ExitStack() as stack:
        yield [stack.enter_context(Rival(n, size, prepare, options)) for n, prepare in makers]


def _all_left_out(results: Results, work: str, size: int) -> dict[str, Missing]:
    why = {name: _left_out(results, name, work, size) for name in results.names}
    return {name: missing for name, missing in why.items() if missing is not None}


def _left_out(results: Results, name: str, work: str, size: int) -> Missing | None:
    """Why a contestant is not tried at a size, after what happened at smaller ones."""
    for heat in results.heats:
        for out in heat.missing if heat.work == work and heat.size < size else ():
            if out.name == name and out.is_last:
                why = out.why if out.why.startswith(LEFT_OUT) else f"{LEFT_OUT}, as {out.why}"
                return replace(out, why=why)
    known = {s: outcome for s, outcome in results.of(name, work).items() if s < size}
    for at, outcome in known.items():
        if outcome.time_ms.median > 1000 * results.options.time_limit_s:
            took = _seconds(outcome.time_ms.median)
            why = f"{LEFT_OUT}, as at {at} a call took {took}"
            return Missing(name=name, why=why, is_last=True)
    there, needed = results.machine.memory_mib, forecast_mib(known, size)
    if needed > there:
        needs = f"{LEFT_OUT}, as a call would take about {needed / MIB_A_GIB:.3g} GiB"
        why = f"{needs}, of {there / MIB_A_GIB:.3g} GiB that there are"
        return Missing(name=name, why=why, is_last=True)
    return None


def _seconds(ms: float) -> str:
    """Spell a time with three figures, or to the second.

    >>> _seconds(1234.5), _seconds(2.048e6)
    ('1.23 s', '2048 s')
    """
    seconds = ms / 1000
    return f"{seconds:.0f} s" if seconds >= THREE_FIGURES else f"{seconds:.3g} s"


def _heat(
    results: Results,
    rivals: Sequence[Rival],
    work: str,
    size: int,
    missing: dict[str, Missing],
    bar: "tqdm[Never]",
) -> Heat:
    """Let all get ready, take turns, and forget."""
    for rival in rivals:
        _try(rival.arrive, rival.name, missing)  # nobody imports while another is called
    entries = []
    for rival in rivals:
        bar.set_description(f"{rival.name}, {work}, {size}")
        entries += _entries(rival, work, missing)
    bar.set_description(f"rounds, {work}, {size}")
    times = take_turns(entries, results.options, missing)
    for rival in rivals:
        _try(rival.forget, rival.name, {})
    bar.update(len(results.names))
    return _judged(results, entries, times, work, size, missing)


def _entries(rival: Rival, work: str, missing: dict[str, Missing]) -> list[Entry]:
    """A contestant that is ready, if it is; the yardsticks are two."""
    entries = []
    for each in (COPY, MATMUL) if rival.name == YARDSTICKS else (work,):
        if rival.name not in missing:
            ready = _try(partial(rival.prepare, each), rival.name, missing)
            entries += [] if ready is None else [Entry(rival, each, ready)]
    return entries


def take_turns(
    entries: Sequence[Entry], options: ContestOptions, missing: dict[str, Missing]
) -> Times:
    """The milliseconds of each round, by contestant and work; every other round runs backwards.

    Who fails is out, goes to `missing`, and leaves no times.
    """
    times: Times = {entry.key: [] for entry in entries}
    contestants = len({entry.rival.name for entry in entries} - {YARDSTICKS}) or 1
    begin, rounds = perf_counter(), 0
    while times and (rounds < options.rounds or perf_counter() - begin < options.seconds):
        for entry in entries if rounds % 2 == 0 else reversed(entries):
            if entry.key in times:
                act = partial(entry.rival.turn, entry.work, contestants)
                taken = _try(act, entry.rival.name, missing)
                if taken is None:
                    del times[entry.key]
                else:
                    times[entry.key].append(taken)
        rounds += 1
    return times


def _try(act: Callable[[], DoneT], name: str, missing: dict[str, Missing]) -> DoneT | None:
    """What an act returns; None where it fails, and then it is known why."""
    try:
        return act()
    except TrialError as error:
        is_last = isinstance(error, KilledError)
        again = not isinstance(error, RefusedError)
        out = Missing(name=name, why=str(error), is_last=is_last, again=again)
        missing.setdefault(name, out)
        return None


def _judged(
    results: Results,
    entries: Sequence[Entry],
    times: Times,
    work: str,
    size: int,
    missing: Mapping[str, Missing],
) -> Heat:
    """What the times of a heat say."""
    yards = _yardsticks(times, entries, results.options)
    first = times.get((results.names[0], work))
    outcomes = tuple(
        _outcome(entry, times[entry.key], first, yards)
        for entry in entries
        if entry.key in times and entry.rival.name != YARDSTICKS
    )
    out = tuple(missing[name] for name in results.names if name in missing)
    return Heat(work=work, size=size, yardsticks=yards, outcomes=outcomes, missing=out)


def _yardsticks(times: Times, entries: Sequence[Entry], options: ContestOptions) -> Yardsticks:
    copy = matmul = None
    for entry in entries:
        if entry.rival.name == YARDSTICKS and entry.key in times:
            ms, known = statistics.median(times[entry.key]), entry.ready.known
            if entry.work == COPY:
                copy = known["floor_bytes"] / ms / 1e6
            else:
                matmul = 2 * known["macs"] / ms / 1e9
    dtype = str(matmul_dtype(device_of(options))).removeprefix("torch.")
    return Yardsticks(copy_gb_per_s=copy, matmul_tflop_per_s=matmul, matmul_dtype=dtype)


def _outcome(
    entry: Entry, times: Sequence[float], first: Sequence[float] | None, yards: Yardsticks
) -> Outcome:
    time, known = spread(times), entry.ready.known
    seconds = time.median / 1000
    copied, multiplied = known["floor_bytes"] / 1e9, 2 * known["macs"] / 1e12
    copy, matmul = yards.copy_gb_per_s, yards.matmul_tflop_per_s
    return Outcome(
        name=entry.rival.name,
        rounds_ms=tuple(times),
        time_ms=time,
        ratio=None if first is None else ratio(times, first),
        peak_mib=entry.ready.peak_mib,
        state_mib=known["state_mib"],
        parameters=known["parameters"],
        per_second=known["items"] / seconds,
        floor_bytes=known["floor_bytes"],
        copy_share=copied / seconds / copy if copy and copied else None,
        macs=known["macs"],
        matmul_share=multiplied / seconds / matmul if matmul and multiplied else None,
    )
