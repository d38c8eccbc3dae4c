"""LightNet's denoiser against DiT over the sides of latents: time and memory of a step, in one run.

python benchmarks/denoisers.py                           small models, side 32 to 256
python benchmarks/denoisers.py --size b --batch 8        larger ones
python benchmarks/denoisers.py --what inference          forward alone
python benchmarks/denoisers.py --same-depth              as many blocks in both

A latent of side S is S/2 x S/2 = T tokens. A step of training is forward, backward and an update
by AdamW; of inference, a forward. Each figure comes from a process of its own, in which a step is
repeated and its median taken; the contestants take turns in each round, and the table has the
median over rounds, and how far the rounds reach from it. Memory is what a step takes beyond the
model, its gradients and the optimizer's moments. The exponent is that of time over T.

LightNet has 1.5 times the blocks of DiT, as in the papers, where sizes of the same letter have
about as many parameters. On a CPU there are fewer blocks unless --depth says otherwise: the time of
a step is linear in them.
"""

import math
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Literal, NamedTuple, NoReturn

import torch
import tyro
from torch import nn
from tqdm import tqdm

from onescan import configs
from onescan.bench.timing import Measurement, exponent, measure
from onescan.checks import check_positive, in_a_line
from onescan.models.denoiser import STEPS, DenoiserConfig
from onescan.models.presets import preset
from onescan.models.size import model_size
from onescan.training.config import Precision
from onescan.training.distributed import Ranks, choose_device
from onescan.training.optim import autocast

CONTESTANTS = {"DiT": "dit_{}_2", "LightNet": "lightnet_dit_{}_2"}
CPU_DEPTH = 2  # of DiT
DEEPER = 3 / 2  # LightNet's blocks over DiT's, in the tables of sizes
LINUX_KILL = -9  # how a process ends that the system killed

What = Literal["training", "inference"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    size: Literal["s", "b"] = "s"
    """of the models: a letter of the papers' tables"""
    sides: tuple[int, ...] = (32, 64, 128, 256)
    """of the latents; images are 8 times larger"""
    depth: int | None = None
    """DiT's blocks; without it the paper's on a GPU, 2 on a CPU"""
    same_depth: bool = False
    """give LightNet as many, in place of 1.5 times as many"""
    batch: int = 1
    """latents in a step"""
    rounds: int = 3
    """how often everything is measured"""
    what: Literal["training", "inference", "both"] = "both"
    precision: Precision | None = None
    """of matrix products; without it bfloat16 on a GPU, float32 on a CPU"""
    device: str = "auto"
    """cpu, cuda, ...; auto is a GPU where there is one"""


class Case(NamedTuple):
    """One cell of the tables."""

    what: What
    name: str
    side: int

    @property
    def tokens(self) -> int:
        return (self.side // 2) ** 2


class Failed(NamedTuple):
    """Why a case has no figures."""

    why: str


Outcome = list[Measurement] | Failed


def config_of(name: str, side: int, options: Options, device: torch.device) -> DenoiserConfig:
    depth = preset(CONTESTANTS["DiT"].format(options.size)).depth
    depth = options.depth or (depth if device.type == "cuda" else CPU_DEPTH)
    if name != "DiT" and not options.same_depth:
        depth = math.ceil(DEEPER * depth)
    known = preset(CONTESTANTS[name].format(options.size))
    return configs.replace(known, {"depth": depth, "image_size": (side, side)})


def precision_of(options: Options, device: torch.device) -> Precision:
    return options.precision or ("bfloat16" if device.type == "cuda" else "float32")


def prepare(case: Case, options: Options, report: Path) -> Callable[[], object]:
    """A step in this process; what goes wrong is written to a file, as the process then ends."""
    try:
        step = step_of(case, options)
    except (ValueError, RuntimeError) as error:
        fail(error, report)

    def watched() -> object:
        try:
            return step()
        except (ValueError, RuntimeError) as error:  # torch's running out of memory is the latter
            fail(error, report)

    return watched


def step_of(case: Case, options: Options) -> Callable[[], object]:
    torch.manual_seed(0)
    device = choose_device(options.device, Ranks())
    config = config_of(case.name, case.side, options, device)
    model = config.build().to(device)
    size = (options.batch, config.channels, case.side, case.side)
    noisy = torch.randn(size, device=device)
    timesteps = STEPS * torch.rand(options.batch, device=device)
    labels = torch.randint(config.num_classes, (options.batch,), device=device)

    def forward() -> torch.Tensor:
        with autocast(precision_of(options, device), device):
            return model(noisy, timesteps, labels)

    if case.what == "inference":
        model.eval()
        return torch.no_grad()(forward)
    target = torch.randn(options.batch, model.out_channels, *size[2:], device=device)
    optimizer = with_moments(model)

    def update() -> None:
        optimizer.zero_grad(set_to_none=False)
        nn.functional.mse_loss(forward().float(), target).backward()
        optimizer.step()

    return update


def with_moments(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that has all the memory it will need."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return optimizer


def fail(error: Exception, report: Path) -> NoReturn:
    report.write_text(f"{type(error).__name__}: {in_a_line(error)}")
    raise SystemExit(1)  # without a traceback


def measured(case: Case, options: Options) -> Measurement | Failed:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "error"
        try:
            return measure(prepare, case, options, report)
        except RuntimeError as error:
            if report.exists():
                return Failed(report.read_text())
            killed = str(error).endswith(str(LINUX_KILL))
            return Failed("killed, as when memory runs out" if killed else in_a_line(error))


def all_measured(cases: list[Case], options: Options) -> dict[Case, Outcome]:
    """Measure all in turn, and all again in the next round, but for what failed."""
    outcomes: dict[Case, Outcome] = {case: [] for case in cases}
    with tqdm(total=options.rounds * len(cases), unit=" processes", disable=None) as bar:
        for _, case in product(range(options.rounds), cases):
            bar.set_description(f"{case.what}, {case.name}, side {case.side}")
            done = outcomes[case]
            if isinstance(done, list):
                cost = measured(case, options)
                outcomes[case] = cost if isinstance(cost, Failed) else [*done, cost]
            bar.update()
    return outcomes


def table(what: What, outcomes: dict[Case, Outcome], options: Options) -> Iterator[str]:
    """The lines of a table."""
    parts = "forward, backward, update" if what == "training" else "forward"
    yield f"\n{what}: {parts}; faster and smaller than DiT"
    yield (
        f"{'':<10}{'side':>6}{'T':>7}{'ms':>11}{'rounds':>16}{'MiB':>9}"
        f"{'times faster':>14}{'times smaller':>15}"
    )
    for name in CONTESTANTS:
        mine = {case: outcome for case, outcome in outcomes.items() if case[:2] == (what, name)}
        for case, outcome in mine.items():
            yield row(case, outcome, outcomes[case._replace(name="DiT")])
        figures = {case.tokens: median(o).median_ms for case, o in mine.items() if is_known(o)}
        if len(figures) > 1:
            slope = exponent([*figures], [*figures.values()])
            yield f"{name:<10}exponent of T: {slope:.2f}"


def row(case: Case, outcome: Outcome, base: Outcome) -> str:
    head = f"{case.name:<10}{case.side:>6}{case.tokens:>7}"
    if not is_known(outcome):
        return f"{head}  {outcome.why}"
    cost = median(outcome)
    low, high = (pick(one.median_ms for one in outcome) for pick in (min, max))
    line = f"{head}{cost.median_ms:>11.1f}{f'{low:.1f} - {high:.1f}':>16}{cost.peak_mib:>9.0f}"
    if not is_known(base):
        return line
    other = median(base)
    faster, smaller = other.median_ms / cost.median_ms, other.peak_mib / max(cost.peak_mib, 1)
    return f"{line}{faster:>14.2f}{smaller:>15.2f}"


def is_known(outcome: Outcome) -> bool:
    return not isinstance(outcome, Failed)


def median(costs: list[Measurement]) -> Measurement:
    return Measurement(*(statistics.median(column) for column in zip(*costs, strict=True)))


def heading(options: Options, device: torch.device) -> Iterator[str]:
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    yield (
        f"torch {torch.__version__}, {where}, {torch.get_num_threads()} threads, "
        f"{precision_of(options, device)}, batch {options.batch}, {options.rounds} rounds"
    )
    for name in CONTESTANTS:
        config = config_of(name, options.sides[0], options, device)
        whole = preset(CONTESTANTS[name].format(options.size)).depth
        fewer = f" of {whole}; time is linear in them" if config.depth < whole else ""
        try:
            size = f", {model_size(config).parameters / 1e6:.1f} M parameters"
        except ValueError:  # a side that patches do not divide is told in the table
            size = ""
        yield f"{name}: {config.depth} blocks{fewer}, width {config.width}{size}"


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    check_positive(batch=options.batch, rounds=options.rounds, depth=options.depth or 1)
    if not options.sides or len(set(options.sides)) < len(options.sides):
        raise SystemExit(f"sides is {options.sides}, expected at least one, and each once")
    kinds: tuple[What, ...] = ("training", "inference")
    whats = [what for what in kinds if options.what in (what, "both")]
    cases = [Case(*each) for each in product(whats, CONTESTANTS, options.sides)]
    device = choose_device(options.device, Ranks())
    for line in heading(options, device):
        print(line, flush=True)
    cases.sort(key=lambda case: options.sides.index(case.side))  # contestants beside each other
    outcomes = all_measured(cases, options)
    for what in whats:
        for line in table(what, outcomes, options):
            print(line)


if __name__ == "__main__":
    main()
