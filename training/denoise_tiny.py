"""Train ``denoise-tiny`` on synthetic light-sheet volumes and say what it gained on unseen ones.

    python training/denoise_tiny.py --out src/penstock/models/denoise_tiny.safetensors

Every volume is made on the spot and every noise is drawn once, so nothing can be learnt by heart.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from penstock.data.volumes import CAMERA_OFFSET, PSF_SIGMA, clean_volume, noisy
from penstock.models.unet3d import denoise_tiny

Volume = NDArray[np.float32]

VOLUME_SIDE = 96
CROP_SIDE = 48
CROPS_PER_VOLUME = 2
VOLUMES_PER_STEP = 2
BRIGHT_PERCENTILE = 99.5
POOL_SIZE = 12
STEPS_PER_NEW_VOLUME = 4
PEAK_LEARNING_RATE = 4e-3

PERCENTILES = (0.5, 99.9)
"""Penstock's default normalisation."""
NOISE_LEVELS = {"low": (4.0, 5.0), "demo": (10.0, 10.0), "high": (25.0, 20.0)}
"""Gain and read noise of the report."""
HALO = 8
HELD_OUT_SHAPE = (48, 96, 96)
FIRST_HELD_OUT_SEED = 900_000
"""Out of reach of the training seeds, which count up from ``--seed`` times ten million."""
TUBE_PEAKS = (1000.0, 120.0, 60.0, 30.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--out", type=Path, default=Path("denoise_tiny.safetensors"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--report", type=Path, help="only report on these weights")
    parser.add_argument("--volumes", type=int, default=16, help="unseen volumes of the report")
    options = parser.parse_args()
    if options.device != "cpu" and not torch.cuda.is_available():
        parser.error(f"--device {options.device}: torch sees no CUDA device here; there is cpu")

    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    net = denoise_tiny().to(options.device)
    if options.report:
        net.load_state_dict(load_file(options.report))
        report(net, options.device, options.volumes)
        return
    # Channels last is what a CPU convolves fastest; PyTorch's stubs do not know the argument.
    net = net.to(memory_format=torch.channels_last_3d)
    train(net, options.steps, options.seed, options.device)
    metadata = {
        "script": "training/denoise_tiny.py",
        "seed": str(options.seed),
        "steps": str(options.steps),
    }
    weights = {name: value.cpu().contiguous() for name, value in net.state_dict().items()}
    save_file(weights, options.out, metadata)
    print(f"{options.out}: {options.out.stat().st_size} bytes")
    report(net, options.device, options.volumes)


def train(net: nn.Module, steps: int, seed: int, device: str) -> None:
    # Starts as the identity, rather than as noise that must be unlearnt first.
    nn.init.zeros_(net.get_parameter("outc.conv.weight"))
    nn.init.zeros_(net.get_parameter("outc.conv.bias"))
    optimizer = torch.optim.Adam(net.parameters(), lr=PEAK_LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, PEAK_LEARNING_RATE, total_steps=steps, pct_start=0.05, cycle_momentum=False
    )
    started, losses = time.perf_counter(), []
    for step, (noisy_BCZYX, clean_BCZYX) in enumerate(batches(steps, seed)):
        x, truth = noisy_BCZYX.to(device), clean_BCZYX.to(device)
        # The decibels that each crop lacks to its noisy self. A plain mean of squares would care
        # for the noisiest crops only, a mean of ratios for those with the least noise.
        left = (net(x) - truth).square().mean(dim=(1, 2, 3, 4))
        loss = 10 * torch.log10(left / (x - truth).square().mean(dim=(1, 2, 3, 4))).mean()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if (step + 1) % 50 == 0:
            gain, seconds = -np.mean(losses[-50:]), time.perf_counter() - started
            print(f"step {step + 1}: gain {gain:.2f} dB in training, {seconds:.0f} s", flush=True)


def psnr(clean: Volume, image: NDArray[np.generic]) -> float:
    """Peak signal-to-noise ratio in decibels; the peak is the range of the truth."""
    error = np.mean(np.square(clean - np.asarray(image, np.float64)))
    return float(20 * np.log10(np.ptp(clean) / np.sqrt(error)))


def batches(steps: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """For each step a noisy and a clean batch, (B, 1, 48, 48, 48) each, normalised alike."""
    rng = np.random.default_rng(seed)
    seeds = iter(range(seed * 10_000_000, (seed + 1) * 10_000_000))
    pool: list[Volume] = []
    for step in range(steps):
        if step % STEPS_PER_NEW_VOLUME == 0:
            wanted = 1 if pool else POOL_SIZE
            pool += [clean_volume((VOLUME_SIDE,) * 3, next(seeds)) for _ in range(wanted)]
            del pool[:-POOL_SIZE]
        pairs: list[tuple[Volume, Volume]] = []
        for index in rng.choice(len(pool), VOLUMES_PER_STEP, replace=False):
            pairs += crops(pool[index], next(seeds), rng)
        x, truth = (np.stack(side)[:, None] for side in zip(*pairs, strict=True))
        yield torch.from_numpy(x), torch.from_numpy(truth)


def crops(clean: Volume, seed: int, rng: np.random.Generator) -> Iterator[tuple[Volume, Volume]]:
    """Some noisy and clean crops of one volume under one exposure and one camera."""
    # Brightness, background and noise over ten-fold ranges: a user's camera is none of ours.
    light = (clean - np.float32(CAMERA_OFFSET)) * np.float32(log_uniform(rng, 0.3, 3))
    light += np.float32(log_uniform(rng, 1, 100))
    clean = light + np.float32(CAMERA_OFFSET)
    gain, read_noise = log_uniform(rng, 2, 40), log_uniform(rng, 2, 30)
    image = noisy(clean, seed, gain=gain, read_noise=read_noise)
    whole = np.percentile(image, PERCENTILES)
    bright = np.argwhere(light > np.percentile(light, BRIGHT_PERCENTILE))
    for number in range(CROPS_PER_VOLUME):
        corner = rng.integers(0, VOLUME_SIDE - CROP_SIDE + 1, 3)
        # Left to chance, few crops hold a cell body, and most of the error is there.
        if rng.random() < 0.5:
            corner = bright[rng.integers(len(bright))] - rng.integers(0, CROP_SIDE, 3)
            corner = np.clip(corner, 0, VOLUME_SIDE - CROP_SIDE)
        box = tuple(slice(c, c + CROP_SIDE) for c in corner)
        x, truth = image[box], clean[box]
        # Jobs normalise by the whole volume or by the block, where there may be little to see.
        lower, upper = whole if number % 2 == 0 else np.percentile(x, PERCENTILES)
        flips = tuple(axis for axis in (1, 2, 3) if rng.random() < 0.5)
        # The blur is the same along y and x only.
        axes = (0, 1, 3, 2) if rng.random() < 0.5 else (0, 1, 2, 3)
        pair = np.stack([x, truth]).astype(np.float32)
        pair = (pair - np.float32(lower)) / np.float32(upper - lower)
        x, truth = np.flip(pair, flips).transpose(axes).copy()
        yield x, truth


def log_uniform(rng: np.random.Generator, low: float, high: float) -> float:
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))


def denoise(net: nn.Module, image: NDArray[np.uint16], device: str) -> Volume:
    """A whole volume through the net, ADU; normalised and reflected at its faces as by Penstock."""
    lower, upper = np.percentile(image, PERCENTILES)
    padded = np.pad(image, HALO, mode="reflect")
    x = torch.from_numpy(((padded - lower) / (upper - lower)).astype(np.float32))
    with torch.no_grad():
        y = net(x[None, None].to(device)).cpu().numpy()[0, 0]
    y = y[HALO:-HALO, HALO:-HALO, HALO:-HALO]
    return np.asarray(y * (upper - lower) + lower, np.float32)


def report(net: nn.Module, device: str, volumes: int) -> None:
    """Print gain, bias and what becomes of dim structures, on volumes never trained on."""
    net.eval()
    print(f"{volumes} unseen volumes of {HELD_OUT_SHAPE}; PSNR peak: range of the truth")
    print("| noise | gain, read noise | PSNR before | after | mean, least, most gained | bias |")
    print("|---|---|---|---|---|---|")
    for name, (gain, read_noise) in NOISE_LEVELS.items():
        before, after, bias = [], [], []
        for seed in range(FIRST_HELD_OUT_SEED, FIRST_HELD_OUT_SEED + volumes):
            clean = clean_volume(HELD_OUT_SHAPE, seed)
            image = noisy(clean, seed + 1_000, gain=gain, read_noise=read_noise)
            result = denoise(net, image, device)
            before.append(psnr(clean, image))
            after.append(psnr(clean, result))
            bias.append(float(np.mean(result - clean, dtype=np.float64)))
        gained = np.subtract(after, before)
        print(
            f"| {name} | {gain:g}, {read_noise:g} "
            f"| {np.mean(before):.1f} dB | {np.mean(after):.1f} dB "
            f"| {np.mean(gained):.1f}, {np.min(gained):.1f}, {np.max(gained):.1f} dB "
            f"| {np.mean(bias):+.2f} ADU, at most {np.max(np.abs(bias)):.2f} |"
        )
    print("straight tubes over a background of 40 ADU, demo noise")
    print("| peak | height left | light left |")
    print("|---|---|---|")
    for peak, (height, light) in tubes_left(net, device).items():
        print(f"| {peak:g} ADU | {height:.0%} | {light:.0%} |")


def tubes_left(net: nn.Module, device: str) -> dict[float, tuple[float, float]]:
    """By peak, what denoising leaves of thin tubes along x, as fractions of the truth.

    The height is that of the true profile fitted to the result, so that blur counts as a loss; the
    light is the sum over a cross-section of 13 x 13 voxels, so that it does not.
    """
    z, y = np.arange(32)[:, None, None], np.arange(40 * len(TUBE_PEAKS))[:, None]
    # Half a voxel wide itself, so nearly as narrow as the blur lets anything be.
    sigma_z, sigma_y = np.hypot(0.5, PSF_SIGMA[0]), np.hypot(0.5, PSF_SIGMA[1])
    profiles = [
        np.exp(-0.5 * (np.square((y - 20 - 40 * i) / sigma_y) + np.square((z - 16) / sigma_z)))
        for i in range(len(TUBE_PEAKS))
    ]
    light = 40 + sum(p * profile for p, profile in zip(TUBE_PEAKS, profiles, strict=True))
    clean = np.broadcast_to(CAMERA_OFFSET + light, (32, y.size, 96)).astype(np.float32)
    gain, read_noise = NOISE_LEVELS["demo"]
    result = denoise(net, noisy(clean, 77, gain=gain, read_noise=read_noise), device)
    across = (result - CAMERA_OFFSET - 40).mean(axis=2, keepdims=True)
    left = {}
    for number, (peak, profile) in enumerate(zip(TUBE_PEAKS, profiles, strict=True)):
        height = float((across * profile).sum() / (peak * np.square(profile).sum()))
        section = (slice(10, 23), slice(14 + 40 * number, 27 + 40 * number))
        light = float(across[section].sum() / (peak * profile[section].sum()))
        left[peak] = (height, light)
    return left


if __name__ == "__main__":
    main()
