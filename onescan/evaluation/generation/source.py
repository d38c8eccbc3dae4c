"""What images are judged or compared with: things that give the image at a place."""

from abc import ABC, abstractmethod

from onescan.shapes import Images, Labels

STEPS = 255  # from black to white


class Source(ABC):
    """Images that can be asked for by their places."""

    name: str
    """For people."""
    stamp: str
    """What other images have another of."""
    size: tuple[int, int]
    """Height and width of the images."""
    class_names: tuple[str, ...] = ()
    """What labels stand for; none where there are no labels, or they have no names."""

    @abstractmethod
    def __len__(self) -> int:
        """Count the images that there are, or can be."""

    @abstractmethod
    def images(self, start: int, stop: int) -> tuple[Images, Labels | None]:
        """Images from 0 to 1, of 3 channels or 1, and the classes they are of or were asked for.

        The same places give the same images. There may be fewer where some cannot be read.
        """


def in_steps(images: Images) -> Images:
    """Round to the 256 steps that files have, so that an image and its file are one."""
    return (images.float().clamp(0, 1) * STEPS).round() / STEPS
