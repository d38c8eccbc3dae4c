"""The example that generates digits block by block: inputs of predictions, and a short run."""

import math
import re

import digits_by_block
import pytest
import torch

PIXELS = digits_by_block.PIXELS


@pytest.mark.parametrize("mixer", ["lightnet", "lion", "gated_deltanet"])
def test_pixels_are_predicted_from_earlier_blocks(mixer):
    model, block = digits_by_block.build(mixer, 8).eval(), 8
    pixels = torch.randint(17, (1, PIXELS))
    changed = pixels.clone()
    changed[:, 24:32] = (pixels[:, 24:32] + 1) % 17
    logits, others = (digits_by_block.predict(model, x, block) for x in (pixels, changed))
    differs = (logits - others).abs().amax(dim=(0, 2)) > 1e-5
    assert differs.tolist() == [False] * 32 + [True] * 32


@pytest.mark.sampled
@pytest.mark.parametrize("block", [1, 8])
def test_samples_have_the_logits_of_one_call(block):
    model = digits_by_block.build("lightnet", block).eval()
    pixels, logits = digits_by_block.sample(model, 2, block)
    torch.testing.assert_close(
        logits, digits_by_block.predict(model, pixels, block), atol=1e-5, rtol=1e-5
    )
    bits = digits_by_block.bits_per_pixel(model, pixels, block)
    likelihood = logits.log_softmax(-1).gather(-1, pixels.unsqueeze(-1)).mean().item()
    assert bits == pytest.approx(-likelihood / math.log(2), rel=1e-4)


def test_a_short_run_prints_bits_and_digits(capsys):
    digits_by_block.main(["--steps", "4", "--samples", "2", "--blocks", "16"])
    first, calls, *rows = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"blocks of 16 pixels: [2-5]\.\d{3} bits per held-out pixel", first)
    assert calls == "2 images in 4 calls"
    assert [len(row) for row in rows] == [8 + 3 + 8] * 8
