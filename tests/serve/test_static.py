"""The files of the page: complete, and nothing in them that turns text into HTML."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from hvdtrain.serve.app import STATIC
from hvdtrain.serve.static_files import StaticFiles

SCRIPTS = sorted(STATIC.glob("*.js"))
PAGES = sorted(STATIC.glob("*.html"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_what_a_script_imports_is_there(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    for name in re.findall(r"""(?:from|import\() ?"(\./[^"]+)""", text):
        assert (STATIC / name).is_file(), name
    for names, module in re.findall(r'import \{([^}]+)\} from "\./(\w+\.js)"', text):
        exported = (STATIC / module).read_text(encoding="utf-8")
        for name in names.split(","):
            assert re.search(rf"export [a-z ]*\b{name.strip()}\b", exported), (module, name)
            assert len(re.findall(rf"\b{name.strip()}\b", text)) > 1, f"{name} is not used"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_no_text_becomes_html_or_code(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\(|new Function",
        text,
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_pages_hold_no_scripts_and_ask_nobody_else(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"<style|\sstyle=|\son\w+=|https?:|<script>", text)
    for name in re.findall(r'(?:src|href)="/static/([^"]+)"', text):
        assert (STATIC / name).is_file(), name


def test_styles_and_scripts_ask_nobody_else() -> None:
    for path in [*SCRIPTS, *STATIC.glob("*.css")]:
        for link in re.findall(r"https?://[^\s\"')]+", path.read_text(encoding="utf-8")):
            assert link.startswith("http://www.w3.org/"), link


def test_a_browser_keeps_files_until_there_are_others(page: TestClient) -> None:
    html = page.get("/").text
    links = re.findall(r'(?:src|href)="(/static/[^"]+)"', html)
    word = links[0].split("/")[2]
    assert all(link.startswith(f"/static/{word}/") for link in links)
    for link in links:
        answer = page.get(link)
        assert (answer.status_code, "immutable" in answer.headers["cache-control"]) == (200, True)
    assert page.get(f"/static/{word}/main.js").headers["content-type"].startswith("text/javascript")
    assert f"/static/{word}/login.js" in page.get("/login").text
    for name in ("main.js", "vendor/uPlot.esm.js"):
        answer = page.get(f"/static/{name}")
        assert answer.content == (STATIC / name).read_bytes()
        assert answer.headers["cache-control"] == "no-cache"
    for name in ("", "none.js", f"{word}/", "0" * 16 + "/main.js", "../app.py", "%2e%2e/app.py"):
        assert page.get(f"/static/{name}").status_code == 404


def test_other_files_have_other_links(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text('<script src="/static/a.js">')
    pages = []
    for content in ("1", "1", "2"):
        (tmp_path / "a.js").write_text(content)
        pages.append(StaticFiles(tmp_path).page("index.html").body)
    assert pages[0] == pages[1] != pages[2]
