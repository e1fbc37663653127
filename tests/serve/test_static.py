from __future__ import annotations

import re
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from hvdtrain.serve.app import STATIC

SCRIPTS = sorted(STATIC.glob("*.js"))
PAGES = sorted(STATIC.glob("*.html"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_imports_of_scripts_exist_and_are_used(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    for name in re.findall(r"""(?:from|import\() ?"(\./[^"]+)""", text):
        assert (STATIC / name).is_file(), name
    for names, module in re.findall(r'import \{([^}]+)\} from "\./(\w+\.js)"', text):
        exported = (STATIC / module).read_text(encoding="utf-8")
        for name in names.split(","):
            assert re.search(rf"export [a-z ]*\b{name.strip()}\b", exported), (module, name)
            assert len(re.findall(rf"\b{name.strip()}\b", text)) > 1, f"{name} is not used"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_never_interpret_text_as_html_or_code(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\(|new Function",
        text,
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_pages_have_no_inline_scripts_or_external_links(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"<style|\sstyle=|\son\w+=|https?:|<script>", text)
    for name in re.findall(r'(?:src|href)="/static/([^"]+)"', text):
        assert (STATIC / name).is_file(), name


def test_styles_and_scripts_have_no_external_links() -> None:
    for path in [*SCRIPTS, *STATIC.glob("*.css")]:
        for link in re.findall(r"https?://[^\s\"')]+", path.read_text(encoding="utf-8")):
            assert link.startswith("http://www.w3.org/"), link


def test_static_files_are_revalidated(page: TestClient) -> None:
    for html in ("/", "/login"):
        assert page.get(html).headers["cache-control"] == "no-store"
        links = re.findall(r'(?:src|href)="(/static/[^"]+)"', page.get(html).text)
        assert "/static/style.css" in links
    for name in ("main.js", "vendor/uPlot.esm.js"):
        response = page.get(f"/static/{name}")
        assert response.content == (STATIC / name).read_bytes()
        assert response.headers["content-type"].startswith("text/javascript")
        assert response.headers["cache-control"] == "no-cache"
        known = {"if-none-match": response.headers["etag"]}
        again = page.get(f"/static/{name}", headers=known)
        assert (again.status_code, again.content) == (304, b"")
    for name in ("", "none.js", "vendor", "../app.py", "%2e%2e/app.py"):
        assert page.get(f"/static/{name}").status_code == 404
