"""Runs of two processes, started by torchrun for test_distribution.py: FOLDER NAME..."""

import contextlib
import dataclasses
import os
import signal
import sys
from pathlib import Path

from onescan import configs
from onescan.experiments.recipes.digits import digits
from onescan.experiments.tasks import ImageClassification
from onescan.experiments.training import (
    MachineConfig,
    TrainingConfig,
    TransferConfig,
    joined,
    train,
)
from onescan.experiments.training.loop import Loop
from onescan.layers.mixers import SoftmaxMixerConfig

STEPS, STOP = 12, 7


def lightnet_run(**machine):
    """A run without randomness that differs between processes."""
    smaller = {
        "task.augment": None,
        "task.evaluation_batch_size": 100,
        "model.width": 32,
        "model.depth": 2,
        "model.mixer.num_heads": 2,
        "model.mixer.gate_rank": 8,
        "model.position.hidden_states": 4,
    }
    training = TrainingConfig(
        steps=STEPS,
        batch_size=32,
        learning_rate=1e-2,
        eps=1e-5,
        ema_decay=0.9,
        checkpoint_every=0.1,
    )
    run = configs.replace(digits(), smaller)
    return dataclasses.replace(
        run, training=training, machine=MachineConfig(trackers=(), **machine)
    )


def growing_run(**machine):
    """A run of one epoch whose batches grow from 16 to 128 examples."""
    changes = {"training.steps": None, "training.epochs": 1, "training.batch_size": 128}
    ramp = {"training.initial_batch_size": 16, "training.batch_size_ramp": 0.8}
    return configs.replace(lightnet_run(**machine), changes | ramp)


def softmax_run():
    """The teacher of `transfer_run`, for one process."""
    mixer = SoftmaxMixerConfig(num_heads=2)
    run = configs.replace(lightnet_run(), {"model.mixer": mixer, "training.ema_decay": None})
    return configs.replace(run, {"training.steps": 2})


def transfer_run(teacher):
    """A run whose first half is attention transfer, which changes only mixers."""
    run = lightnet_run()
    return dataclasses.replace(run, init_from=str(teacher), transfer=TransferConfig(steps=0.5))


def interrupted_at(step):
    """Interrupt only the second process, before that step."""
    update = Loop.update

    def interrupting(self, batches):
        if self.state.step == step and self.ranks.rank == 1:
            signal.raise_signal(signal.SIGINT)
        return update(self, batches)

    Loop.update = interrupting
    return lambda: setattr(Loop, "update", update)


def main(folder, *names):
    with joined() as ranks:
        assert ranks.size == 2
        for name in names:
            kind, _, variant = name.partition("_")
            build = growing_run if kind == "growing" else lightnet_run
            run = build(**MACHINES[kind])
            if variant:
                restore = interrupted_at(STOP)
                with contextlib.suppress(KeyboardInterrupt):
                    train(run, Path(folder) / name)
                restore()
            if variant != "stopped":
                train(run, Path(folder) / name)
        with contextlib.suppress(ValueError):  # of the first process, raised by both
            train(dataclasses.replace(run, training=TrainingConfig(seed=9)), Path(folder) / name)


def plain_run():
    """A run without EMA, whose first evaluation stays the best."""
    ImageClassification.score = lambda *_: 0.0
    changes = {"training.ema_decay": None, "training.evaluate_every": 0.1}
    return configs.replace(lightnet_run(fsdp=True, workers=1), changes)


def dies_once(folder):
    """Kill one process in the first start; torchrun restarts both."""

    def show(now):
        if now.step == STOP and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)

    train(plain_run(), folder, progress=show)


MACHINES = {
    "ddp": {"workers": 1},
    "fsdp": {"fsdp": True, "gradient_accumulation_steps": 2},
    "growing": {"gradient_accumulation_steps": 2},
}


def transfers(folder):
    """Train with attention transfer from the run in FOLDER/teacher."""
    train(transfer_run(Path(folder) / "teacher"), Path(folder) / "two")


if __name__ == "__main__":
    alone = {"dies_once": dies_once, "transfers": transfers}
    if sys.argv[1] in alone:
        alone[sys.argv[1]](sys.argv[2])
    else:
        main(*sys.argv[1:])
