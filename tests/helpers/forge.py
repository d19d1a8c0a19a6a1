"""Checkpoints whose index says something else than was saved, under a right checksum.

text = content(checkpoint)     the index's JSON, to be changed
sign(checkpoint, text)         write it back, with the checksum of what it says now
"""

import copy
import json
import random
import shutil
import zlib

import torch

from manyhands.checkpoint import _folder, _index

ODD = (
    None, True, -1, 0, 1, 2**40, 10**400, 1.5, "", "x", "\ud800", "\x1b[31m", "../x", [], [1], [[]],
    {}, {"$": "tensor"}, {"$": "tensor", "key": "nowhere"}, {"$": "tuple", "items": 3},
    {"$": "set", "items": [[1]]}, {"$": "float", "value": "x"}, {"$": "dtype", "value": "ones"},
    {"$": "device", "value": "nowhere"}, {"$": "bytes", "value": "x"}, {"$": "module", "value": {}},
)  # fmt: skip
DEEP = object()  # stands for JSON that is nested too deeply for Python


def content(checkpoint):
    text = (checkpoint / _folder.INDEX).read_text()
    return json.loads(text)["content"]


def sign(checkpoint, meta):
    text = meta if isinstance(meta, str) else json.dumps(meta, separators=(",", ":"))
    head = _index.HEAD.format(_index.VERSION, zlib.crc32(text.encode()))
    (checkpoint / _folder.INDEX).write_text(head + text + "}\n")


def places(meta):
    """Every container in some JSON, with each of its keys."""
    found = []
    waiting = [meta]
    while waiting:
        each = waiting.pop()
        keys = list(each) if isinstance(each, dict) else range(len(each))
        for key in keys:
            found.append((each, key))
            if isinstance(each[key], dict | list):
                waiting.append(each[key])
    return found


def mutate(meta, choose: random.Random):
    """Change one place of an index; returns the text of it, and what was done."""
    meta = copy.deepcopy(meta)
    everywhere = places(meta)
    where, key = choose.choice(everywhere)
    kind = choose.choice(("odd", "odd", "remove", "other", "add", "double", "deep"))
    before = json.dumps(where[key])[:60]
    if kind == "odd":
        where[key] = choose.choice(ODD)
    elif kind == "remove":
        del where[key]
    elif kind == "other":  # what stands at another place
        other, place = choose.choice(everywhere)
        where[key] = copy.deepcopy(other[place])
    elif kind == "add" and isinstance(where, dict):
        where[choose.choice(("", "$", "x", "step", "optimizer"))] = choose.choice(ODD)
    elif kind == "add":
        where.append(choose.choice(ODD))
    elif kind == "double" and isinstance(where, list):
        where.insert(key, where[key])
    else:
        where[key] = "deep"
        text = json.dumps(meta).replace('"deep"', "[" * 100_000 + "]" * 100_000, 1)
        return text, f"deep at {key!r}, which was {before}"
    return json.dumps(meta), f"{kind} at {key!r}, which was {before}"


def forge_many(setup, source, folder, times, seed=0):
    """Load forged copies; returns those that did harm, and how many were refused.

    Harm is another error than ValueError, a refusal that has changed something, and a state which
    was taken and cannot train.
    """
    choose, meta, wrong, refusals = random.Random(seed), content(source), [], 0
    forged = folder / "forged"
    shutil.copytree(source, forged)
    for _ in range(times):
        text, how = mutate(meta, choose)
        sign(forged, text)
        taken, problem = attempt(setup(), forged)
        refusals += not taken
        if problem:
            wrong.append(f"{how}: {problem}")
    return wrong, refusals


def attempt(setup, forged):
    """Whether a checkpoint was taken, and what was wrong about that."""
    import manyhands as mh

    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(1))
    before = setup.held(), torch.get_rng_state(), scaler.state_dict(), setup.scheduler.state_dict()
    try:
        mh.load(forged, **setup.given(), scaler=scaler)
    except ValueError as error:
        after = setup.held()
        same = all(torch.equal(before[0][name], after[name]) for name in before[0])
        same = same and torch.equal(before[1], torch.get_rng_state())
        same = same and before[2:] == (scaler.state_dict(), setup.scheduler.state_dict())
        if not same:
            return False, f"refused, and changed something: {error}"
        try:
            str(error).encode()
        except UnicodeEncodeError:
            return False, f"an error that cannot be printed: {error!r}"
        return False, "" if str(error).isprintable() else f"controls in the error: {error!r}"
    except BaseException as error:
        return False, f"{type(error).__name__}: {error}"
    try:
        setup.train(1)
        scaler.scale(torch.ones(1))
        torch.rand(1)
    except BaseException as error:
        return True, f"loaded, and then {type(error).__name__}: {error}"
    return True, ""
