"""The pictures of the documentation are those that tools/pictures.py draws, and can be read."""

import importlib.util
import re
from xml.etree import ElementTree

import pytest

from helpers.pages import ROOT

pytestmark = pytest.mark.quick

spec = importlib.util.spec_from_file_location("pictures", ROOT / "tools" / "pictures.py")
pictures = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pictures)

PAGES = {"white": "#ffffff", "the theme's dark page": "#1e2129", "GitHub's dark page": "#0d1117"}


def luminance(colour):
    """Return the relative luminance of a colour, as WCAG 2 defines it."""
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_the_file_is_what_the_script_draws(name):
    drawn = pictures.PICTURES[name]()
    assert (pictures.FOLDER / name).read_text(encoding="utf-8") == drawn
    root = ElementTree.fromstring(drawn)
    kinds = [element.tag.partition("}")[2] for element in root]
    assert kinds[:2] == ["title", "desc"]  # for screen readers
    assert all(colour in pictures.COLOURS for colour in re.findall(r"#[0-9a-f]{6}", drawn))


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("colour", pictures.COLOURS)
def test_a_colour_can_be_read_on_light_and_dark_pages(colour, page):
    darker, lighter = sorted((luminance(colour), luminance(PAGES[page])))
    least = 3.9 if colour == pictures.TEXT else 3.0
    assert (lighter + 0.05) / (darker + 0.05) >= least


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_a_picture_on_a_page_has_an_alternative_text(page):
    for text in re.findall(r"!\[([^\]]*)\]\(", page.read_text(encoding="utf-8")):
        assert len(text) > 20
