"""The house's own rules about names, which no linter knows."""

import ast
import collections
import doctest
import inspect
import pathlib
import re

import pytest

import manyhands as mh
from helpers.public import PUBLIC
from manyhands import errors

pytestmark = pytest.mark.quick

SOURCE = pathlib.Path(mh.__file__).parent
MODULES = {
    ".".join(path.relative_to(SOURCE).with_suffix("").parts): ast.parse(path.read_text())
    for path in sorted(SOURCE.rglob("*.py"))
}
ERRORS = {
    name: kind
    for name, kind in vars(errors).items()
    if inspect.isclass(kind) and kind.__module__ == errors.__name__
}
RULES = ["AdaScale", "AdamScale", "LinearScale", "SqrtScale", "LEGWScale", "NoiseScale"]
RULES_AND_METHODS = [*RULES, "LocalSGD", "BMUF", "SlowMo", "DiLoCo"]


def test_no_two_modules_define_a_class_of_one_name():
    defined = collections.defaultdict(list)
    for module, tree in MODULES.items():
        if module == "fairscale":  # its classes derive from ours, and have fairscale's names
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                defined[node.name].append(module)
    assert {name: where for name, where in defined.items() if len(where) > 1} == {}


@pytest.mark.parametrize("name", {**PUBLIC, **ERRORS})
def test_a_public_name_has_an_example_in_its_docstring(name):
    finder = doctest.DocTestFinder(recurse=False)
    (test,) = finder.find({**PUBLIC, **ERRORS}[name], name, module=False, globs={})
    assert test.examples, f"{name} has no example (test_public.py runs them)"


@pytest.mark.parametrize("name", RULES_AND_METHODS)
def test_the_docstring_of_a_rule_or_method_has_its_formula_and_paper(name):
    text = inspect.getdoc(getattr(mh, name))
    assert re.search(r"^    \w+ [-+]?= .+$", text, re.MULTILINE), "no formula"
    assert re.search(r"arXiv:\d{4}\.\d{4,5}|ICASSP 2016", text), "no paper"


def test_the_reference_lists_every_public_name_once():
    page = (pathlib.Path(__file__).parents[1] / "docs" / "api.md").read_text()
    listed = re.findall(r"^::: manyhands\.(?!integrations)([\w.]+)$", page, re.MULTILINE)
    aliases = {"FSDP"}  # the same class, which is mentioned there
    assert sorted(listed) == sorted({*PUBLIC, "errors"} - aliases)


def test_the_citation_has_the_version():
    citation = (pathlib.Path(__file__).parents[1] / "CITATION.cff").read_text()
    assert f"\nversion: {mh.__version__}\n" in citation


def test_every_module_says_what_it_holds():
    bare = [module for module, tree in MODULES.items() if not ast.get_docstring(tree)]
    assert bare == []


PACKAGES = sorted(path.parent for path in SOURCE.rglob("*/__init__.py"))


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_the_map_of_a_package_names_its_files_and_no_others(package):
    text = ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
    files = {path.name for path in package.glob("*.py")} - {"__init__.py"}
    folders = {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}
    # A line of the map begins with a file or a folder, or with several files.
    rows = [re.match(r"\s*((?:\w+(?:\.py|/)\s+)+)", line) for line in text.splitlines()]
    named = {name for row in rows if row for name in row.group(1).split()}
    assert named == files | folders


def test_imports_go_one_way():
    """No module imports, even in a function or for its types, what imports it."""
    imports = {
        module: set(imported(module, tree)) & MODULES.keys() for module, tree in MODULES.items()
    }
    while leaves := {module for module, needs in imports.items() if not needs & imports.keys()}:
        for module in leaves:
            del imports[module]
    assert imports == {}, "these modules import each other, or what does"


PRIVATE = ("_tensors", "_optimizers", "_ranks")
SHARED = {*PRIVATE, "_arguments", "_warn", "_version", "errors", ""}
WAYS = {"scaling", "ramp", "sharding", "blocks"}


def folder_imports(depth):
    """The folders that each folder imports, cut to this depth; `__init__` files may import all."""
    found = collections.defaultdict(set)
    for module, tree in MODULES.items():
        *home, name = module.split(".")
        for other in imported(module, tree):
            there = other.split(".")[:-1]
            if home and name != "__init__" and there and home[:depth] != there[:depth]:
                found["/".join(home[:depth])].add("/".join(there[:depth]))
    return found


def test_folders_import_one_way():
    imports = folder_imports(depth=9)
    while leaves := {folder for folder, needs in imports.items() if not needs & imports.keys()}:
        for folder in leaves:
            del imports[folder]
    assert imports == {}, "these folders import each other"


def test_private_folders_import_no_public_folder():
    imports = folder_imports(depth=1)
    assert {folder: imports[folder] - SHARED for folder in PRIVATE} == {
        folder: set() for folder in PRIVATE
    }


def test_no_package_imports_the_tools():
    imports = folder_imports(depth=1)
    assert [folder for folder in imports if "tools" in imports[folder]] == []


def test_only_ramp_imports_another_way():
    """docs/architecture.md states the reason."""
    imports = folder_imports(depth=1)
    found = {way: imports[way] & WAYS for way in WAYS if imports[way] & WAYS}
    assert found == {"ramp": {"scaling"}}


def imported(module, tree):
    """The modules of ours that a module imports from, by their names below `manyhands`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("manyhands"):
            base = node.module.removeprefix("manyhands").lstrip(".")
            for alias in node.names:
                full = f"{base}.{alias.name}".lstrip(".")
                if full != module and full in MODULES:
                    yield full
                elif base and base != module:
                    yield base if base in MODULES else f"{base}.__init__"


def test_the_files_of_the_walks_exist():
    """docs/architecture.md counts them."""
    page = (pathlib.Path(__file__).parents[1] / "docs" / "architecture.md").read_text()
    walks = re.findall(r"^\| a .* \| (\d+) \| (`.*`) \|$", page, re.MULTILINE)
    assert len(walks) == 6
    for count, files in walks:
        names = files.replace("`", "").split()
        assert len(set(names)) == int(count)
        assert [name for name in names if not (SOURCE / name).exists()] == []


def test_no_package_uses_what_is_private_in_another():
    """A loop that is not ours, data and blocks use a rule's port, and public names."""
    private, used = collections.defaultdict(set), []
    for module, tree in MODULES.items():
        package = module.split(".")[0]
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                private[package].add(node.name)
            if isinstance(node, ast.Attribute) and re.match("_[a-z]", node.attr):
                if isinstance(node.ctx, ast.Store):
                    private[package].add(node.attr)
                if ast.unparse(node.value) not in ("self", "cls"):
                    used.append((package, module, node))
    theirs = {"accelerator", "trainer", "model", "module", "options"}  # not ours
    assert [
        f"{module}:{node.lineno}: {ast.unparse(node)}"
        for package, module, node in used
        if package in ("blocks", "data", "integrations", "ramp")
        and node.attr not in private[package]
        and any(node.attr in names for names in private.values())
        and ast.unparse(node.value) not in theirs
    ] == []


# The beginnings of words: "accelerat" is Accelerate, `Accelerator`, "accelerated".
TRAINERS = r"""accelerat lightning fabric transformers hugging deepspeed megatron ray\b torchft
    mosaic colossal ignite catalyst skorch fastai"""


@pytest.mark.parametrize("package", ["_ranks", "_tensors", "_optimizers", "scaling"])
def test_no_trainer_is_mentioned_or_imported(package):
    """In names, strings, comments and docstrings. `torch.accelerator` is torch's word for a device.

    `manyhands.integrations` knows trainers. adaptdl, fairscale and fairseq are originals, and may
    be mentioned.
    """
    words = re.compile(rf"\b_?(?:{'|'.join(TRAINERS.split())})", re.IGNORECASE)
    device = re.compile(r"torch\.accelerator(\.current_accelerator)?\b")
    lines = [
        (f"{path.name}:{number}", device.sub("", line))
        for path in sorted((SOURCE / package).rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
    ]
    assert len(lines) > 500
    assert [f"{where}: {line}" for where, line in lines if words.search(line)] == []


def test_nothing_is_unpickled_but_tensors_and_named_types():
    """`torch.load` has weights_only=True everywhere, and `pickle` loads nothing."""
    for module, tree in MODULES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner, name = ast.unparse(node.func.value), node.func.attr
                if (owner, name) == ("torch", "load"):
                    safe = {k.arg: ast.unparse(k.value) for k in node.keywords}
                    assert safe.get("weights_only") == "True", module
                assert owner != "pickle" or name not in ("load", "loads", "Unpickler"), module
