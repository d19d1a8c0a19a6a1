"""Train on scikit-learn's digits, try larger batch sizes on branches of the run, and go on.

    python examples/probe_batch.py --steps 300 --at 150

`probe` saves the run and trains branches from there: 1, 2, 4 and 8 times the batch, on the same
samples, from the same random state. In each of six repeats the samples are others. A paired test
of the losses on held-out batches says which batch sizes lose nothing:

    d   the mean difference to the branch of scale 1, over R repeats and H held-out batches
    a   the standard deviation of the repeats' differences; b: of the held-out batches' differences
    s   the standard deviation of the loss at scale 1 from repeat to repeat

    d_high = d + sqrt((t a)^2 / R + (t b)^2 / H)               with Student's t at 95 %

A branch may be behind by c s, with c = sqrt(2) z(0.75) = 0.954: at this distance another run at
scale 1 is better in three of four cases. With s_low, a lower bound of s, it is *no worse* if

    d - c s + sqrt((d_high - d)^2 + c^2 (s - s_low)^2) < 0     (Donner and Zou 2012)

and *worse* if the same with the other bounds is above zero. The largest batch that loses nothing
is the last before the first that is not "no worse".

Needs scikit-learn, which brings scipy.
"""

import argparse
import math
import tempfile
from statistics import NormalDist, fmean, stdev

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import manyhands as mh

MARGIN = math.sqrt(2) * NormalDist().inv_cdf(0.75)  # in standard deviations of scale 1's loss


def train_branch(model, optimizer, loss, batches, passes, cooldown):
    """Train on all batches; over the last part, the learning rate falls to zero.

    A larger batch averages more noise away, which lowers the loss at once. The run gets this anyway
    when its own rate falls, so that without the cooldown the larger batch would seem better.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    steps = len(batches) // passes
    for step in range(steps):
        left = 1 - (step + 0.5) / steps
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * min(1.0, left / cooldown)
        for batch in batches[step * passes : (step + 1) * passes]:
            (loss(model, batch) / passes).backward()
        optimizer.step()
        optimizer.zero_grad()


def probe(make, model, optimizer, loss, batches, held_out, scales=(1, 2, 4, 8), cooldown=0.5):
    """Return for each scale: the verdict, the mean difference, and its upper bound.

    make: `make(passes)` returns a new model and its optimizer under a scaling rule.
    batches: for each repeat a list of batches, whose number every scale's passes divide.
    """
    losses = {scale: [] for scale in scales}  # by repeat, and by held-out batch
    with tempfile.TemporaryDirectory() as folder:
        mh.save(folder, model=model, optimizer=optimizer)
        for of_repeat in batches:
            for scale in scales:
                passes = scale * optimizer.passes
                branch, branch_optimizer = make(passes)
                mh.load(folder, model=branch, optimizer=branch_optimizer)
                train_branch(branch, branch_optimizer, loss, of_repeat, passes, cooldown)
                branch.eval()
                with torch.no_grad():
                    losses[scale].append([float(loss(branch, batch)) for batch in held_out])
        # Into a new branch: the run's model is as it was, and the random state becomes so again.
        branch, branch_optimizer = make(optimizer.passes)
        mh.load(folder, model=branch, optimizer=branch_optimizer)
    return {scale: compare(of_scale, losses[scales[0]]) for scale, of_scale in losses.items()}


def compare(branch, reference, confidence=0.95):
    """Compare a branch's losses with those of scale 1: see the top of this file."""
    from scipy.stats import chi2, t

    if branch is reference:
        return "reference", 0.0, 0.0
    if not all(math.isfinite(loss) for repeat in branch for loss in repeat):
        return "worse", math.inf, math.inf
    pairs = zip(branch, reference, strict=True)
    differences = [[a - b for a, b in zip(*pair, strict=True)] for pair in pairs]
    by_repeat, by_batch = map(fmean, differences), map(fmean, zip(*differences, strict=True))
    mean, squares = fmean(map(fmean, differences)), 0.0
    for values in (list(by_repeat), list(by_batch)):
        count = len(values)
        squares += (t.ppf(confidence, count - 1) * stdev(values)) ** 2 / count
    spread, repeats = stdev(map(fmean, reference)), len(reference)
    lowest, highest = (
        spread * math.sqrt((repeats - 1) / chi2.ppf(level, repeats - 1))
        for level in (confidence, 1 - confidence)
    )
    beyond = mean - MARGIN * spread
    if beyond + math.sqrt(squares + (MARGIN * (spread - lowest)) ** 2) < 0:
        verdict = "no worse"
    elif beyond - math.sqrt(squares + (MARGIN * (highest - spread)) ** 2) > 0:
        verdict = "worse"
    else:
        verdict = "undecided"
    return verdict, mean, mean + math.sqrt(squares)


def largest(verdicts):
    """Return the last scale before the first that is not "no worse"."""
    found, *others = verdicts
    for scale in others:
        if verdicts[scale][0] != "no worse":
            break
        found = scale
    return found


# -- digits --------------------------------------------------------------------------------------


def make_digits(passes):
    """Return a new model, and its optimizer with a scaling rule for this number of passes."""
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, mh.AdaScale(plain, num_gradients_to_accumulate=passes)


def digits_loss(model, batch):
    """Return the mean loss of one batch."""
    images, labels = batch
    return cross_entropy(model(images), labels)


def draw(images, labels, count, batch_size):
    """Return batches of samples that are drawn at random."""
    chosen = torch.randint(len(labels), (count, batch_size))
    return [(images[rows], labels[rows]) for rows in chosen]


def main():
    """Train, try larger batches, and go on with `Ramp` up to the largest that loses nothing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=600, help="end, in steps of one small batch")
    parser.add_argument("--at", type=int, default=200, help="steps before the probe")
    parser.add_argument("--length", type=int, default=64, help="batches of each branch")
    parser.add_argument("--repeats", type=int, default=6, help="branches of each batch size")
    parser.add_argument("--batch-size", type=int, default=8, help="images in a batch")
    args = parser.parse_args()

    torch.manual_seed(0)
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    data = images.float()[:1400] / 16, labels[:1400]
    held_out = images.float()[1400:] / 16, labels[1400:]
    model, optimizer = make_digits(passes=1)
    for batch in draw(*data, args.at, args.batch_size):
        digits_loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    batches = [draw(*data, args.length, args.batch_size) for _ in range(args.repeats)]
    evaluated = draw(*held_out, 32, args.batch_size)
    found = probe(make_digits, model, optimizer, digits_loss, batches, evaluated)
    for scale, (verdict, mean, high) in found.items():
        print(f"scale {scale}   behind {mean:+.4f}, at most {high:+.4f}   {verdict}")

    ramp = mh.Ramp(optimizer, max_scale=largest(found))
    for micro_batches in ramp.over(draw(*data, 8 * args.steps, args.batch_size)):
        for batch in micro_batches:
            (digits_loss(model, batch) / len(micro_batches)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if optimizer.progress >= args.steps:
            break
    with torch.no_grad():
        right = (model(held_out[0]).argmax(1) == held_out[1]).float().mean()
    print(f"largest batch that loses nothing: {largest(found)}   {right:.1%} right at the end")


if __name__ == "__main__":
    main()
