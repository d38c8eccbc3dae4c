"""Small VAEs of diffusers with random weights."""

import diffusers
import torch


def tiny_vae(**changes):
    fields = {"block_out_channels": (4, 4), "norm_num_groups": 2, "latent_channels": 4}
    fields |= {
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
        "layers_per_block": 1,
        "scaling_factor": 0.5,
    }
    return diffusers.AutoencoderKL(**fields | changes).eval()


SIZE, CLASSES, TRAIN, TEST = 8, ("bird", "cat"), 5, 2  # images of each class


def save_vae(folder, *, seed=0, **changes):
    torch.manual_seed(seed)
    fields = {
        "block_out_channels": (8, 8),
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
        "norm_num_groups": 4,
        "latent_channels": 4,
        "scaling_factor": 0.5,
        "shift_factor": 0.25,
    }
    vae = diffusers.AutoencoderKL(**fields | changes)
    torch.nn.init.normal_(vae.quant_conv.weight, std=3.0)  # or all images would be much alike
    torch.nn.init.constant_(vae.quant_conv.bias[4:], -8.0)  # logarithms of variances
    vae.save_pretrained(folder)
    return str(folder)
