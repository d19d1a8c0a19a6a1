"""Train on scikit-learn's digits, and probe larger batch sizes on branches of the run.

    python examples/probe_batch.py --steps 300 --at 150

`probe` saves the run and trains branches with 1, 2, 4 and 8 times the batch, on equal samples and
with equal random state. Each of six repeats uses different samples. A paired test of the losses on
held-out batches determines which batch sizes are no worse:

    d   mean difference to the branch of scale 1, over R repeats and H held-out batches
    a   standard deviation of the repeats' differences; b: of the held-out batches' differences
    s   standard deviation of the loss at scale 1 between repeats

    d_high = d + sqrt((t a)^2 / R + (t b)^2 / H)               with Student's t at 95 %

The tolerance is c s, with c = sqrt(2) z(0.75) = 0.954: at this difference, a second run at scale 1
is better in three of four cases. With s_low, a lower bound of s, a branch is *no worse* if

    d - c s + sqrt((d_high - d)^2 + c^2 (s - s_low)^2) < 0     (Donner and Zou 2012)

and *worse* if this expression with the opposite bounds is above zero. The largest acceptable batch
is the last scale before the first scale that is not "no worse".

Requires scikit-learn, which installs scipy.
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
    """Train on all batches. The learning rate decays to zero in the last part (`cooldown`).

    A larger batch contains less noise, which immediately lowers the loss. The run has the same
    benefit when its learning rate decays, so the comparison requires a cooldown.
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
    """Return the verdict, the mean difference and an upper bound for each scale.

    make: `make(passes)` returns a new model and an optimizer with a scaling rule.
    batches: a list of batches for each repeat, of a length divisible by the passes of every scale.
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
        # The run's model is unchanged. Loading into a new branch restores the random state.
        branch, branch_optimizer = make(optimizer.passes)
        mh.load(folder, model=branch, optimizer=branch_optimizer)
    return {scale: compare(of_scale, losses[scales[0]]) for scale, of_scale in losses.items()}


def compare(branch, reference, confidence=0.95):
    """Compare the losses of a branch and of scale 1, as described above."""
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
    """Return the largest acceptable scale."""
    found, *others = verdicts
    for scale in others:
        if verdicts[scale][0] != "no worse":
            break
        found = scale
    return found


# -- digits --------------------------------------------------------------------------------------


def make_digits(passes):
    """Return a new model and an optimizer with a scaling rule for this number of passes."""
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, mh.AdaScale(plain, num_gradients_to_accumulate=passes)


def digits_loss(model, batch):
    """Return the mean loss of a batch."""
    images, labels = batch
    return cross_entropy(model(images), labels)


def draw(images, labels, count, batch_size):
    """Return batches of random samples."""
    chosen = torch.randint(len(labels), (count, batch_size))
    return [(images[rows], labels[rows]) for rows in chosen]


def main():
    """Train, probe larger batches, and continue with `Ramp` up to the largest acceptable batch."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--steps", type=int, default=600, help="end, in steps of a single small batch"
    )
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
