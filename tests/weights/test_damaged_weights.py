"""Changed files of weights: each is refused by its name and changes nothing, or is loaded."""

import copy
import json
import os
import random

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import manyhands as mh
from helpers.memory import little_memory
from helpers.mutations import HOLE, VALUES, Raw, changed, dump

TIMES = 60  # changes of each kind of file


class Counter(nn.Linear):
    seen = 0

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"] + 1


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def change_safetensors(folder, dice):
    path = folder / "model.safetensors"
    save_file(model(1).state_dict(), path)
    data = path.read_bytes()
    head = 8 + int.from_bytes(data[:8], "little")
    header, words = changed(json.loads(data[8:head]), dice)
    text = dump(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[head:])
    return path, words


def change_index(folder, dice):
    state = model(1).state_dict()
    where = {}
    for number, name in enumerate(state):
        file = f"model-{number:05d}.safetensors"
        save_file({name: state[name]}, folder / file)
        where[name] = file
    index, words = changed({"metadata": {"total_size": 1}, "weight_map": where}, dice)
    path = folder / "model.safetensors.index.json"
    path.write_text(dump(index))
    return folder, words


def change_state_dict(folder, dice):
    """Change a value of the dict that is pickled, or a byte of the pickle."""
    path = folder / "pytorch_model.bin"
    state = dict(model(1).state_dict())
    name = dice.choice(list(state))
    value = dice.choice(
        [v for v in VALUES if not isinstance(v, Raw)]
        + [state[name].to_sparse(), state[name].to("meta"), state[name][None], state[name].long()]
        + [b"x", {1: 2}]
    )
    kind = dice.choice(("value", "name", "all", "byte", "byte", "byte"))
    if kind == "value":
        state[name] = value
    elif kind == "name":
        state[dice.choice((5, None, ("a",), name + "x", "module." + name))] = state.pop(name)
    torch.save(value if kind == "all" else state, path)
    if kind == "byte":
        data = bytearray(path.read_bytes())
        for _ in range(dice.choice((1, 1, 10))):
            data[dice.randrange(len(data))] = dice.randrange(256)
        path.write_bytes(data)
    return path, f"{kind} of {name}: {value!r:.60}"


def change_bytes(folder, dice):
    """Cut a file, or let it be gigabytes of nothing."""
    kinds = {
        "model.safetensors": lambda path: save_file(model(1).state_dict(), path),
        "pytorch_model.bin": lambda path: torch.save(model(1).state_dict(), path),
        "model.safetensors.index.json": lambda path: path.write_text('{"weight_map": {"a": "b"}}'),
    }
    name = dice.choice(list(kinds))
    path = folder / name
    kinds[name](path)
    size = path.stat().st_size
    kept = dice.choice((0, 1, 8, 9, size // 2, size - 1))
    with path.open("r+b") as file:
        if dice.random() < 0.5 and path.suffix == ".safetensors":
            file.write((HOLE - 8).to_bytes(8, "little"))
            kept = max(8, kept)
        file.truncate(kept)
        if dice.random() < 0.7:
            file.truncate(HOLE)
    return path, f"{kept} bytes of {path.stat().st_size}"


CHANGES = [change_safetensors, change_index, change_state_dict, change_bytes]


@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights_are_refused_by_name_or_loaded(change, tmp_path):
    dice = random.Random(0)
    problems = []
    refused = 0
    for number in range(int(os.environ.get("TIMES", TIMES))):
        folder = tmp_path / str(number)
        folder.mkdir()
        path, words = change(folder, dice)
        here = model()
        before = copy.deepcopy(here.state_dict())
        try:
            with little_memory():
                mh.load_weights(here, path)
        except (ValueError, FileNotFoundError, RuntimeError) as error:
            refused += 1
            torchs = type(error) is RuntimeError and "Error(s) in loading" in str(error)
            if not torchs and (type(error) is RuntimeError or str(folder) not in str(error)):
                problems.append(f"{number} {words}: {error!r:.300}")
            after = here.state_dict()
            if any(not torch.equal(before[name], after[name]) for name in before):
                problems.append(f"{number} {words}: changed by {error!r:.300}")
        except BaseException as error:
            problems.append(f"{number} {words}: {error!r:.300}")
    assert not problems, f"{len(problems)}:\n" + "\n".join(problems)
    assert refused > number / 4


def test_a_module_that_refuses_its_extra_state_leaves_the_model_as_it_was(tmp_path):
    state = Counter(2, 2).state_dict()
    path = tmp_path / "state.pt"
    for wrong in ({}, {"seen": "x"}, 5, None):
        torch.save({**state, "_extra_state": wrong}, path)
        here = Counter(2, 2)
        before = here.weight.detach().clone()
        with pytest.raises(ValueError, match=r"_extra_state' of .*state\.pt has refused its state"):
            mh.load_weights(here, path)
        assert torch.equal(here.weight, before) and here.seen == 1
