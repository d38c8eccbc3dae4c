"""Runs of a denoiser that torchrun starts on two processes for test_image_generation.py."""

import sys
from pathlib import Path

from tiny_denoiser import denoiser_run

from onescan.experiments.training import joined, train


def main(folder):
    with joined() as ranks:
        assert ranks.size == 2
        for name, shard in (("ddp", False), ("fsdp", True)):
            run = denoiser_run(**{"training.epochs": 1, "machine.fsdp": shard})
            train(run, Path(folder) / name)


if __name__ == "__main__":
    main(sys.argv[1])
