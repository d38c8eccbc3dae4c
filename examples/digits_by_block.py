"""Generate handwritten digits block by block, and compare block sizes.

python examples/digits_by_block.py --blocks 8 1

The model predicts all pixels of a block at once, given all earlier blocks: its input at each pixel
is the pixel one block earlier. Blocks of 8 pixels are the rows of an image of 8 x 8 pixels. Blocks
of 1 pixel give an ordinary autoregressive model.
"""

import argparse
import math

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

from onescan.layers.mixers import MIXERS
from onescan.layers.position import ToeplitzPositionConfig
from onescan.models.image_classifier import ImageClassifierConfig

LEVELS, SIDE, PIXELS = 17, 8, 64  # gray levels, pixels per row, and pixels per image
SHADES = " .:-=+*#%@"


def load_pixels(test=297):
    """Return the gray levels of scikit-learn's digits, [N, PIXELS], for training and testing."""
    pixels = torch.from_numpy(load_digits().images).long().flatten(1)
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    return pixels[order[test:]], pixels[order[:test]]


def build(mixer, block):
    """Build a model that predicts the gray level of each pixel, with blockwise causal mixers."""
    return ImageClassifierConfig(
        image_size=(PIXELS,),
        patch_size=(1,),
        channels=LEVELS,
        num_classes=LEVELS,
        width=64,
        depth=2,
        mixer=MIXERS[mixer](num_heads=4, causal_block=block),
        position=ToeplitzPositionConfig(hidden_states=16),
        pool="mean",
        init_std=0.1,
    ).build()


def as_channels(pixels):
    """One-hot encode gray levels, [B, T], as channels, [B, LEVELS, T]."""
    return F.one_hot(pixels, LEVELS).float().mT


def predict(model, pixels, block):
    """Predict each pixel from earlier blocks. Returns logits, [B, PIXELS, LEVELS]."""
    earlier = F.pad(as_channels(pixels), (block, 0))[..., :PIXELS]  # zeros for the first block
    return model.head(model.forward_features(earlier))


def train(model, pixels, block, steps, batch_size=32):
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    model.train()
    for _ in range(steps):
        batch = pixels[torch.randint(len(pixels), (batch_size,))]
        loss = F.cross_entropy(predict(model, batch, block).mT, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
    model.eval()


@torch.inference_mode()
def bits_per_pixel(model, pixels, block):
    return F.cross_entropy(predict(model, pixels, block).mT, pixels).item() / math.log(2)


@torch.inference_mode()
def sample(model, count, block):
    """Generate images with one call per block. Returns pixels, [B, T], and logits, [B, T, L]."""
    part, state, pixels, logits = torch.zeros(count, LEVELS, block), None, [], []
    for _ in range(PIXELS // block):
        tokens, state = model.stream(part, state)
        logits.append(model.head(tokens))
        pixels.append(torch.distributions.Categorical(logits=logits[-1]).sample())
        part = as_channels(pixels[-1])
    return torch.cat(pixels, dim=1), torch.cat(logits, dim=1)


def drawing(pixels):
    """Draw images, [B, PIXELS], side by side."""
    rows = pixels.view(-1, SIDE, SIDE).transpose(0, 1) * (len(SHADES) - 1) // (LEVELS - 1)
    return "\n".join("   ".join("".join(SHADES[i] for i in x) for x in row) for row in rows)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--blocks", type=int, nargs="+", default=[8, 1], help="pixels per block")
    parser.add_argument("--mixer", default="lightnet", help="lightnet, lion, gated_deltanet, ...")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    train_pixels, test_pixels = load_pixels()
    for block in arguments.blocks:
        torch.manual_seed(arguments.seed)
        model = build(arguments.mixer, block)
        train(model, train_pixels, block, arguments.steps)
        pixels, logits = sample(model, arguments.samples, block)
        at_once = predict(model, pixels, block)  # equals block-by-block calls
        torch.testing.assert_close(logits, at_once, atol=1e-3, rtol=1e-3)
        bits = bits_per_pixel(model, test_pixels, block)
        print(f"blocks of {block} pixels: {bits:.3f} bits per held-out pixel")
        print(f"{arguments.samples} images in {PIXELS // block} calls")
        print(drawing(pixels), flush=True)


if __name__ == "__main__":
    main()
